//! Who is at the other end of a socket: a client, or a proxy that speaks for its clients.

use std::io;
use std::net::{IpAddr, SocketAddr};

use hyper::header::{self, HeaderMap, HeaderValue};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::forwarded::{self, Forwarded, ForwardedError};
use super::proxy_protocol::{self, ProxyHeaderError, SIGNATURE};
use crate::ServerOptions;

/// Where the bytes of a socket come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Source {
    /// The peer of the socket, or the client that the PROXY protocol names.
    pub(super) address: SocketAddr,
    pub(super) forwarding: Forwarding,
}

/// What the `Forwarded` and `X-Forwarded-*` headers of a socket are worth.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Forwarding {
    /// They come from a trusted proxy and name the client.
    Trusted,
    /// They come from a peer that is not trusted, and are ignored.
    Untrusted,
    /// They are not needed: the PROXY protocol has named the client, or its address does not matter.
    Unused,
}

/// The client of one request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RequestSource {
    pub(super) client: SocketAddr,
    /// The `Host` that the client sent, if a trusted proxy tells it.
    pub(super) host: Option<String>,
}

impl Source {
    /// A peer whose headers are not read.
    pub(super) fn direct(peer: SocketAddr) -> Self {
        Self { address: canonical(peer), forwarding: Forwarding::Unused }
    }

    /// Finds the source of a new socket. Reads the header of the PROXY protocol, if the peer must send one.
    pub(super) async fn of(
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
            // HTTP and TLS would refuse such bytes too. This finds out why.
            let mut begin = [0; SIGNATURE.len()];
            timeout(limit, socket.peek(&mut begin)).await.map_err(io::Error::from)??;
            return if begin == SIGNATURE { Err(ProxyHeaderError::NotTrusted) } else { Ok(of_peer) };
        }
        let client = timeout(limit, proxy_protocol::read_header(socket)).await;
        let Some(client) = client.map_err(|_| ProxyHeaderError::TimedOut)??.map(canonical) else {
            // The proxy does not tell the client, which may have written the headers.
            return Ok(Self::direct(peer));
        };
        Ok(match forwarding(client.ip()) {
            // The client is another trusted proxy.
            Forwarding::Trusted => Self { address: client, forwarding: Forwarding::Trusted },
            _ => Self::direct(client),
        })
    }

    /// Finds the client of a request.
    pub(super) fn of_request(
        &self,
        headers: &HeaderMap,
        options: &ServerOptions,
    ) -> Result<RequestSource, ForwardedError> {
        if self.forwarding != Forwarding::Trusted {
            return Ok(self.as_client());
        }
        let Forwarded { client, host } = forwarded::read(headers, &options.trusted_proxies)?;
        // The port of the client is not told.
        let client = client.map_or(self.address, |client| SocketAddr::new(client, 0));
        Ok(RequestSource { client, host })
    }

    /// The source itself as the client.
    pub(super) fn as_client(&self) -> RequestSource {
        RequestSource { client: self.address, host: None }
    }
}

impl RequestSource {
    /// The hosts that the client has named: what the proxy says, otherwise the `Host` headers.
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
