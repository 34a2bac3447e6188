//! Replies to blocking commands whose callers have gone away.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::Value;

/// A function that is called with each reply to a blocking command whose caller has gone away.
#[derive(Clone)]
pub struct UnclaimedHook(Arc<dyn Fn(UnclaimedReply) + Send + Sync>);

/// What a blocking command has returned to a caller that has gone away, such as an element that it popped from a list.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct UnclaimedReply {
    /// The name of the command as it was written.
    pub command: Box<str>,
    /// The reply.
    pub reply: Value,
}

impl UnclaimedHook {
    /// Calls `hook` with each unclaimed reply. It can send it to a task that pushes the element back to its list. It must not own a
    /// [`Client`](crate::Client), which it would keep open.
    ///
    /// The hook is called on a background task of the client, or in a destructor if the client is closed. It must not block. A panic is
    /// logged.
    pub fn new(hook: impl Fn(UnclaimedReply) + Send + Sync + 'static) -> Self {
        Self(Arc::new(hook))
    }

    pub(super) fn call(&self, unclaimed: UnclaimedReply) {
        // A panic in a destructor would abort the program if it is unwinding already.
        if catch_unwind(AssertUnwindSafe(|| (self.0)(unclaimed))).is_err() {
            tracing::error!("the hook for unclaimed replies panicked");
        }
    }
}

impl fmt::Debug for UnclaimedHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UnclaimedHook").finish_non_exhaustive()
    }
}
