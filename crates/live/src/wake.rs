//! Isolation from wakers, which run code of the application on the threads of live queries.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs code that wakes a task. A panic is caught and logged, because it must not affect other subscribers.
pub(crate) fn catch_panic(wake: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(wake)).is_err() {
        tracing::error!("waker of a subscriber panicked");
    }
}
