//! The operations of a Redis client in this comparison.

use std::ops::Deref;

/// A Redis client. Clones share its connection.
pub(super) trait Peer: Clone + Send + 'static {
    const NAME: &'static str;
    /// `Bytes`, or the closest type that the client supports.
    type Text: Deref<Target = [u8]> + Send;

    fn connect(port: u16) -> impl Future<Output = Self> + Send;
    fn get(&mut self, key: &'static str) -> impl Future<Output = Self::Text> + Send;
    fn set(&mut self, key: &'static str, value: &'static str) -> impl Future<Output = ()> + Send;
    /// Sends a `GET` of each key in one pipeline.
    fn pipeline(&mut self, keys: &'static [String]) -> impl Future<Output = Vec<Self::Text>> + Send;
    fn list_range(&mut self, key: &'static str) -> impl Future<Output = Vec<Self::Text>> + Send;
    fn multi_get(&mut self, keys: &'static [String]) -> impl Future<Output = Vec<Self::Text>> + Send;
}

/// Local subscriptions to one channel.
pub(super) trait Subscriber: Sized + Send + 'static {
    const NAME: &'static str;
    type Payload: Deref<Target = [u8]>;

    /// Subscribes `count` times. All subscriptions share one connection.
    fn subscribe(port: u16, channel: &'static str, count: usize) -> impl Future<Output = Vec<Self>> + Send;
    /// Receives the payload of the next message. Panics if a message was lost.
    fn receive(&mut self) -> impl Future<Output = Self::Payload> + Send;
}

/// A client with a client-side cache.
pub(super) trait CachingPeer: Send + 'static {
    const NAME: &'static str;
    type Text: Deref<Target = [u8]>;

    fn connect(port: u16) -> impl Future<Output = Self> + Send;
    /// Returns the value from the cache, or reads it from the server and keeps it.
    fn cached_get(&mut self, key: &'static str) -> impl Future<Output = Self::Text> + Send;
}

/// Panic message of failed requests.
pub(super) const EXPECT_REPLY: &str = "redis-server replies without an error";
