//! The client tidewire-redis.

use std::time::Duration;

use bytes::Bytes;
use tidewire_redis::cache::CacheOptions;
use tidewire_redis::pubsub::{Event, Subscription};
use tidewire_redis::{Client, Options, Pipeline, commands};

use super::data::EMPTY_LIST;
use super::peer::{CachingPeer, EXPECT_REPLY, Peer, Subscriber};

#[derive(Clone)]
pub(super) struct Ours(Client);

pub(super) struct OurSubscriber(Subscription);

pub(super) struct OurCache(Client);

impl Ours {
    /// Waits in a `BLPOP` for an element of the empty list.
    pub(super) async fn wait_for_element(self) {
        let _: (Bytes, Bytes) = self.0.blpop([EMPTY_LIST], Duration::ZERO).await.expect(EXPECT_REPLY);
    }
}

impl Subscriber for OurSubscriber {
    const NAME: &'static str = Ours::NAME;
    type Payload = Bytes;

    async fn subscribe(port: u16, channel: &'static str, count: usize) -> Vec<Self> {
        let Ours(client) = Ours::connect(port).await;
        let mut subscriptions = Vec::with_capacity(count);
        for _ in 0..count {
            subscriptions.push(Self(client.subscribe([channel]).await.expect(EXPECT_REPLY)));
        }
        subscriptions
    }

    async fn receive(&mut self) -> Bytes {
        match self.0.next().await {
            Some(Ok(Event::Message(message))) => message.payload.clone(),
            other => panic!("expected a message, got {other:?}"),
        }
    }
}

impl CachingPeer for OurCache {
    const NAME: &'static str = Ours::NAME;
    type Text = Bytes;

    async fn connect(port: u16) -> Self {
        Self(Client::start(Options::default().address(("127.0.0.1", port)).cache(CacheOptions::default())))
    }

    async fn cached_get(&mut self, key: &'static str) -> Bytes {
        self.0.cached(commands::get(key).returning::<Bytes>()).await.expect(EXPECT_REPLY)
    }
}

impl Peer for Ours {
    const NAME: &'static str = "tidewire";
    type Text = Bytes;

    async fn connect(port: u16) -> Self {
        Self(Client::start(Options::default().address(("127.0.0.1", port))))
    }

    async fn get(&mut self, key: &'static str) -> Bytes {
        self.0.send(commands::get(key).returning::<Bytes>()).await.expect(EXPECT_REPLY)
    }

    async fn set(&mut self, key: &'static str, value: &'static str) {
        self.0.send(commands::set(key, value)).await.expect(EXPECT_REPLY);
    }

    async fn pipeline(&mut self, keys: &'static [String]) -> Vec<Bytes> {
        let pipeline: Pipeline<Vec<Bytes>> = keys.iter().map(|key| commands::get(key).returning::<Bytes>()).collect();
        let texts = self.0.pipeline(pipeline).await.expect(EXPECT_REPLY);
        texts.into_iter().map(|text| text.expect(EXPECT_REPLY)).collect()
    }

    async fn list_range(&mut self, key: &'static str) -> Vec<Bytes> {
        self.0.send(commands::lrange(key, 0, -1).returning::<Vec<Bytes>>()).await.expect(EXPECT_REPLY)
    }

    async fn multi_get(&mut self, keys: &'static [String]) -> Vec<Bytes> {
        self.0.send(commands::mget(keys).returning::<Vec<Bytes>>()).await.expect(EXPECT_REPLY)
    }
}
