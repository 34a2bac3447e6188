//! The client rustis. It does not support `Bytes`: its string type is a vector, to which it copies.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::StreamExt as _;
use rustis::cache::Cache;
use rustis::client::{BatchPreparedCommand, Client};
use rustis::commands::{ClientTrackingOptions, ListCommands, PubSubCommands, StringCommands};
use rustis::resp::BulkString;

use super::broadcast::{self, Listener};
use super::peer::{CachingPeer, EXPECT_REPLY, Peer, Subscriber};

/// How long the cache keeps a value, in seconds. Longer than a round.
const CACHE_SECONDS: u64 = 3600;

#[derive(Clone)]
pub(super) struct Rustis(Client);

pub(super) struct RustisSubscriber(Listener);

pub(super) struct RustisCache(Arc<Cache>);

impl Subscriber for RustisSubscriber {
    const NAME: &'static str = Rustis::NAME;
    type Payload = Bytes;

    async fn subscribe(port: u16, channel: &'static str, count: usize) -> Vec<Self> {
        let Rustis(client) = Rustis::connect(port).await;
        let mut messages = client.subscribe(channel).await.expect(EXPECT_REPLY);
        let (sender, listeners) = broadcast::channel(count);
        tokio::spawn(async move {
            while let Some(message) = messages.next().await {
                let payload = Bytes::copy_from_slice(message.expect(EXPECT_REPLY).payload());
                sender.send(payload).expect("the subscriptions are open");
            }
        });
        listeners.into_iter().map(Self).collect()
    }

    async fn receive(&mut self) -> Bytes {
        self.0.receive().await
    }
}

impl CachingPeer for RustisCache {
    const NAME: &'static str = Rustis::NAME;
    type Text = BulkString;

    async fn connect(port: u16) -> Self {
        let Rustis(client) = Rustis::connect(port).await;
        let cache = Cache::new(client, CACHE_SECONDS, ClientTrackingOptions::default());
        Self(cache.await.expect(EXPECT_REPLY))
    }

    async fn cached_get(&mut self, key: &'static str) -> BulkString {
        self.0.get(key).await.expect(EXPECT_REPLY)
    }
}

impl Peer for Rustis {
    const NAME: &'static str = "rustis";
    type Text = BulkString;

    async fn connect(port: u16) -> Self {
        Self(Client::connect(format!("127.0.0.1:{port}")).await.expect(EXPECT_REPLY))
    }

    async fn get(&mut self, key: &'static str) -> BulkString {
        self.0.get(key).await.expect(EXPECT_REPLY)
    }

    async fn set(&mut self, key: &'static str, value: &'static str) {
        self.0.set(key, value).await.expect(EXPECT_REPLY);
    }

    async fn pipeline(&mut self, keys: &'static [String]) -> Vec<BulkString> {
        let mut pipeline = self.0.create_pipeline();
        pipeline.reserve(keys.len());
        for key in keys {
            pipeline.get::<()>(key).queue();
        }
        pipeline.execute().await.expect(EXPECT_REPLY)
    }

    async fn list_range(&mut self, key: &'static str) -> Vec<BulkString> {
        self.0.lrange(key, 0, -1).await.expect(EXPECT_REPLY)
    }

    async fn multi_get(&mut self, keys: &'static [String]) -> Vec<BulkString> {
        self.0.mget(keys).await.expect(EXPECT_REPLY)
    }
}
