//! A broadcast channel between a stream of messages and local subscriptions, for clients that have one stream for each channel.

use bytes::Bytes;
use tokio::sync::broadcast;

/// Messages that the channel holds for a subscription.
const CAPACITY: usize = 1024;

/// A subscription.
pub(super) struct Listener(broadcast::Receiver<Bytes>);

/// Returns the sender of a new channel and its subscriptions.
pub(super) fn channel(count: usize) -> (broadcast::Sender<Bytes>, Vec<Listener>) {
    let sender = broadcast::Sender::new(CAPACITY);
    let listeners = (0..count).map(|_| Listener(sender.subscribe())).collect();
    (sender, listeners)
}

impl Listener {
    pub(super) async fn receive(&mut self) -> Bytes {
        self.0.recv().await.expect("no message was lost")
    }
}
