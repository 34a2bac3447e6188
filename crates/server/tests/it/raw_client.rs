//! A client that writes arbitrary bytes, for requests that no proper client sends.

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

/// Returns a WebSocket handshake for this path, with additional header lines.
pub(crate) fn handshake(path: &str, headers: &str) -> String {
    format!(
        "GET {path} HTTP/1.1\r\nHost: tide\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n{headers}\r\n"
    )
}

/// Returns a masked frame with an arbitrary first byte.
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

/// A socket and its unprocessed input.
pub(crate) struct RawClient<S = TcpStream> {
    pub(crate) stream: S,
    input: Vec<u8>,
}

impl RawClient {
    pub(crate) async fn connect(server: &Server) -> Self {
        Self::connect_to(server.address()).await
    }

    pub(crate) async fn connect_to(address: SocketAddr) -> Self {
        Self { stream: TcpStream::connect(address).await.unwrap(), input: Vec::new() }
    }

    /// Connects a WebSocket and reads the welcome message.
    pub(crate) async fn websocket(server: &Server) -> Self {
        Self::connect(server).await.welcomed().await
    }

    /// Connects from this address of the loopback network.
    pub(crate) async fn connect_from(server: &Server, address: impl Into<Ipv4Addr>) -> Self {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind((address.into(), 0).into()).unwrap();
        Self { stream: socket.connect(server.address()).await.unwrap(), input: Vec::new() }
    }

    /// Connects a WebSocket from this address of the loopback network.
    pub(crate) async fn websocket_from(server: &Server, address: Ipv4Addr) -> Self {
        Self::connect_from(server, address).await.welcomed().await
    }

    /// Connects a WebSocket with the smallest possible receive buffer.
    pub(crate) async fn with_small_buffer(server: &Server) -> Self {
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

    /// Waits until the server has read everything that was written: the receive queue of its socket is empty.
    pub(crate) async fn wait_until_read(&self) {
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
        timeout(PATIENCE, self.stream.write_all(bytes)).await.expect("write timed out").unwrap();
    }

    /// Writes these bytes on another task. Returns the reading half.
    pub(crate) fn split(self, bytes: Vec<u8>) -> RawClient<OwnedReadHalf> {
        let (stream, mut writing) = self.stream.into_split();
        tokio::spawn(async move {
            // If the server does not read them, the reading half observes the end of the connection.
            let _ = writing.write_all(&bytes).await;
            // The connection stays open until the reading half is dropped.
            writing.forget();
        });
        RawClient { stream, input: self.input }
    }

    pub(crate) async fn send(&mut self, text: &str) {
        self.write(&frame(TEXT, text.as_bytes())).await;
    }

    /// Sends a request and returns the next message.
    pub(crate) async fn call(&mut self, request: &Json) -> Json {
        self.send(&request.to_string()).await;
        self.json().await
    }

    /// Receives the close frame, which must be the next frame. Returns its code and reason.
    pub(crate) async fn immediate_close(&mut self) -> (u16, String) {
        let (kind, payload) = self.frame().await.expect("expected a close frame");
        assert_eq!(kind, 8, "expected a close frame, got {payload:?}");
        self.write(&frame(CLOSE, &payload[..2])).await;
        assert_eq!(self.frame().await, None);
        (u16::from_be_bytes([payload[0], payload[1]]), String::from_utf8(payload[2..].to_vec()).unwrap())
    }

    /// Receives frames until the server closes the socket. Returns the code and reason of the close frame.
    pub(crate) async fn closed(&mut self) -> (u16, String) {
        let mut said = (1006, String::new());
        while let Some((kind, payload)) = self.frame().await {
            if kind == 8 {
                let code = u16::from_be_bytes([payload[0], payload[1]]);
                said = (code, String::from_utf8(payload[2..].to_vec()).unwrap());
                // The closing handshake; the server may have closed the socket already.
                let _ = self.stream.write_all(&frame(CLOSE, &payload[..2])).await;
            }
        }
        said
    }
}

impl<S: AsyncRead + Unpin> RawClient<S> {
    /// Reads more input. Returns false at the end of the stream or after a reset.
    pub(crate) async fn read_some(&mut self) -> bool {
        let read = timeout(PATIENCE, self.stream.read_buf(&mut self.input)).await.expect("no input within the timeout");
        read.is_ok_and(|length| length > 0)
    }

    /// Removes the unprocessed input, and returns it as text.
    pub(crate) fn take_input(&mut self) -> String {
        String::from_utf8(std::mem::take(&mut self.input)).unwrap()
    }

    /// Reads at least this many more bytes into the input.
    pub(crate) async fn read_more(&mut self, bytes: usize) {
        let enough = self.input.len() + bytes;
        while self.input.len() < enough {
            assert!(self.read_some().await, "the connection ended after {} bytes", self.input.len());
        }
    }

    /// Waits for the head of a response. Returns false if the connection ends before.
    pub(crate) async fn has_response(&mut self) -> bool {
        while !self.input.windows(4).any(|bytes| bytes == b"\r\n\r\n") {
            if !self.read_some().await {
                return false;
            }
        }
        true
    }

    /// Receives the head of a response. Returns its status and its lowercase lines.
    pub(crate) async fn head(&mut self) -> (u16, String) {
        loop {
            if let Some(end) = self.input.windows(4).position(|bytes| bytes == b"\r\n\r\n") {
                let head = String::from_utf8(self.input.drain(..end + 4).collect()).unwrap();
                return (head[9..12].parse().unwrap(), head.to_lowercase());
            }
            assert!(self.read_some().await, "the connection ended within a head: {:?}", self.input);
        }
    }

    /// Receives a response. Returns its status, head and body. The head must have a content length.
    pub(crate) async fn response(&mut self) -> (u16, String, String) {
        let (status, head) = self.head().await;
        let length = head.split("content-length: ").nth(1).and_then(|rest| rest.split("\r\n").next());
        let length: usize = length.unwrap().parse().unwrap();
        while self.input.len() < length {
            assert!(self.read_some().await);
        }
        let body = String::from_utf8(self.input.drain(..length).collect()).unwrap();
        (status, head, body)
    }

    /// Receives a frame. Returns its opcode and payload; `None` if the connection has ended.
    pub(crate) async fn frame(&mut self) -> Option<(u8, Vec<u8>)> {
        loop {
            if let Some((header, len)) = header(&self.input)
                && self.input.len() >= header + len
            {
                let first = self.input[0];
                assert_eq!(first & 0xf0, 0x80, "the server must not fragment messages");
                let payload = self.input.drain(..header + len).skip(header).collect();
                return Some((first & 0x0f, payload));
            }
            if !self.read_some().await {
                return None;
            }
        }
    }

    /// Receives a text message.
    pub(crate) async fn json(&mut self) -> Json {
        let (kind, payload) = self.frame().await.expect("connection ended");
        assert_eq!(kind, 1, "expected a text message: {payload:?}");
        serde_json::from_slice(&payload).unwrap()
    }
}

/// Returns the lengths of a frame's header and payload.
fn header(input: &[u8]) -> Option<(usize, usize)> {
    match *input.get(1)? {
        126 => Some((4, u16::from_be_bytes(input.get(2..4)?.try_into().unwrap()).into())),
        127 => Some((10, usize::try_from(u64::from_be_bytes(input.get(2..10)?.try_into().unwrap())).unwrap())),
        len => Some((2, len.into())),
    }
}
