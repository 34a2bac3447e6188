//! Fragmented frames over real sockets.

use std::time::Duration;

use bytes::Bytes;
use tidewire_conn::codec::{Codec, FragmentOptions, Fragmented, LengthDelimited};
use tidewire_conn::{ConnectionContext, Frame, Protocol, Reply, Supervisor, Timeouts};
use tidewire_testkit::{PATIENCE, wait_until_async};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::test_server::Planned;

const LARGE_BYTES: usize = 8 << 20;

/// Answers `large` with a frame of eight megabytes, and echoes other requests.
struct Large;

fn codec() -> Fragmented<LengthDelimited> {
    Fragmented::new(LengthDelimited::default(), FragmentOptions::default())
}

impl Protocol for Large {
    type Frame = Frame;
    type Codec = Fragmented<LengthDelimited>;
    type ProtocolError = Planned;

    fn codec(&self) -> Self::Codec {
        codec()
    }

    fn on_frame(&self, request: Frame, _: &mut ConnectionContext) -> Reply<Frame, Planned> {
        if request.body() == &b"large"[..] { Reply::Frame(large()) } else { Reply::Frame(request) }
    }
}

fn large() -> Frame {
    Frame::from(Bytes::from(vec![b'x'; LARGE_BYTES]))
}

fn small(text: &'static str) -> Frame {
    Frame::from(Bytes::from_static(text.as_bytes()))
}

struct Client {
    socket: TcpStream,
    codec: Fragmented<LengthDelimited>,
    input: bytes::BytesMut,
}

impl Client {
    async fn send(&mut self, frame: &Frame) {
        let mut batch = tidewire_conn::codec::Batch::default();
        self.codec.encode(frame, &mut batch).unwrap();
        while !batch.is_empty() {
            let mut slices = [std::io::IoSlice::new(&[]); 16];
            let filled = batch.slices(&mut slices);
            let written = self.socket.write_vectored(&slices[..filled]).await.unwrap();
            batch.advance(written);
        }
    }

    async fn receive(&mut self) -> Frame {
        loop {
            if let Some(frame) = self.codec.decode(&mut self.input).unwrap() {
                return frame;
            }
            assert_ne!(self.socket.read_buf(&mut self.input).await.unwrap(), 0, "the server closed the connection");
        }
    }
}

async fn connect(timeouts: Timeouts) -> (Supervisor<Large>, Client) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let socket = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let (accepted, peer) = listener.accept().await.unwrap();
    let supervisor = Supervisor::builder(Large).push_bytes(64 << 20).timeouts(timeouts).build();
    tokio::spawn(supervisor.admit(peer).unwrap().run(accepted, Vec::new()));
    (supervisor, Client { socket, codec: codec(), input: bytes::BytesMut::new() })
}

#[tokio::test]
async fn push_is_written_between_fragments() {
    let (supervisor, mut client) = connect(Timeouts::default()).await;
    client.send(&small("hello")).await;
    assert_eq!(client.receive().await, small("hello"));
    let session = supervisor.sessions().list().pop().unwrap();
    let handle = session.handle();

    handle.push_low_priority(large()).await.unwrap();
    // The first fragment has been written.
    client.input.extend_from_slice(&[client.socket.read_u8().await.unwrap()]);
    handle.push_high_priority(small("urgent")).await.unwrap();
    assert_eq!(client.receive().await, small("urgent"));
    assert_eq!(client.receive().await, large());

    client.send(&small("large")).await;
    client.send(&small("next")).await;
    client.input.extend_from_slice(&[client.socket.read_u8().await.unwrap()]);
    handle.push_low_priority(small("not urgent")).await.unwrap();
    assert_eq!(client.receive().await, small("not urgent"));
    assert_eq!(client.receive().await, large());
    assert_eq!(client.receive().await, small("next"));
    wait_until_async("the connection is idle", PATIENCE, async || session.counters().frames_out == 6).await;
}

#[tokio::test]
async fn large_request_is_reassembled() {
    let (_supervisor, mut client) = connect(Timeouts::default()).await;
    let sending = tokio::spawn(async move {
        client.send(&large()).await;
        client
    });
    let mut client = sending.await.unwrap();
    assert_eq!(client.receive().await, large());
}

/// Other frames do not extend the timeout.
#[tokio::test]
async fn incomplete_message_times_out() {
    let (supervisor, mut client) = connect(Timeouts::default().frame(Duration::from_millis(50))).await;
    client.socket.write_all(b"\0\0\0\x0e\x01\0\0\0\x01\0\0\0\0\0\0\0\x09x").await.unwrap();
    wait_until_async("the connection has ended", PATIENCE, async || {
        // Fails when the server has closed the connection.
        let _ = client.socket.write_all(b"\0\0\0\x02\x03x").await;
        supervisor.stats().ended["frame"] == 1
    })
    .await;
}

#[tokio::test]
async fn push_that_was_written_in_part_is_counted_as_unsent() {
    let (supervisor, mut client) = connect(Timeouts::default()).await;
    client.send(&small("hello")).await;
    assert_eq!(client.receive().await, small("hello"));
    let handle = supervisor.sessions().list().pop().unwrap().handle();
    handle.push_low_priority(large()).await.unwrap();
    client.socket.read_u8().await.unwrap();
    drop(client);
    wait_until_async("the connection has ended", PATIENCE, async || supervisor.count() == 0).await;
    assert_eq!(supervisor.stats().push.unsent, 1);
}
