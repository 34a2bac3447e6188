//! Statistics, spans and the hook for slow commands.

mod slow_hook;
mod span;
mod stats;

pub(crate) use slow_hook::name as command_name;
pub use slow_hook::{SlowCommand, SlowHook};
pub(crate) use span::{observed, traced};
pub use stats::{ClientStats, ExclusiveStats, Latency, LoginStats, PubSubStats, TimeoutStats};
pub(crate) use stats::{ConnectionStats, Counters, LatencyGroup};
