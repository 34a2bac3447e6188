//! WebSocket servers over real sockets, with a client that can send invalid frames.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use tidewire_conn::websocket::{self, ClientHandshake, CloseCode, Message, Text, WebSocket, WebSocketOptions};
use tidewire_conn::{
    Builder, CloseReason, ConnectionContext, Protocol, PushPriority, Reply, Shutdown, Supervisor, Timeouts,
};
use tidewire_testkit::{PATIENCE, wait_until_async};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

struct Echo;

impl Protocol for Echo {
    type Frame = Message;
    type Codec = WebSocket;
    type ProtocolError = Infallible;

    fn codec(&self) -> WebSocket {
        WebSocket::server(WebSocketOptions::default().max_frame(10_000).max_message(20_000).max_fragments(10))
    }

    fn on_frame(&self, message: Message, _: &mut ConnectionContext<Message>) -> Reply<Message, Infallible> {
        match message {
            Message::Text(text) if text.body() == "stream" => Reply::stream(Numbers(0)),
            Message::Text(_) | Message::Binary(_) => Reply::Frame(message),
            _ => Reply::None,
        }
    }

    fn on_idle(&self, _: Duration, _: &mut ConnectionContext<Message>) -> Option<Message> {
        Some(Message::Ping(Bytes::from_static(b"there?")))
    }

    fn last_frame(&self, reason: &CloseReason<Self>, _: &mut ConnectionContext<Message>) -> Option<Message> {
        match reason {
            CloseReason::Shutdown => Some(Message::close(CloseCode::AWAY, "")),
            CloseReason::TimedOut(_) => Some(Message::close(CloseCode::POLICY, "")),
            _ => None,
        }
    }
}

/// An endless stream of messages.
struct Numbers(u64);

impl futures_core::Stream for Numbers {
    type Item = Result<Message, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0 += 1;
        Poll::Ready(Some(Ok(Message::text(format!("{:0100}", self.0)))))
    }
}

struct Server {
    supervisor: Supervisor<Echo>,
    addr: SocketAddr,
}

impl Server {
    async fn start(settings: impl FnOnce(Builder<Echo>) -> Builder<Echo>) -> Self {
        let supervisor = settings(Supervisor::builder(Echo)).build();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let serving = supervisor.clone();
        tokio::spawn(async move {
            let upgrade = async |mut socket| {
                let already_read = websocket::accept(&mut socket, |_| None).await?;
                Ok((socket, already_read))
            };
            serving.serve_with(listener, upgrade).await
        });
        Self { supervisor, addr }
    }

    async fn connect_with(&self, first: &[u8]) -> Client {
        Client::connect_with(self.addr, first).await
    }

    async fn connect(&self) -> Client {
        Client::connect(self.addr).await
    }
}

pub(crate) struct Client(TcpStream);

/// Returns a masked frame.
fn masked(first: u8, payload: &[u8]) -> Vec<u8> {
    let mut frame = vec![first];
    match u16::try_from(payload.len()).unwrap() {
        length @ 0..126 => frame.push(0x80 | u8::try_from(length).unwrap()),
        length => {
            frame.push(0xfe);
            frame.extend(length.to_be_bytes());
        }
    }
    frame.extend([1, 2, 3, 4]);
    frame.extend(payload.iter().zip([1, 2, 3, 4].iter().cycle()).map(|(byte, key)| byte ^ key));
    frame
}

impl Client {
    /// Connects, and sends these bytes immediately after the handshake request.
    async fn connect_with(addr: SocketAddr, first: &[u8]) -> Self {
        let mut socket = TcpStream::connect(addr).await.unwrap();
        let request = "GET /chat HTTP/1.1\r\nHost: tide.example\r\nUpgrade: websocket\r\nConnection: keep-alive, Upgrade\r\n\
                       Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n";
        socket.write_all(&[request.as_bytes(), first].concat()).await.unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(socket.read_u8().await.unwrap());
        }
        let head = String::from_utf8(head).unwrap();
        assert!(head.starts_with("HTTP/1.1 101 ") && head.contains("s3pPLMBiTxaQ9kYGzzhZRbK+xOo="), "{head}");
        Self(socket)
    }

    pub(crate) async fn connect(addr: SocketAddr) -> Self {
        Self::connect_with(addr, b"").await
    }

    async fn send(&mut self, first: u8, payload: &[u8]) {
        self.0.write_all(&masked(first, payload)).await.unwrap();
    }

    /// Returns the first byte and the payload of the next frame, or `None` at the end of the stream.
    async fn receive(&mut self) -> Option<(u8, Vec<u8>)> {
        let mut first = [0; 1];
        if self.0.read(&mut first).await.unwrap() == 0 {
            return None;
        }
        let length = match self.0.read_u8().await.unwrap() {
            126 => usize::from(self.0.read_u16().await.unwrap()),
            length => usize::from(length),
        };
        let mut payload = vec![0; length];
        self.0.read_exact(&mut payload).await.unwrap();
        Some((first[0], payload))
    }

    async fn expect_close(&mut self, code: CloseCode) {
        let (first, payload) = self.receive().await.unwrap();
        assert_eq!((first, payload.get(..2)), (0x88, Some(&code.get().to_be_bytes()[..])), "{payload:?}");
        assert_eq!(self.receive().await, None, "an end, not a reset");
    }

    pub(crate) async fn ask(&mut self, text: &str) {
        self.send(0x81, text.as_bytes()).await;
        assert_eq!(self.receive().await.unwrap(), (0x81, text.as_bytes().to_vec()));
    }
}

#[tokio::test]
async fn fragmented_messages_are_reassembled_and_pings_answered_in_between() {
    let server = Server::start(|builder| builder).await;
    // The first message may arrive with the handshake.
    let mut client = server.connect_with(&masked(0x82, b"early")).await;
    assert_eq!(client.receive().await.unwrap(), (0x82, b"early".to_vec()));
    client.ask("high tide").await;
    client.ask(&"long ".repeat(1000)).await;
    client.send(0x01, b"in ").await;
    client.send(0x89, b"ping").await;
    assert_eq!(client.receive().await.unwrap(), (0x8a, b"ping".to_vec()));
    client.send(0x80, b"pieces").await;
    assert_eq!(client.receive().await.unwrap(), (0x81, b"in pieces".to_vec()));
    client.send(0x88, &1000_u16.to_be_bytes()).await;
    client.expect_close(CloseCode::NORMAL).await;
    wait_until_async("the connection has ended", PATIENCE, async || server.supervisor.stats().ended["peer"] == 1).await;
}

/// Other connections are not affected.
#[tokio::test]
async fn invalid_input_closes_its_own_connection_with_the_right_code() {
    let server = Server::start(|builder| builder).await;
    let mut neighbour = server.connect().await;
    let unmasked = b"\x81\x05hello".to_vec();
    let endless: Vec<u8> = [masked(0x01, b"x"), masked(0x00, b"x").repeat(20)].concat();
    let cases: Vec<(&str, Vec<u8>, CloseCode)> = vec![
        ("not masked", unmasked, CloseCode::PROTOCOL),
        ("a reserved bit", masked(0xc1, b"x"), CloseCode::PROTOCOL),
        ("a reserved opcode", masked(0x83, b"x"), CloseCode::PROTOCOL),
        ("a reserved control opcode", masked(0x8b, b"x"), CloseCode::PROTOCOL),
        ("a long ping", masked(0x89, &[0; 126]), CloseCode::PROTOCOL),
        ("a fragmented ping", masked(0x09, b"x"), CloseCode::PROTOCOL),
        ("a continuation of nothing", masked(0x80, b"x"), CloseCode::PROTOCOL),
        ("a message within a message", [masked(0x01, b"x"), masked(0x81, b"y")].concat(), CloseCode::PROTOCOL),
        ("a close of one byte", masked(0x88, &[3]), CloseCode::PROTOCOL),
        ("an invalid close code", masked(0x88, &1005_u16.to_be_bytes()), CloseCode::PROTOCOL),
        ("invalid UTF-8", masked(0x81, b"\xff\xfe"), CloseCode::INVALID_DATA),
        (
            "invalid UTF-8 across fragments",
            [masked(0x01, b"\xce"), masked(0x80, b"\x20")].concat(),
            CloseCode::INVALID_DATA,
        ),
        ("invalid UTF-8 in a close", masked(0x88, b"\x03\xe8\xff"), CloseCode::INVALID_DATA),
        ("a large frame", masked(0x82, &[0; 10_001]), CloseCode::TOO_BIG),
        ("a huge announced length", b"\x82\xff\x00\x00\x00\x01\x00\x00\x00\x00".to_vec(), CloseCode::TOO_BIG),
        ("endless fragments", endless, CloseCode::TOO_BIG),
    ];
    let count = cases.len() as u64;
    for (name, bytes, code) in cases {
        println!("{name}");
        let mut client = server.connect().await;
        client.0.write_all(&bytes).await.unwrap();
        client.expect_close(code).await;
        neighbour.ask("still there").await;
    }
    wait_until_async("all connections are counted", PATIENCE, async || {
        server.supervisor.stats().ended["decode"] == count
    })
    .await;
}

#[tokio::test]
async fn invalid_handshakes_are_refused_with_an_http_status() {
    let server = Server::start(|builder| {
        // On a busy machine this is long enough for every handshake except the last, which must time out.
        builder.timeouts(Timeouts::default().first_frame(Duration::from_secs(3)))
    })
    .await;
    for (request, answer) in [
        ("GET / HTTP/1.1\r\nHost: x\r\n\r\n", "HTTP/1.1 426 "),
        ("POST / HTTP/1.1\r\nHost: x\r\n\r\n", "HTTP/1.1 426 "),
        ("POST / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\n\r\n", "HTTP/1.1 400 "),
        ("\x16\x03\x01 not HTTP\r\n\r\n", "HTTP/1.1 400 "),
    ] {
        let mut socket = TcpStream::connect(server.addr).await.unwrap();
        socket.write_all(request.as_bytes()).await.unwrap();
        let mut response = String::new();
        socket.read_to_string(&mut response).await.unwrap();
        assert!(response.starts_with(answer), "{response}");
    }
    // An incomplete handshake times out.
    let mut slow = TcpStream::connect(server.addr).await.unwrap();
    slow.write_all(b"GET / HTT").await.unwrap();
    assert_eq!(slow.read(&mut [0; 1]).await.unwrap(), 0);
    wait_until_async("all handshakes have ended", PATIENCE, async || server.supervisor.stats().ended["handshake"] == 5)
        .await;
    assert_eq!(server.supervisor.count(), 0);
}

/// Other frames that arrive in the meantime do not extend the timeout.
#[tokio::test]
async fn incomplete_message_times_out() {
    let server = Server::start(|builder| {
        let timeouts = Timeouts::default().frame(Duration::from_millis(200));
        builder.timeouts(timeouts)
    })
    .await;
    let mut client = server.connect().await;
    client.send(0x01, b"beginning").await;
    wait_until_async("the connection has ended", PATIENCE, async || {
        // Fails when the server has closed the connection.
        let _ = client.0.write_all(&masked(0x8a, b"an unsolicited pong")).await;
        server.supervisor.stats().ended["frame"] == 1
    })
    .await;
    let (first, payload) = client.receive().await.unwrap();
    assert_eq!((first, &payload[..2]), (0x88, &1008_u16.to_be_bytes()[..]));
}

#[tokio::test]
async fn idle_peer_is_pinged() {
    let server = Server::start(|builder| {
        let timeouts = Timeouts::default().heartbeat(Duration::from_millis(50));
        builder.timeouts(timeouts)
    })
    .await;
    let mut client = server.connect().await;
    client.send(0x81, b"hello").await;
    // On a busy machine a ping may come before the echo.
    let (mut pings, mut echoes) = (0, 0);
    while pings < 2 || echoes < 1 {
        match client.receive().await.unwrap() {
            (0x89, payload) if payload == b"there?" => pings += 1,
            (0x81, payload) if payload == b"hello" => echoes += 1,
            other => panic!("{other:?}"),
        }
        client.send(0x8a, b"there?").await;
    }
    assert_eq!(echoes, 1);
}

#[tokio::test]
async fn broadcast_adds_a_head_and_a_handle_closes_the_connection() {
    let server = Server::start(|builder| builder).await;
    let (mut first, mut second) = (server.connect().await, server.connect().await);
    for client in [&mut first, &mut second] {
        client.ask("hello").await;
    }
    let body = Text::from("{\"tide\":\"high\"}".to_owned());
    let reached = server.supervisor.sessions().broadcast(PushPriority::Low, |session| {
        Some(Message::Text(body.clone().with_head(&format!("{}:", session.id())).unwrap()))
    });
    assert_eq!(reached, 2);
    assert_eq!(first.receive().await.unwrap(), (0x81, b"conn-1:{\"tide\":\"high\"}".to_vec()));
    assert_eq!(second.receive().await.unwrap(), (0x81, b"conn-2:{\"tide\":\"high\"}".to_vec()));

    let sessions = server.supervisor.sessions().list();
    let revoked = sessions[0].handle();
    revoked.try_push(Message::text("last news"), PushPriority::Low, tidewire_conn::PushPolicy::DropIfFull).unwrap();
    revoked.close(Some(Message::close(CloseCode::new(4002), "revoked")));
    assert!(revoked.is_closed());
    assert_eq!(first.receive().await.unwrap(), (0x81, b"last news".to_vec()));
    first.expect_close(CloseCode::new(4002)).await;
    wait_until_async("the end is counted", PATIENCE, async || server.supervisor.stats().ended["handle"] == 1).await;

    let supervisor = server.supervisor.clone();
    let shutting = tokio::spawn(async move { supervisor.shutdown(Shutdown::default()).await });
    second.expect_close(CloseCode::AWAY).await;
    drop((first, second));
    shutting.await.unwrap();
}

/// Replies with the negotiated subprotocol, which is passed in as the data of the connection.
struct Negotiated;

impl Protocol for Negotiated {
    type Frame = Message;
    type Codec = WebSocket;
    type ProtocolError = Infallible;

    fn codec(&self) -> WebSocket {
        WebSocket::server(WebSocketOptions::default())
    }

    fn on_frame(&self, _: Message, context: &mut ConnectionContext<Message>) -> Reply<Message, Infallible> {
        let subprotocol: &String = context.data.as_ref().unwrap().downcast_ref().unwrap();
        Reply::Frame(Message::text(subprotocol.clone()))
    }
}

#[tokio::test]
async fn subprotocol_is_negotiated_and_passed_to_the_protocol() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let serving = tokio::spawn(async move {
        let (mut socket, peer) = listener.accept().await.unwrap();
        let mut subprotocol = String::new();
        let already_read = websocket::accept(&mut socket, |request| {
            subprotocol = request.subprotocols().find(|offered| *offered == "tide.2")?.to_owned();
            Some(subprotocol.clone())
        });
        let already_read = already_read.await.unwrap();
        let permit = Supervisor::builder(Negotiated).build().admit(peer).unwrap();
        permit.run_with(socket, already_read, Some(Box::new(subprotocol))).await;
    });
    let mut socket = TcpStream::connect(addr).await.unwrap();
    let handshake = ClientHandshake::new("tide.example", "/").unwrap();
    let handshake = handshake.subprotocol("tide.1").unwrap().subprotocol("tide.2").unwrap();
    let (upgraded, already_read) = websocket::connect(&mut socket, handshake).await.unwrap();
    assert_eq!((upgraded.subprotocol.as_deref(), already_read.len()), (Some("tide.2"), 0));
    let mut client = Client(socket);
    client.send(0x81, b"what?").await;
    assert_eq!(client.receive().await.unwrap(), (0x81, b"tide.2".to_vec()));
    drop(client);
    serving.await.unwrap();
}

/// Returns a client and the socket of its server, as after a handshake.
async fn pair() -> (Client, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    (Client(client), listener.accept().await.unwrap().0)
}

#[tokio::test]
async fn close_sends_code_and_reason() {
    let (mut client, stream) = pair().await;
    // Unread bytes would reset the connection.
    client.send(0x81, b"hello").await;
    let closing = tokio::spawn(websocket::close(stream, CloseCode::new(4003), "too many", PATIENCE));
    assert_eq!(client.receive().await.unwrap(), (0x88, b"\x0f\xa3too many".to_vec()));
    assert_eq!(client.receive().await, None, "an end, not a reset");
    client.send(0x88, b"\x0f\xa3").await;
    drop(client);
    closing.await.unwrap().unwrap();
}

#[tokio::test]
async fn close_does_not_wait_for_the_client_forever() {
    let (mut client, stream) = pair().await;
    let closed = websocket::close(stream, CloseCode::AWAY, "", Duration::from_millis(10)).await;
    assert_eq!(closed.unwrap_err().kind(), std::io::ErrorKind::TimedOut);
    client.expect_close(CloseCode::AWAY).await;

    let (mut client, stream) = pair().await;
    let closing = tokio::spawn(websocket::close(stream, CloseCode::AWAY, "", PATIENCE));
    // The client sends until the connection is reset.
    let flood = vec![0; 64 * 1024];
    while client.0.write_all(&flood).await.is_ok() {}
    closing.await.unwrap().unwrap();
}

#[tokio::test]
async fn close_rejects_a_reason_that_is_too_long() {
    let (mut client, stream) = pair().await;
    let closed = websocket::close(stream, CloseCode::AWAY, "x".repeat(124), PATIENCE).await;
    assert_eq!(closed.unwrap_err().kind(), std::io::ErrorKind::InvalidInput);
    assert_eq!(client.receive().await, None);
}

/// The stream never ends, so the ping arrives only if it is written between two frames of the stream.
#[tokio::test]
async fn pushed_ping_overtakes_a_stream() {
    let server = Server::start(|builder| builder).await;
    let mut client = server.connect().await;
    client.send(0x81, b"stream").await;
    let expected = |number: u64| (0x81, format!("{number:0100}").into_bytes());
    assert_eq!(client.receive().await, Some(expected(1)));
    let handle = server.supervisor.sessions().list().pop().unwrap().handle();
    handle.push_high_priority(Message::Ping(Bytes::from_static(b"heartbeat"))).await.unwrap();
    let mut number = 1;
    loop {
        number += 1;
        match client.receive().await.unwrap() {
            (0x89, payload) => break assert_eq!(payload, b"heartbeat"),
            frame => assert_eq!(frame, expected(number)),
        }
        assert!(number < 1_000_000, "the ping waits for the end of the stream");
    }
    // The stream continues where it was.
    assert_eq!(client.receive().await, Some(expected(number)));
}
