//! redis-rs, with its multiplexed connection.

use bytes::Bytes;
use redis::aio::MultiplexedConnection;
use redis::{Client, Pipeline, cmd};

use super::peer::{EXPECT_REPLY, Peer};

#[derive(Clone)]
pub(super) struct RedisRs(MultiplexedConnection);

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
