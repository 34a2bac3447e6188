//! The destination of the pushes of a connection.

use std::fmt;

use tidewire_conn::MemoryHold;

use crate::protocol::disconnect::Disconnect;

/// The transport of a connection, as used by its subscriptions and by requests.
///
/// All methods may be called from any thread and do not block. Pushes are not passed to the sink: its owner pulls them with
/// [`poll_push`](super::subscription::Subscription::poll_push) after a wake-up.
pub(crate) trait PushSink: fmt::Debug + Send + Sync {
    /// Asks the owner to poll a subscription.
    fn wake(&self, subscription: u64);

    /// Drops the unsent pushes of a subscription that has ended or whose visible rows have changed. Returns whether there were any.
    fn discard_unsent(&self, subscription: u64) -> bool;

    /// Charges memory to the connection until the returned guard is dropped. Returns `None` if the transport has no memory limit.
    fn hold(&self, bytes: usize) -> Option<MemoryHold>;

    /// Closes the connection.
    fn close(&self, disconnect: Disconnect);
}
