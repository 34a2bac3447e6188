//! Runs wakers, which are code of other crates, on the threads of live queries.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs code that wakes a task. A panic in it is logged and ends there: it concerns one subscriber, and the others still have to
/// be told.
pub(crate) fn shielded(wake: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(wake)).is_err() {
        tracing::error!("the waker of a subscriber panicked");
    }
}
