//! A connection that may be lost at any moment, which is no failure here.

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

/// The receive buffer and the segments of a slow reader. The segments bound what the kernel of the server holds for it.
const SMALL_BUFFER: u32 = 4096;
const SMALL_SEGMENT: u32 = 536;

/// How often it is tried to connect.
const POLL: Duration = Duration::from_millis(5);

/// The connection has ended, whoever ended it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Lost;

/// How a client leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Leave {
    /// With a close frame, and the server's answer.
    Close,
    /// With the end of the stream.
    Drop,
    /// With a reset.
    Reset,
}

/// A connection that may be lost.
pub(super) struct Link {
    socket: WebSocketStream<TcpStream>,
    next_id: u64,
}

impl Link {
    /// Connects, as often as it takes.
    pub(super) async fn connect(addr: SocketAddr, is_slow: bool) -> Self {
        // As `wait_until_async` does, which cannot be moved between threads.
        let start = Instant::now();
        loop {
            if let Ok(link) = Self::try_connect(addr, is_slow).await {
                return link;
            }
            assert!(start.elapsed() < PATIENCE, "waited {PATIENCE:?} in vain until {addr} lets a client in");
            tokio::time::sleep(POLL).await;
        }
    }

    async fn try_connect(addr: SocketAddr, is_slow: bool) -> Result<Self, Lost> {
        let socket = TcpSocket::new_v4().map_err(|_| Lost)?;
        if is_slow {
            socket.set_recv_buffer_size(SMALL_BUFFER).map_err(|_| Lost)?;
            SockRef::from(&socket).set_tcp_mss(SMALL_SEGMENT).map_err(|_| Lost)?;
        }
        let stream = socket.connect(addr).await.map_err(|_| Lost)?;
        let shaking = timeout(PATIENCE, client_async(format!("ws://{addr}/"), stream)).await;
        let (socket, _) = shaking.expect("a handshake is answered, or the connection ends").map_err(|_| Lost)?;
        let mut link = Self { socket, next_id: 1 };
        let welcome = link.receive().await?;
        assert_eq!(welcome["type"], "welcome", "the first message is the welcome: {welcome}");
        Ok(link)
    }

    /// Sends a request, and does not wait for its reply. Returns its id.
    pub(super) async fn send(&mut self, operation: &str, params: &Json) -> Result<u64, Lost> {
        let id = self.next_id;
        self.next_id += 1;
        let mut request = params.clone();
        request["id"] = json!(id);
        request["type"] = json!(operation);
        self.send_json(&request).await?;
        Ok(id)
    }

    async fn send_json(&mut self, message: &Json) -> Result<(), Lost> {
        let sent = timeout(PATIENCE, self.socket.send(Message::text(message.to_string()))).await;
        sent.expect("what is sent is taken, or the connection ends").map_err(|_| Lost)
    }

    /// The next reply or push, however long it takes. May be given up, and asked again.
    pub(super) async fn receive(&mut self) -> Result<Json, Lost> {
        loop {
            let message = match self.socket.next().await {
                Some(Ok(Message::Text(text))) => text,
                Some(Ok(Message::Close(_)) | Err(_)) | None => return Err(Lost),
                Some(Ok(_)) => continue,
            };
            let message: Json = serde_json::from_str(message.as_str()).expect("every message is JSON");
            match message["type"].as_str() {
                Some("ping") => {
                    self.send_json(&json!({"type": "pong", "timestamp": message["timestamp"]})).await?;
                }
                Some("system") => assert_eq!(message["event"], "shutdown", "{message}"),
                _ => return Ok(message),
            }
        }
    }

    /// The next reply or push, which has to come.
    pub(super) async fn expect(&mut self, what: &str) -> Result<Json, Lost> {
        let received = timeout(PATIENCE, self.receive()).await;
        received.unwrap_or_else(|_| panic!("waited {PATIENCE:?} in vain for {what}"))
    }

    /// Leaves.
    pub(super) async fn leave(mut self, how: Leave) {
        match how {
            Leave::Close => {
                let closing = async {
                    if self.socket.close(None).await.is_ok() {
                        while let Some(Ok(_)) = self.socket.next().await {}
                    }
                };
                timeout(PATIENCE, closing).await.expect("a close is answered, or the connection ends");
            }
            Leave::Drop => {}
            // Fails for a socket that is dead already, which is what is wanted.
            Leave::Reset => _ = SockRef::from(self.socket.get_ref()).set_linger(Some(Duration::ZERO)),
        }
    }
}
