//! An upper bound for invalidations: a connection that compares what it reads with the expected encoding.

use std::io::ErrorKind;

use bytes::{Buf as _, Bytes, BytesMut};
use tidewire_redis::resp::encode_command;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::data::VALUE_BYTES;
use super::peer::{CachingPeer, EXPECT_REPLY};

pub(super) struct RawCache {
    stream: TcpStream,
    input: BytesMut,
    value: Option<Bytes>,
}

impl RawCache {
    /// Returns whether an invalidation has arrived, without waiting for it.
    fn take_invalidation(&mut self, key: &str) -> bool {
        match self.stream.try_read_buf(&mut self.input) {
            Ok(count) => assert!(count > 0, "the server does not close the connection"),
            Err(error) => assert!(error.kind() == ErrorKind::WouldBlock, "{error}"),
        }
        let expected = format!(">2\r\n$10\r\ninvalidate\r\n*1\r\n${}\r\n{key}\r\n", key.len());
        let arrived = self.input.len() >= expected.len();
        if arrived {
            assert!(self.input.starts_with(expected.as_bytes()), "the server sends an invalidation");
            self.input.advance(expected.len());
        }
        arrived
    }

    async fn get(&mut self, key: &str) -> Bytes {
        let mut request = BytesMut::new();
        encode_command(&["GET", key], &mut request);
        self.stream.write_all(&request).await.expect(EXPECT_REPLY);
        let start = format!("${VALUE_BYTES}\r\n");
        let len = start.len() + VALUE_BYTES + "\r\n".len();
        while self.input.len() < len {
            let count = self.stream.read_buf(&mut self.input).await.expect(EXPECT_REPLY);
            assert!(count > 0, "the server replies");
        }
        let reply = self.input.split_to(len).freeze();
        assert!(reply.starts_with(start.as_bytes()), "the server returns the value");
        reply.slice(start.len()..start.len() + VALUE_BYTES)
    }
}

impl CachingPeer for RawCache {
    const NAME: &'static str = "raw";
    type Text = Bytes;

    async fn connect(port: u16) -> Self {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).await.expect("redis-server accepts");
        stream.set_nodelay(true).expect("TCP_NODELAY can be set");
        stream.write_all(b"HELLO 3\r\nCLIENT TRACKING ON\r\n").await.expect(EXPECT_REPLY);
        let mut input = BytesMut::new();
        while !input.ends_with(b"+OK\r\n") {
            let count = stream.read_buf(&mut input).await.expect(EXPECT_REPLY);
            assert!(count > 0, "the server replies");
        }
        input.clear();
        Self { stream, input, value: None }
    }

    async fn cached_get(&mut self, key: &'static str) -> Bytes {
        if let Some(value) = self.value.clone()
            && !self.take_invalidation(key)
        {
            return value;
        }
        let value = self.get(key).await;
        self.value.insert(value).clone()
    }
}
