//! The WebSocket echo servers to compare.
//!
//! All of them use the handshake of tidewire-conn, so that they differ only in the handling of messages.

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

use super::super::conn::server::{EchoProtocol, Serve, accept, serve};
use super::coalesced::Coalesced;
use crate::role::Role;

/// The length of a text message.
pub(super) const BODY_BYTES: usize = 64;

/// Text messages, masked by the client.
pub(super) const MESSAGES: EchoProtocol = EchoProtocol { role: &ROLE, servers: ALL, handshake, exchange };

pub(super) const ROLE: Role = Role { name: "websocket-server", run: |arguments| serve(arguments, ALL) };

const ALL: &[(&str, Serve)] = &[
    ("tokio-tungstenite", |listener| accept(listener, tungstenite)),
    ("fastwebsockets", |listener| accept(listener, fast)),
    ("tidewire-conn", ours),
];

fn handshake(socket: &mut net::TcpStream) {
    let mut handshake = ClientHandshake::new("localhost", "/").expect("host and path are valid");
    socket.write_all(&handshake.request()).expect("the server reads");
    let (mut input, mut bytes) = (BytesMut::new(), [0; 1024]);
    while handshake.decode(&mut input).expect("the server accepts").is_none() {
        let length = socket.read(&mut bytes).expect("the server answers");
        assert!(length > 0, "the server closed the connection");
        input.extend_from_slice(&bytes[..length]);
    }
    assert!(input.is_empty(), "the server sends no message before the first request");
}

fn exchange(count: usize) -> (Vec<u8>, Vec<u8>) {
    const TEXT: u8 = 0x81;
    const MASKED: u8 = 0x80;
    const KEY: [u8; 4] = [0x37, 0xfa, 0x21, 0x3d];
    let length = u8::try_from(BODY_BYTES).expect("small");
    let body = [b'x'; BODY_BYTES];
    let masked = body.iter().zip(KEY.iter().cycle()).map(|(byte, key)| byte ^ key);
    let request: Vec<u8> = [TEXT, MASKED | length].into_iter().chain(KEY).chain(masked).collect();
    let reply: Vec<u8> = [TEXT, length].into_iter().chain(body).collect();
    (request.repeat(count), reply.repeat(count))
}

/// Configured for many connections: a small read buffer, and one flush when no more messages are ready to be read.
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

/// The library writes every frame separately and cannot tell whether another one is ready, so the socket batches the writes.
async fn fast(mut socket: TcpStream) {
    if websocket::accept(&mut socket, |_| None).await.is_err() {
        return;
    }
    let socket = fastwebsockets::WebSocket::after_handshake(Coalesced::new(socket), fastwebsockets::Role::Server);
    let mut frames = FragmentCollector::new(socket);
    while let Ok(frame) = frames.read_frame().await {
        if frame.opcode == OpCode::Close {
            // The close frame is in the buffer of the socket. An error no longer matters.
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
