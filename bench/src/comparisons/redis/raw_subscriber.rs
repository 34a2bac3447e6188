//! An upper bound for subscriptions: a loop that compares messages with their expected encoding, and a broadcast channel.

use bytes::{Bytes, BytesMut};
use tidewire_redis::resp::encode_command;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;

use super::broadcast::{self, Listener};
use super::data::VALUE_BYTES;
use super::peer::{EXPECT_REPLY, Subscriber};

pub(super) struct RawSubscriber(Listener);

impl Subscriber for RawSubscriber {
    const NAME: &'static str = "raw";
    type Payload = Bytes;

    async fn subscribe(port: u16, channel: &'static str, count: usize) -> Vec<Self> {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).await.expect("redis-server accepts");
        stream.set_nodelay(true).expect("TCP_NODELAY can be set");
        let mut request = BytesMut::new();
        encode_command(&["SUBSCRIBE", channel], &mut request);
        stream.write_all(&request).await.expect(EXPECT_REPLY);
        let confirmation = format!("*3\r\n$9\r\nsubscribe\r\n${}\r\n{channel}\r\n:1\r\n", channel.len());
        let mut input = vec![0; confirmation.len()];
        stream.read_exact(&mut input).await.expect(EXPECT_REPLY);
        assert!(input == confirmation.as_bytes(), "the server confirms the subscription");

        let start = format!("*3\r\n$7\r\nmessage\r\n${}\r\n{channel}\r\n${VALUE_BYTES}\r\n", channel.len());
        let (sender, listeners) = broadcast::channel(count);
        tokio::spawn(async move {
            let mut reader = BufReader::new(stream);
            let mut message = vec![0; start.len() + VALUE_BYTES + "\r\n".len()];
            // The stream ends with the runtime.
            while reader.read_exact(&mut message).await.is_ok() {
                assert!(message.starts_with(start.as_bytes()), "the server sends a message");
                let payload = Bytes::copy_from_slice(&message[start.len()..][..VALUE_BYTES]);
                sender.send(payload).expect("the subscriptions are open");
            }
        });
        listeners.into_iter().map(Self).collect()
    }

    async fn receive(&mut self) -> Bytes {
        self.0.receive().await
    }
}
