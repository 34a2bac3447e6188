//! Connectors, which establish the connections of a client.

use std::io;
use std::net::SocketAddr;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

/// Establishes the connections of a client. Called for every attempt to connect.
pub trait Connect: Send + Sync + 'static {
    /// The stream of a connection.
    type Socket: AsyncRead + AsyncWrite + Unpin + Send + 'static;

    /// Establishes a connection, including its handshakes.
    fn connect(&self) -> impl Future<Output = io::Result<Connected<Self::Socket>>> + Send;
}

/// An established connection.
#[derive(Debug)]
#[non_exhaustive]
pub struct Connected<S> {
    /// The stream.
    pub socket: S,
    /// The address of the server.
    pub peer: SocketAddr,
    /// Bytes that were read from the stream after the end of a handshake.
    pub already_read: Vec<u8>,
}

impl<S> Connected<S> {
    /// Creates a connection from which nothing has been read.
    pub fn new(socket: S, peer: SocketAddr) -> Self {
        Self { socket, peer, already_read: Vec::new() }
    }
}

impl<S> Connected<S> {
    /// Returns the connection, or an error if bytes have been read from it: in a TLS or WebSocket handshake the client sends first.
    pub(crate) fn without_early_data(self) -> io::Result<Self> {
        if self.already_read.is_empty() {
            return Ok(self);
        }
        Err(io::Error::new(io::ErrorKind::InvalidData, "the server sent data before the handshake"))
    }
}

/// A connector that uses TCP.
#[derive(Debug, Clone)]
pub struct TcpConnector {
    addr: String,
}

impl TcpConnector {
    /// Creates a connector to a host and port, such as `tide.example:7000`. The name is resolved at every attempt.
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
