//! redis-rs, with its multiplexed connection.

use bytes::Bytes;
use futures_util::StreamExt as _;
use redis::aio::MultiplexedConnection;
use redis::caching::CacheConfig;
use redis::{AsyncConnectionConfig, Client, Pipeline, cmd};

use super::broadcast::{self, Listener};
use super::peer::{CachingPeer, EXPECT_REPLY, Peer, Subscriber};

#[derive(Clone)]
pub(super) struct RedisRs(MultiplexedConnection);

pub(super) struct RedisRsSubscriber(Listener);

pub(super) struct RedisRsCache(MultiplexedConnection);

impl Subscriber for RedisRsSubscriber {
    const NAME: &'static str = RedisRs::NAME;
    type Payload = Bytes;

    async fn subscribe(port: u16, channel: &'static str, count: usize) -> Vec<Self> {
        let client = Client::open(("127.0.0.1", port)).expect("the address is valid");
        let mut pubsub = client.get_async_pubsub().await.expect(EXPECT_REPLY);
        pubsub.subscribe(channel).await.expect(EXPECT_REPLY);
        let (sender, listeners) = broadcast::channel(count);
        tokio::spawn(async move {
            let mut messages = pubsub.into_on_message();
            while let Some(message) = messages.next().await {
                let payload = Bytes::copy_from_slice(message.get_payload_bytes());
                sender.send(payload).expect("the subscriptions are open");
            }
        });
        listeners.into_iter().map(Self).collect()
    }

    async fn receive(&mut self) -> Bytes {
        self.0.receive().await
    }
}

impl CachingPeer for RedisRsCache {
    const NAME: &'static str = RedisRs::NAME;
    type Text = Bytes;

    async fn connect(port: u16) -> Self {
        let client = Client::open(format!("redis://127.0.0.1:{port}/?protocol=resp3")).expect("the URL is valid");
        let config = AsyncConnectionConfig::new().set_cache_config(CacheConfig::new());
        Self(client.get_multiplexed_async_connection_with_config(&config).await.expect(EXPECT_REPLY))
    }

    async fn cached_get(&mut self, key: &'static str) -> Bytes {
        cmd("GET").arg(key).query_async(&mut self.0).await.expect(EXPECT_REPLY)
    }
}

impl Peer for RedisRs {
    const NAME: &'static str = "redis-rs";
    type Text = Bytes;

    async fn connect(port: u16) -> Self {
        let client = Client::open(("127.0.0.1", port)).expect("the address is valid");
        Self(client.get_multiplexed_async_connection().await.expect(EXPECT_REPLY))
    }

    async fn get(&mut self, key: &'static str) -> Bytes {
        cmd("GET").arg(key).query_async(&mut self.0).await.expect(EXPECT_REPLY)
    }

    async fn set(&mut self, key: &'static str, value: &'static str) {
        cmd("SET").arg(key).arg(value).exec_async(&mut self.0).await.expect(EXPECT_REPLY);
    }

    async fn pipeline(&mut self, keys: &'static [String]) -> Vec<Bytes> {
        let mut pipeline = Pipeline::with_capacity(keys.len());
        for key in keys {
            pipeline.cmd("GET").arg(key);
        }
        pipeline.query_async(&mut self.0).await.expect(EXPECT_REPLY)
    }

    async fn list_range(&mut self, key: &'static str) -> Vec<Bytes> {
        cmd("LRANGE").arg(key).arg(0).arg(-1).query_async(&mut self.0).await.expect(EXPECT_REPLY)
    }

    async fn multi_get(&mut self, keys: &'static [String]) -> Vec<Bytes> {
        cmd("MGET").arg(keys).query_async(&mut self.0).await.expect(EXPECT_REPLY)
    }
}
