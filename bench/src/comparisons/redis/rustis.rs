//! The client rustis. It does not support `Bytes`: its string type is a vector, to which it copies.

use rustis::client::{BatchPreparedCommand, Client};
use rustis::commands::{ListCommands, StringCommands};
use rustis::resp::BulkString;

use super::peer::{EXPECT_REPLY, Peer};

#[derive(Clone)]
pub(super) struct Rustis(Client);

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
