//! Regressions of WebSocket connections.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use tidewire_conn::websocket::{CloseCode, Message, ServerHandshake, WebSocket, WebSocketOptions};
use tidewire_conn::{ConnectionContext, Protocol, PushPolicy, PushPriority, Reply, Supervisor};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

/// `wait` is answered when the test notifies `release`, and `forever` never.
struct Sockets {
    release: Arc<tokio::sync::Notify>,
}

struct Forever;

impl futures_core::Stream for Forever {
    type Item = Result<Message, Infallible>;

    fn poll_next(
        self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Self::Item>> {
        std::task::Poll::Pending
    }
}

impl Protocol for Sockets {
    type Frame = Message;
    type Codec = WebSocket;
    type ProtocolError = Infallible;

    fn codec(&self) -> WebSocket {
        WebSocket::server(WebSocketOptions::default())
    }

    fn on_frame(&self, message: Message, _: &mut ConnectionContext<Message>) -> Reply<Message, Infallible> {
        match message.as_text() {
            Some("wait") => {
                let release = Arc::clone(&self.release);
                Reply::future(async move {
                    release.notified().await;
                    Ok(Message::text("answer"))
                })
            }
            Some("forever") => Reply::stream(Forever),
            Some("forever in turn") => Reply::in_turn(|_| Reply::stream(Forever)),
            _ => Reply::None,
        }
    }
}

/// Returns a masked frame of at most 125 bytes.
fn masked(first: u8, payload: &[u8]) -> Vec<u8> {
    let mut frame = vec![first, 0x80 | u8::try_from(payload.len()).unwrap(), 1, 2, 3, 4];
    frame.extend(payload.iter().zip([1, 2, 3, 4].iter().cycle()).map(|(byte, key)| byte ^ key));
    frame
}

/// The client of a connection.
struct Browser {
    socket: DuplexStream,
    release: Arc<tokio::sync::Notify>,
    supervisor: Supervisor<Sockets>,
}

impl Browser {
    fn connect(in_flight: usize) -> Self {
        let release = Arc::new(tokio::sync::Notify::new());
        let supervisor =
            Supervisor::builder(Sockets { release: Arc::clone(&release) }).max_in_flight(in_flight).build();
        let (near, far) = tokio::io::duplex(100_000);
        tokio::spawn(supervisor.admit("127.0.0.1:9".parse().unwrap()).unwrap().run(near, Vec::new()));
        Self { socket: far, release, supervisor }
    }

    async fn send(&mut self, first: u8, payload: &[u8]) {
        self.socket.write_all(&masked(first, payload)).await.unwrap();
    }

    async fn receive(&mut self) -> Option<(u8, Vec<u8>)> {
        let first = self.socket.read_u8().await.ok()?;
        let length = self.socket.read_u8().await.ok()?;
        let mut payload = vec![0; length.into()];
        self.socket.read_exact(&mut payload).await.ok()?;
        Some((first, payload))
    }

    /// Receives a frame, or returns `None` if none arrives within ten minutes.
    async fn receive_soon(&mut self) -> Option<(u8, Vec<u8>)> {
        tokio::time::timeout(Duration::from_mins(10), self.receive()).await.ok().flatten()
    }
}

/// RFC 6455 (5.5.2) demands a pong as soon as is practical. It was sent after the reply.
#[tokio::test(start_paused = true)]
async fn ping_is_answered_while_a_request_is_in_flight() {
    let mut browser = Browser::connect(1);
    browser.send(0x81, b"wait").await;
    browser.send(0x89, b"there?").await;
    assert_eq!(browser.receive_soon().await, Some((0x8a, b"there?".to_vec())));
    browser.release.notify_one();
}

/// A close frame was not decoded while a reply was in progress.
#[tokio::test(start_paused = true)]
async fn close_is_answered_during_a_stream() {
    let mut browser = Browser::connect(1);
    browser.send(0x81, b"forever").await;
    browser.send(0x88, &1000u16.to_be_bytes()).await;
    assert_eq!(browser.receive_soon().await, Some((0x88, 1000u16.to_be_bytes().to_vec())));
}

/// An endless stream that began after the close frame had arrived was not cut off.
#[tokio::test(start_paused = true)]
async fn close_is_answered_before_a_stream_that_begins_later() {
    for (in_flight, stream) in [(2, "forever in turn"), (1, "forever")] {
        let mut browser = Browser::connect(in_flight);
        browser.send(0x81, b"wait").await;
        browser.send(0x81, stream.as_bytes()).await;
        browser.send(0x88, &1000u16.to_be_bytes()).await;
        tokio::time::sleep(Duration::from_millis(10)).await;
        browser.release.notify_one();
        assert_eq!(browser.receive_soon().await, Some((0x81, b"answer".to_vec())), "{stream}");
        assert_eq!(browser.receive_soon().await, Some((0x88, 1000u16.to_be_bytes().to_vec())), "{stream}");
    }
}

/// With `max_in_flight` above one, the reply was dropped.
#[tokio::test(start_paused = true)]
async fn requests_before_a_close_are_answered() {
    for in_flight in [1, 2] {
        let mut browser = Browser::connect(in_flight);
        browser.send(0x81, b"wait").await;
        browser.send(0x88, &1000u16.to_be_bytes()).await;
        tokio::time::sleep(Duration::from_millis(10)).await;
        browser.release.notify_one();
        assert_eq!(browser.receive_soon().await, Some((0x81, b"answer".to_vec())), "{in_flight} in flight");
    }
}

/// A push after a close frame was neither written nor counted, and the end was reported as closed by the peer.
#[tokio::test(start_paused = true)]
async fn pushes_after_a_close_are_counted_as_unsent() {
    let mut browser = Browser::connect(1);
    tokio::task::yield_now().await;
    let handle = browser.supervisor.sessions().list()[0].handle();
    for message in [Message::close(CloseCode::NORMAL, ""), Message::text("late")] {
        handle.try_push(message, PushPriority::Low, PushPolicy::ReturnErrorIfFull).unwrap();
    }
    assert_eq!(browser.receive_soon().await.unwrap().0, 0x88);
    assert_eq!(browser.receive_soon().await, None);
    let stats = browser.supervisor.stats();
    assert_eq!((stats.push.unsent, stats.traffic.frames_out, stats.ended["peer"]), (1, 1, 0));
}

/// `Timeouts::frame` treated several pings, each of which took ten seconds, as one frame.
#[tokio::test(start_paused = true)]
async fn frame_timeout_begins_anew_after_a_ping() {
    let mut browser = Browser::connect(1);
    browser.send(0x81, b"first").await;
    let ping = masked(0x89, b"ping");
    let (one, two) = ping.split_at(5);
    browser.socket.write_all(one).await.unwrap();
    for number in 0..10 {
        tokio::time::sleep(Duration::from_secs(10)).await;
        let next = [two, one].concat();
        assert!(browser.socket.write_all(&next).await.is_ok(), "ended after {number} pings");
        assert_eq!(browser.receive_soon().await.map(|(first, _)| first), Some(0x8a), "after {number} pings");
    }
}

/// A head with bare line feeds also consumed the following frames, up to the next empty line with carriage returns.
#[test]
fn head_with_bare_line_feeds_is_rejected() {
    let head = "GET / HTTP/1.1\nHost: t\nUpgrade: websocket\nConnection: Upgrade\nSec-WebSocket-Version: 13\n\
                Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\n\n";
    let mut input = BytesMut::from(head.as_bytes());
    input.extend_from_slice(&masked(0x81, b"hello"));
    input.extend_from_slice(b"\r\n\r\n");
    let decoded = ServerHandshake::new().decode(&mut input);
    assert!(decoded.is_err() || input.len() > 4, "accepted, with {} bytes left of the following frames", input.len());
}
