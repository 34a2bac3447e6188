//! What a client of Redis does here, each by its own means.

use std::ops::Deref;

/// A client. Clones share its connection.
pub(super) trait Peer: Clone + Send + 'static {
    const NAME: &'static str;
    /// `Bytes`, or what comes nearest.
    type Text: Deref<Target = [u8]> + Send;

    fn connect(port: u16) -> impl Future<Output = Self> + Send;
    fn get(&mut self, key: &'static str) -> impl Future<Output = Self::Text> + Send;
    fn set(&mut self, key: &'static str, value: &'static str) -> impl Future<Output = ()> + Send;
    /// A `GET` of each key, sent together.
    fn pipeline(&mut self, keys: &'static [String]) -> impl Future<Output = Vec<Self::Text>> + Send;
    fn list_range(&mut self, key: &'static str) -> impl Future<Output = Vec<Self::Text>> + Send;
    fn multi_get(&mut self, keys: &'static [String]) -> impl Future<Output = Vec<Self::Text>> + Send;
}

/// Nothing fails here; if it does, the round is worth nothing.
pub(super) const WORKS: &str = "redis-server answers";
