//! The source of a socket and of its requests: a client, or a proxy that forwards for its clients.

use std::io;
use std::net::{IpAddr, SocketAddr};

use hyper::header::{self, HeaderMap, HeaderValue};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::forwarded::{self, Forwarded, ForwardedError};
use super::proxy_protocol::{self, ProxyHeaderError, SIGNATURE};
use crate::ServerOptions;

/// The source of a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SocketSource {
    /// The peer of the socket, or the client in the PROXY protocol header.
    pub(super) address: SocketAddr,
    pub(super) forwarding: Forwarding,
}

/// How the `Forwarded` and `X-Forwarded-*` headers of a socket are handled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Forwarding {
    /// The peer is a trusted proxy: the headers determine the client.
    Trusted,
    /// The peer is not a trusted proxy: the headers are ignored, with a warning.
    Untrusted,
    /// The headers are ignored: the client is known from the PROXY protocol, or its address does not matter.
    Unused,
}

/// The client of one request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RequestSource {
    pub(super) client: SocketAddr,
    /// The `Host` that the client sent, according to a trusted proxy.
    pub(super) host: Option<String>,
}

impl SocketSource {
    /// Creates a source whose forwarding headers are ignored.
    pub(super) fn direct(peer: SocketAddr) -> Self {
        Self { address: canonical(peer), forwarding: Forwarding::Unused }
    }

    /// Determines the source of a new socket. Reads the PROXY protocol header if the peer must send one.
    pub(super) async fn detect(
        socket: &mut TcpStream,
        peer: SocketAddr,
        options: &ServerOptions,
    ) -> Result<Self, ProxyHeaderError> {
        let peer = canonical(peer);
        let forwarding = |address: IpAddr| {
            let is_trusted = forwarded::is_trusted(&options.trusted_proxies, address);
            if is_trusted { Forwarding::Trusted } else { Forwarding::Untrusted }
        };
        let of_peer = Self { address: peer, forwarding: forwarding(peer.ip()) };
        if !options.proxy_protocol {
            return Ok(of_peer);
        }
        let limit = options.handshake_timeout;
        if of_peer.forwarding == Forwarding::Untrusted {
            // HTTP and TLS would reject a PROXY protocol header too, but without a useful error.
            let mut begin = [0; SIGNATURE.len()];
            timeout(limit, socket.peek(&mut begin)).await.map_err(io::Error::from)??;
            return if begin == SIGNATURE { Err(ProxyHeaderError::NotTrusted) } else { Ok(of_peer) };
        }
        let client = timeout(limit, proxy_protocol::read_header(socket)).await;
        let Some(client) = client.map_err(|_| ProxyHeaderError::TimedOut)??.map(canonical) else {
            // The client is unknown, and it may have written the forwarding headers itself.
            return Ok(Self::direct(peer));
        };
        Ok(match forwarding(client.ip()) {
            // The client is another trusted proxy.
            Forwarding::Trusted => Self { address: client, forwarding: Forwarding::Trusted },
            _ => Self::direct(client),
        })
    }

    /// Determines the client of a request.
    pub(super) fn of_request(
        &self,
        headers: &HeaderMap,
        options: &ServerOptions,
    ) -> Result<RequestSource, ForwardedError> {
        if self.forwarding != Forwarding::Trusted {
            return Ok(self.as_client());
        }
        let Forwarded { client, host } = forwarded::read(headers, &options.trusted_proxies)?;
        // The headers do not include the port of the client.
        let client = client.map_or(self.address, |client| SocketAddr::new(client, 0));
        Ok(RequestSource { client, host })
    }

    /// Returns the source itself as the client.
    pub(super) fn as_client(&self) -> RequestSource {
        RequestSource { client: self.address, host: None }
    }
}

impl RequestSource {
    /// Returns the hosts that the client requested: from the proxy if known, otherwise the `Host` headers.
    pub(super) fn hosts<'r>(&'r self, headers: &'r HeaderMap) -> Vec<&'r [u8]> {
        match &self.host {
            Some(host) => vec![host.as_bytes()],
            None => headers.get_all(header::HOST).iter().map(HeaderValue::as_bytes).collect(),
        }
    }
}

fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}
