//! Our own client.

use bytes::Bytes;
use tidewire_redis::{Client, Options, Pipeline, commands};

use super::peer::{Peer, WORKS};

#[derive(Clone)]
pub(super) struct Ours(Client);

impl Peer for Ours {
    const NAME: &'static str = "tidewire";
    type Text = Bytes;

    async fn connect(port: u16) -> Self {
        Self(Client::start(Options::default().address(("127.0.0.1", port))))
    }

    async fn get(&mut self, key: &'static str) -> Bytes {
        self.0.send(commands::get(key).returning::<Bytes>()).await.expect(WORKS)
    }

    async fn set(&mut self, key: &'static str, value: &'static str) {
        self.0.send(commands::set(key, value)).await.expect(WORKS);
    }

    async fn pipeline(&mut self, keys: &'static [String]) -> Vec<Bytes> {
        let pipeline: Pipeline<Vec<Bytes>> = keys.iter().map(|key| commands::get(key).returning::<Bytes>()).collect();
        let texts = self.0.pipeline(pipeline).await.expect(WORKS);
        texts.into_iter().map(|text| text.expect(WORKS)).collect()
    }

    async fn list_range(&mut self, key: &'static str) -> Vec<Bytes> {
        self.0.send(commands::lrange(key, 0, -1).returning::<Vec<Bytes>>()).await.expect(WORKS)
    }

    async fn multi_get(&mut self, keys: &'static [String]) -> Vec<Bytes> {
        self.0.send(commands::mget(keys).returning::<Vec<Bytes>>()).await.expect(WORKS)
    }
}
