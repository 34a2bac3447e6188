//! The WebSocket echo servers that are compared.
//!
//! Our handshake makes the connections of all of them, so that they differ in what comes after it.

use std::convert::Infallible;
use std::io::{Read as _, Write as _};
use std::net;

use bytes::BytesMut;
use fastwebsockets::{FragmentCollector, OpCode};
use futures_util::{FutureExt as _, SinkExt as _, StreamExt as _};
use tidewire_conn::websocket::{self, ClientHandshake, Message, WebSocket, WebSocketOptions};
use tidewire_conn::{ConnectionContext, Protocol, Reply, Supervisor};
use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpListener, TcpStream};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::protocol::{Role as Side, WebSocketConfig};

use super::super::conn::server::{Dialect, Serve, accept, serve};
use super::coalesced::Coalesced;
use crate::role::Role;

/// What is echoed, as text.
pub(super) const BODY: usize = 64;

/// Text messages, masked on the way there.
pub(super) const MESSAGES: Dialect = Dialect { role: &ROLE, servers: ALL, greet, exchange };

pub(super) const ROLE: Role = Role { name: "websocket-server", play: |arguments| serve(arguments, ALL) };

const ALL: &[(&str, Serve)] = &[
    ("tokio-tungstenite", |listener| accept(listener, tungstenite)),
    ("fastwebsockets", |listener| accept(listener, fast)),
    ("tidewire-conn", ours),
];

fn greet(socket: &mut net::TcpStream) {
    let mut handshake = ClientHandshake::new("localhost", "/").expect("that is a request");
    socket.write_all(&handshake.request()).expect("the server reads");
    let (mut input, mut bytes) = (BytesMut::new(), [0; 1024]);
    while handshake.decode(&mut input).expect("the server accepts").is_none() {
        let length = socket.read(&mut bytes).expect("the server answers");
        assert!(length > 0, "the server left");
        input.extend_from_slice(&bytes[..length]);
    }
    assert!(input.is_empty(), "nobody has spoken yet");
}

fn exchange(count: usize) -> (Vec<u8>, Vec<u8>) {
    const TEXT: u8 = 0x81;
    const MASKED: u8 = 0x80;
    const KEY: [u8; 4] = [0x37, 0xfa, 0x21, 0x3d];
    let length = u8::try_from(BODY).expect("small");
    let body = [b'x'; BODY];
    let masked = body.iter().zip(KEY.iter().cycle()).map(|(byte, key)| byte ^ key);
    let request: Vec<u8> = [TEXT, MASKED | length].into_iter().chain(KEY).chain(masked).collect();
    let reply: Vec<u8> = [TEXT, length].into_iter().chain(body).collect();
    (request.repeat(count), reply.repeat(count))
}

/// As it is meant to be used by those who have many connections: a small buffer each, and one flush when nothing more is there
/// to be read.
async fn tungstenite(mut socket: TcpStream) {
    if websocket::accept(&mut socket, |_| None).await.is_err() {
        return;
    }
    let config = WebSocketConfig::default().read_buffer_size(4096);
    let mut messages = WebSocketStream::from_raw_socket(socket, Side::Server, Some(config)).await;
    while let Some(Ok(message)) = messages.next().await {
        let mut next = Some(message);
        while let Some(message) = next {
            if (message.is_text() || message.is_binary()) && messages.feed(message).await.is_err() {
                return;
            }
            next = match messages.next().now_or_never() {
                Some(Some(Ok(message))) => Some(message),
                Some(_) => return,
                None => None,
            };
        }
        if messages.flush().await.is_err() {
            return;
        }
    }
}

/// It writes a frame at a time and cannot be asked whether there is another one, so the socket does both.
async fn fast(mut socket: TcpStream) {
    if websocket::accept(&mut socket, |_| None).await.is_err() {
        return;
    }
    let socket = fastwebsockets::WebSocket::after_handshake(Coalesced::new(socket), fastwebsockets::Role::Server);
    let mut frames = FragmentCollector::new(socket);
    while let Ok(frame) = frames.read_frame().await {
        if frame.opcode == OpCode::Close {
            // Its own close has been gathered; whether it arrives is no longer of interest.
            let _ = frames.into_inner().shutdown().await;
            return;
        }
        let is_message = matches!(frame.opcode, OpCode::Text | OpCode::Binary);
        if is_message && frames.write_frame(frame).await.is_err() {
            return;
        }
    }
}

fn ours(listener: TcpListener) {
    tokio::spawn(async move {
        let upgrade = async |mut socket| {
            let already_read = websocket::accept(&mut socket, |_| None).await?;
            Ok((socket, already_read))
        };
        Supervisor::builder(Echo).build().serve_with(listener, upgrade).await
    });
}

struct Echo;

impl Protocol for Echo {
    type Frame = Message;
    type Codec = WebSocket;
    type ProtocolError = Infallible;

    fn codec(&self) -> WebSocket {
        WebSocket::server(WebSocketOptions::default())
    }

    fn on_frame(&self, message: Message, _: &mut ConnectionContext<Message>) -> Reply<Message, Infallible> {
        match message {
            Message::Text(_) | Message::Binary(_) => Reply::Frame(message),
            _ => Reply::None,
        }
    }
}
