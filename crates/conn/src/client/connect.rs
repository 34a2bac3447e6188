//! Connectors: how a client reaches its server.

use std::io;
use std::net::SocketAddr;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

/// How a client reaches its server, again and again.
pub trait Connect: Send + Sync + 'static {
    /// What it connects with.
    type Socket: AsyncRead + AsyncWrite + Unpin + Send + 'static;

    /// Makes a connection, handshakes included.
    fn connect(&self) -> impl Future<Output = io::Result<Connected<Self::Socket>>> + Send;
}

/// A connection that has been made.
#[derive(Debug)]
#[non_exhaustive]
pub struct Connected<S> {
    /// The stream.
    pub socket: S,
    /// Where it leads.
    pub peer: SocketAddr,
    /// What was read from it already, after a handshake.
    pub already_read: Vec<u8>,
}

impl<S> Connected<S> {
    /// A connection of which nothing has been read.
    pub fn new(socket: S, peer: SocketAddr) -> Self {
        Self { socket, peer, already_read: Vec::new() }
    }
}

impl<S> Connected<S> {
    /// Itself, if nothing has been read: where the client has to speak first, a server that does is another one.
    pub(crate) fn without_early_data(self) -> io::Result<Self> {
        if self.already_read.is_empty() {
            return Ok(self);
        }
        Err(io::Error::new(io::ErrorKind::InvalidData, "the server spoke before it was asked"))
    }
}

/// Connects by TCP.
#[derive(Debug, Clone)]
pub struct TcpConnector {
    addr: String,
}

impl TcpConnector {
    /// To a host and port, such as `tide.example:7000`. The name is looked up at every attempt.
    pub fn new(addr: impl Into<String>) -> Self {
        Self { addr: addr.into() }
    }
}

impl Connect for TcpConnector {
    type Socket = TcpStream;

    async fn connect(&self) -> io::Result<Connected<TcpStream>> {
        let socket = TcpStream::connect(&self.addr).await?;
        socket.set_nodelay(true)?;
        let peer = socket.peer_addr()?;
        Ok(Connected::new(socket, peer))
    }
}
