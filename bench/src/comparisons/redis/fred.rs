//! The client fred.

use bytes::Bytes;
use fred::clients::{Client, SubscriberClient};
use fred::interfaces::{ClientLike, EventInterface, KeysInterface, ListInterface, PubsubInterface, TrackingInterface};
use fred::types::client::Invalidation;
use fred::types::config::{Config, ServerConfig};
use fred::types::{Builder, Key, Message, MultipleKeys, MultipleStrings, RespVersion, Value};
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::TryRecvError;

use super::peer::{CachingPeer, EXPECT_REPLY, Peer, Subscriber};

#[derive(Clone)]
pub(super) struct Fred(Client);

/// A receiver of the messages of a client. The client closes when its last handle is dropped.
pub(super) struct FredSubscriber(
    Receiver<Message>,
    #[expect(dead_code, reason = "keeps the client open")] SubscriberClient,
);

/// A client, the last value of one key, and the invalidations that end it.
pub(super) struct FredCache {
    client: Client,
    value: Option<Bytes>,
    invalidations: Receiver<Invalidation>,
}

fn config(port: u16) -> Config {
    Config { server: ServerConfig::new_centralized("127.0.0.1", port), ..Config::default() }
}

impl Subscriber for FredSubscriber {
    const NAME: &'static str = Fred::NAME;
    type Payload = Bytes;

    async fn subscribe(port: u16, channel: &'static str, count: usize) -> Vec<Self> {
        let builder = Builder::from_config(config(port));
        let client = builder.build_subscriber_client().expect("the configuration is valid");
        client.init().await.expect(EXPECT_REPLY);
        client.subscribe(channel).await.expect(EXPECT_REPLY);
        (0..count).map(|_| Self(client.message_rx(), client.clone())).collect()
    }

    async fn receive(&mut self) -> Bytes {
        let message = self.0.recv().await.expect("no message was lost");
        message.value.into_bytes().expect("a payload is a string")
    }
}

impl CachingPeer for FredCache {
    const NAME: &'static str = Fred::NAME;
    type Text = Bytes;

    async fn connect(port: u16) -> Self {
        let config = Config { version: RespVersion::RESP3, ..config(port) };
        let client = Builder::from_config(config).build().expect("the configuration is valid");
        client.init().await.expect(EXPECT_REPLY);
        let invalidations = client.invalidation_rx();
        client.start_tracking(MultipleStrings::new(), false, false, false, false).await.expect(EXPECT_REPLY);
        Self { client, value: None, invalidations }
    }

    async fn cached_get(&mut self, key: &'static str) -> Bytes {
        loop {
            match self.invalidations.try_recv() {
                Ok(_) => self.value = None,
                Err(TryRecvError::Empty) => break,
                Err(error) => panic!("expected all invalidations, got {error}"),
            }
        }
        if let Some(value) = &self.value {
            return value.clone();
        }
        let value: Bytes = self.client.get(Key::from_static_str(key)).await.expect(EXPECT_REPLY);
        self.value.insert(value).clone()
    }
}

impl Peer for Fred {
    const NAME: &'static str = "fred";
    type Text = Bytes;

    async fn connect(port: u16) -> Self {
        let client = Builder::from_config(config(port)).build().expect("the configuration is valid");
        client.init().await.expect(EXPECT_REPLY);
        Self(client)
    }

    async fn get(&mut self, key: &'static str) -> Bytes {
        self.0.get(Key::from_static_str(key)).await.expect(EXPECT_REPLY)
    }

    async fn set(&mut self, key: &'static str, value: &'static str) {
        let (key, value) = (Key::from_static_str(key), Value::from_static_str(value));
        self.0.set::<(), _, _>(key, value, None, None, false).await.expect(EXPECT_REPLY);
    }

    async fn pipeline(&mut self, keys: &'static [String]) -> Vec<Bytes> {
        let pipeline = self.0.pipeline();
        for key in keys {
            pipeline.get::<(), _>(Key::from_static_str(key)).await.expect(EXPECT_REPLY);
        }
        pipeline.all().await.expect(EXPECT_REPLY)
    }

    async fn list_range(&mut self, key: &'static str) -> Vec<Bytes> {
        self.0.lrange(Key::from_static_str(key), 0, -1).await.expect(EXPECT_REPLY)
    }

    async fn multi_get(&mut self, keys: &'static [String]) -> Vec<Bytes> {
        let keys: MultipleKeys = keys.iter().map(|key| Key::from_static_str(key)).collect();
        self.0.mget(keys).await.expect(EXPECT_REPLY)
    }
}
