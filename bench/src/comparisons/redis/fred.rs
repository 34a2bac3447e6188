//! The client fred.

use bytes::Bytes;
use fred::clients::Client;
use fred::interfaces::{ClientLike, KeysInterface, ListInterface};
use fred::types::config::{Config, ServerConfig};
use fred::types::{Builder, Key, MultipleKeys, Value};

use super::peer::{EXPECT_REPLY, Peer};

#[derive(Clone)]
pub(super) struct Fred(Client);

impl Peer for Fred {
    const NAME: &'static str = "fred";
    type Text = Bytes;

    async fn connect(port: u16) -> Self {
        let config = Config { server: ServerConfig::new_centralized("127.0.0.1", port), ..Config::default() };
        let client = Builder::from_config(config).build().expect("the configuration is valid");
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
