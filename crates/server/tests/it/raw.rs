//! A client that may do what a proper one does not: it writes the bytes that it is told to.

use std::net::{Ipv4Addr, SocketAddr};

use serde_json::Value as Json;
use tidewire::Server;
use tidewire_testkit::{PATIENCE, wait_until_async};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::OwnedReadHalf;
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::timeout;

pub(crate) const TEXT: u8 = 0x81;
pub(crate) const CLOSE: u8 = 0x88;

/// A handshake for this path, with these other header lines.
pub(crate) fn handshake(path: &str, more: &str) -> String {
    format!(
        "GET {path} HTTP/1.1\r\nHost: tide\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n{more}\r\n"
    )
}

/// A frame with any first byte, masked as clients mask.
pub(crate) fn frame(first: u8, payload: &[u8]) -> Vec<u8> {
    const KEY: [u8; 4] = [1, 2, 3, 4];
    let mut frame = vec![first];
    match payload.len() {
        len @ 0..126 => frame.push(0x80 | u8::try_from(len).unwrap()),
        len @ 126..=0xffff => {
            frame.push(0xfe);
            frame.extend_from_slice(&u16::try_from(len).unwrap().to_be_bytes());
        }
        len => {
            frame.push(0xff);
            frame.extend_from_slice(&(len as u64).to_be_bytes());
        }
    }
    frame.extend_from_slice(&KEY);
    frame.extend(payload.iter().zip(KEY.iter().cycle()).map(|(byte, key)| byte ^ key));
    frame
}

/// A socket, and what was read of it and not looked at.
pub(crate) struct Raw<S = TcpStream> {
    pub(crate) stream: S,
    input: Vec<u8>,
}

impl Raw {
    pub(crate) async fn connect(server: &Server) -> Self {
        Self::connect_to(server.address()).await
    }

    pub(crate) async fn connect_to(address: SocketAddr) -> Self {
        Self { stream: TcpStream::connect(address).await.unwrap(), input: Vec::new() }
    }

    /// A WebSocket that was welcomed.
    pub(crate) async fn websocket(server: &Server) -> Self {
        Self::connect(server).await.welcomed().await
    }

    /// A socket of a client with this address of the loopback network.
    pub(crate) async fn connect_from(server: &Server, address: impl Into<Ipv4Addr>) -> Self {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind((address.into(), 0).into()).unwrap();
        Self { stream: socket.connect(server.address()).await.unwrap(), input: Vec::new() }
    }

    /// A WebSocket of that client, which was welcomed.
    pub(crate) async fn websocket_from(server: &Server, address: Ipv4Addr) -> Self {
        Self::connect_from(server, address).await.welcomed().await
    }

    /// A WebSocket that was welcomed, and for which the system keeps as little as it can.
    pub(crate) async fn small(server: &Server) -> Self {
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_recv_buffer_size(4096).unwrap();
        let stream = socket.connect(server.address()).await.unwrap();
        Self { stream, input: Vec::new() }.welcomed().await
    }

    async fn welcomed(mut self) -> Self {
        self.stream.set_nodelay(true).unwrap();
        self.write(handshake("/", "").as_bytes()).await;
        let (status, _) = self.head().await;
        assert_eq!(status, 101);
        assert_eq!(self.json().await["type"], "welcome");
        self
    }

    /// Waits until the server has read all that was written: the receive queue of its socket is empty.
    pub(crate) async fn is_read_by_peer(&self) {
        let own = format!(":{:04X}", self.stream.local_addr().unwrap().port());
        let peer = format!(":{:04X}", self.stream.peer_addr().unwrap().port());
        wait_until_async("the server has read it", PATIENCE, async || {
            let sockets = std::fs::read_to_string("/proc/net/tcp").unwrap();
            let mut rows = sockets.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
            // Local address, remote address, state, queues.
            let row = rows.find(|row| row[1].ends_with(&peer) && row[2].ends_with(&own));
            row.is_some_and(|row| row[4].ends_with(":00000000"))
        })
        .await;
    }

    pub(crate) async fn write(&mut self, bytes: &[u8]) {
        timeout(PATIENCE, self.stream.write_all(bytes)).await.expect("it is taken in time").unwrap();
    }

    /// Goes on reading, while all this is written by another task.
    pub(crate) fn split(self, bytes: Vec<u8>) -> Raw<OwnedReadHalf> {
        let (stream, mut writing) = self.stream.into_split();
        tokio::spawn(async move {
            // Whoever reads finds out if it was not taken.
            let _ = writing.write_all(&bytes).await;
            // The connection stays open until whoever reads has gone.
            writing.forget();
        });
        Raw { stream, input: self.input }
    }

    pub(crate) async fn send(&mut self, text: &str) {
        self.write(&frame(TEXT, text.as_bytes())).await;
    }

    /// Sends a request, and returns its reply.
    pub(crate) async fn ask(&mut self, request: &Json) -> Json {
        self.send(&request.to_string()).await;
        self.json().await
    }

    /// The code and reason of the close frame, which must be the first frame: no message comes before it.
    pub(crate) async fn closed_at_once(&mut self) -> (u16, String) {
        let (kind, payload) = self.frame().await.expect("a close frame comes");
        assert_eq!(kind, 8, "a close frame was expected, not {payload:?}");
        self.write(&frame(CLOSE, &payload[..2])).await;
        assert_eq!(self.frame().await, None);
        (u16::from_be_bytes([payload[0], payload[1]]), String::from_utf8(payload[2..].to_vec()).unwrap())
    }

    /// The code and reason with which the server closes; messages before it are passed over. The socket has to end then, too.
    pub(crate) async fn closed(&mut self) -> (u16, String) {
        let mut said = (1006, String::new());
        while let Some((kind, payload)) = self.frame().await {
            if kind == 8 {
                let code = u16::from_be_bytes([payload[0], payload[1]]);
                said = (code, String::from_utf8(payload[2..].to_vec()).unwrap());
                // A proper answer; the server may have gone without it.
                let _ = self.stream.write_all(&frame(CLOSE, &payload[..2])).await;
            }
        }
        said
    }
}

impl<S: AsyncRead + Unpin> Raw<S> {
    /// Reads more. Returns whether there was any; a reset is an end too.
    pub(crate) async fn more(&mut self) -> bool {
        let read = timeout(PATIENCE, self.stream.read_buf(&mut self.input)).await.expect("something comes in time");
        read.is_ok_and(|length| length > 0)
    }

    /// Takes what was read and not looked at, as text.
    pub(crate) fn rest(&mut self) -> String {
        String::from_utf8(std::mem::take(&mut self.input)).unwrap()
    }

    /// Reads at least this many bytes, and keeps them.
    pub(crate) async fn read_more(&mut self, bytes: usize) {
        let enough = self.input.len() + bytes;
        while self.input.len() < enough {
            assert!(self.more().await, "the connection ended after {} bytes", self.input.len());
        }
    }

    /// Waits for the head of a response. Returns false if the connection ends without one.
    pub(crate) async fn has_response(&mut self) -> bool {
        while !self.input.windows(4).any(|bytes| bytes == b"\r\n\r\n") {
            if !self.more().await {
                return false;
            }
        }
        true
    }

    /// The status and the lines of a response's head.
    pub(crate) async fn head(&mut self) -> (u16, String) {
        loop {
            if let Some(end) = self.input.windows(4).position(|bytes| bytes == b"\r\n\r\n") {
                let head = String::from_utf8(self.input.drain(..end + 4).collect()).unwrap();
                return (head[9..12].parse().unwrap(), head.to_lowercase());
            }
            assert!(self.more().await, "the connection ended within a head: {:?}", self.input);
        }
    }

    /// A response with its body, whose length is in its head.
    pub(crate) async fn response(&mut self) -> (u16, String, String) {
        let (status, head) = self.head().await;
        let length = head.split("content-length: ").nth(1).and_then(|rest| rest.split("\r\n").next());
        let length: usize = length.unwrap().parse().unwrap();
        while self.input.len() < length {
            assert!(self.more().await);
        }
        let body = String::from_utf8(self.input.drain(..length).collect()).unwrap();
        (status, head, body)
    }

    /// The kind and payload of the next frame; none if the connection has ended.
    pub(crate) async fn frame(&mut self) -> Option<(u8, Vec<u8>)> {
        loop {
            if let Some((header, len)) = header(&self.input)
                && self.input.len() >= header + len
            {
                let first = self.input[0];
                assert_eq!(first & 0xf0, 0x80, "the server sends messages whole");
                let payload = self.input.drain(..header + len).skip(header).collect();
                return Some((first & 0x0f, payload));
            }
            if !self.more().await {
                return None;
            }
        }
    }

    /// The next message.
    pub(crate) async fn json(&mut self) -> Json {
        let (kind, payload) = self.frame().await.expect("the connection is open");
        assert_eq!(kind, 1, "a message was expected: {payload:?}");
        serde_json::from_slice(&payload).unwrap()
    }
}

/// How long a frame's header is, and its payload.
fn header(input: &[u8]) -> Option<(usize, usize)> {
    match *input.get(1)? {
        126 => Some((4, u16::from_be_bytes(input.get(2..4)?.try_into().unwrap()).into())),
        127 => Some((10, usize::try_from(u64::from_be_bytes(input.get(2..10)?.try_into().unwrap())).unwrap())),
        len => Some((2, len.into())),
    }
}
