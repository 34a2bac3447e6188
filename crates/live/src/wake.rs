//! Calls wakers, which are foreign code, on the threads of live queries.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs code that wakes a task. A panic is logged and caught, because it must not affect other subscribers.
pub(crate) fn shielded(wake: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(wake)).is_err() {
        tracing::error!("waker of a subscriber panicked");
    }
}
