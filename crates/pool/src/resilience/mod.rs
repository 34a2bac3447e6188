//! Decorators that protect a handler and the services it depends on.

mod breaker;
mod shedding;

pub use breaker::{Breaker, BreakerError, BreakerHandler, BreakerOptions, BreakerState};
pub use shedding::{Shedding, SheddingError, SheddingHandler, SheddingOptions};
