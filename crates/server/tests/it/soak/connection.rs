//! A connection that may be lost at any time. A loss is expected here, and is not a failure of the test.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use futures_util::{SinkExt as _, StreamExt as _};
use serde_json::{Value as Json, json};
use socket2::SockRef;
use tidewire_testkit::PATIENCE;
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::timeout;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::{WebSocketStream, client_async};

/// The receive buffer and segment size of a slow reader. Small segments bound what the kernel buffers on the server side.
const SLOW_READER_BUFFER_BYTES: u32 = 4096;
const SLOW_READER_SEGMENT_BYTES: u32 = 536;

/// The interval between attempts to connect.
const RETRY_INTERVAL: Duration = Duration::from_millis(5);

/// The connection has ended, by either side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ConnectionLost;

/// How a client disconnects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CloseMethod {
    /// With a close frame and the reply of the server.
    Close,
    /// With the end of the stream.
    Drop,
    /// With a reset.
    Reset,
}

/// A WebSocket connection that may be lost.
pub(super) struct Connection {
    socket: WebSocketStream<TcpStream>,
    next_id: u64,
}

impl Connection {
    /// Connects, with retries.
    pub(super) async fn connect(addr: SocketAddr, is_slow: bool) -> Self {
        // Not `wait_until_async`, whose future is not `Send`.
        let start = Instant::now();
        loop {
            if let Ok(connection) = Self::try_connect(addr, is_slow).await {
                return connection;
            }
            assert!(start.elapsed() < PATIENCE, "timed out after {PATIENCE:?} connecting to {addr}");
            tokio::time::sleep(RETRY_INTERVAL).await;
        }
    }

    async fn try_connect(addr: SocketAddr, is_slow: bool) -> Result<Self, ConnectionLost> {
        let socket = TcpSocket::new_v4().map_err(|_| ConnectionLost)?;
        if is_slow {
            socket.set_recv_buffer_size(SLOW_READER_BUFFER_BYTES).map_err(|_| ConnectionLost)?;
            SockRef::from(&socket).set_tcp_mss(SLOW_READER_SEGMENT_BYTES).map_err(|_| ConnectionLost)?;
        }
        let stream = socket.connect(addr).await.map_err(|_| ConnectionLost)?;
        let handshake = timeout(PATIENCE, client_async(format!("ws://{addr}/"), stream)).await;
        let (socket, _) = handshake
            .expect("the handshake must be answered, or the connection must end")
            .map_err(|_| ConnectionLost)?;
        let mut connection = Self { socket, next_id: 1 };
        let welcome = connection.receive().await?;
        assert_eq!(welcome["type"], "welcome", "the first message must be the welcome: {welcome}");
        Ok(connection)
    }

    /// Sends a request without waiting for its reply. Returns the request id.
    pub(super) async fn send(&mut self, operation: &str, params: &Json) -> Result<u64, ConnectionLost> {
        let id = self.next_id;
        self.next_id += 1;
        let mut request = params.clone();
        request["id"] = json!(id);
        request["type"] = json!(operation);
        self.send_json(&request).await?;
        Ok(id)
    }

    async fn send_json(&mut self, message: &Json) -> Result<(), ConnectionLost> {
        let sent = timeout(PATIENCE, self.socket.send(Message::text(message.to_string()))).await;
        sent.expect("the message must be sent, or the connection must end").map_err(|_| ConnectionLost)
    }

    /// Receives the next reply or push. Waits without a timeout. Cancel safe.
    pub(super) async fn receive(&mut self) -> Result<Json, ConnectionLost> {
        loop {
            let message = match self.socket.next().await {
                Some(Ok(Message::Text(text))) => text,
                Some(Ok(Message::Close(_)) | Err(_)) | None => return Err(ConnectionLost),
                Some(Ok(_)) => continue,
            };
            let message: Json = serde_json::from_str(message.as_str()).expect("every message must be JSON");
            match message["type"].as_str() {
                Some("ping") => {
                    self.send_json(&json!({"type": "pong", "timestamp": message["timestamp"]})).await?;
                }
                Some("system") => assert_eq!(message["event"], "shutdown", "{message}"),
                _ => return Ok(message),
            }
        }
    }

    /// Receives the next reply or push, with a timeout.
    pub(super) async fn expect(&mut self, what: &str) -> Result<Json, ConnectionLost> {
        let received = timeout(PATIENCE, self.receive()).await;
        received.unwrap_or_else(|_| panic!("timed out after {PATIENCE:?} waiting for {what}"))
    }

    /// Disconnects.
    pub(super) async fn disconnect(mut self, method: CloseMethod) {
        match method {
            CloseMethod::Close => {
                let closing = async {
                    if self.socket.close(None).await.is_ok() {
                        while let Some(Ok(_)) = self.socket.next().await {}
                    }
                };
                timeout(PATIENCE, closing).await.expect("a close must be answered, or the connection must end");
            }
            CloseMethod::Drop => {}
            // Fails only for a dead socket, which has the same effect.
            CloseMethod::Reset => _ = SockRef::from(self.socket.get_ref()).set_linger(Some(Duration::ZERO)),
        }
    }
}
