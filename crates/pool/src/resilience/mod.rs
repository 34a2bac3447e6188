//! Decorators that protect a handler and the services it depends on.

mod breaker;
mod shedding;

pub use breaker::{Breaker, BreakerError, BreakerOptions, BreakerState, Guarded};
pub use shedding::{Shedding, SheddingError, SheddingOptions};
