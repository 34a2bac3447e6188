//! Statistics, spans and the hook for slow commands.

mod slow_hook;
mod span;
mod stats;

pub use slow_hook::{SlowCommand, SlowHook};
pub(crate) use span::observed;
pub use stats::{ClientStats, Latency, TimeoutStats};
pub(crate) use stats::{ConnectionStats, Counters, LatencyGroup};
