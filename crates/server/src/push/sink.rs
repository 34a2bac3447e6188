//! Where the pushes of a connection go.

use std::fmt;

use tidewire_conn::MemoryHold;

use crate::protocol::disconnect::Disconnect;

/// The transport of a connection, as its subscriptions and the request path see it.
///
/// All calls come from any thread and return at once. Pushes are not handed in: the owner of the sink takes them, by
/// [`poll_push`](super::subscription::Subscription::poll_push), when it has been woken.
pub(crate) trait PushSink: fmt::Debug + Send + Sync {
    /// Asks the owner to poll a subscription.
    fn wake(&self, subscription: u64);

    /// Drops the unsent pushes of a subscription that has ended, or whose rows have changed. Returns whether there were any.
    fn take_back(&self, subscription: u64) -> bool;

    /// Records memory that is kept on behalf of the connection, until the result is dropped. None if the transport has no limit.
    fn hold(&self, bytes: usize) -> Option<MemoryHold>;

    /// Ends the connection.
    fn close(&self, disconnect: Disconnect);
}
