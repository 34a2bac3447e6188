//! rustis. It has no `Bytes`: its own string is a vector, which it copies to.

use rustis::client::{BatchPreparedCommand, Client};
use rustis::commands::{ListCommands, StringCommands};
use rustis::resp::BulkString;

use super::peer::{Peer, WORKS};

#[derive(Clone)]
pub(super) struct Rustis(Client);

impl Peer for Rustis {
    const NAME: &'static str = "rustis";
    type Text = BulkString;

    async fn connect(port: u16) -> Self {
        Self(Client::connect(format!("127.0.0.1:{port}")).await.expect(WORKS))
    }

    async fn get(&mut self, key: &'static str) -> BulkString {
        self.0.get(key).await.expect(WORKS)
    }

    async fn set(&mut self, key: &'static str, value: &'static str) {
        self.0.set(key, value).await.expect(WORKS);
    }

    async fn pipeline(&mut self, keys: &'static [String]) -> Vec<BulkString> {
        let mut pipeline = self.0.create_pipeline();
        pipeline.reserve(keys.len());
        for key in keys {
            pipeline.get::<()>(key).queue();
        }
        pipeline.execute().await.expect(WORKS)
    }

    async fn list_range(&mut self, key: &'static str) -> Vec<BulkString> {
        self.0.lrange(key, 0, -1).await.expect(WORKS)
    }

    async fn multi_get(&mut self, keys: &'static [String]) -> Vec<BulkString> {
        self.0.mget(keys).await.expect(WORKS)
    }
}
