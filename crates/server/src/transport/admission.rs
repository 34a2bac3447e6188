//! The place of a socket in the limits of its address, from its acceptance to its end.
//!
//! A socket is counted once: the permit that it gets when it is accepted goes on to its WebSocket connection.

use std::net::IpAddr;
use std::sync::Arc;

use crate::session::address_limit::{AddressLimit, AddressPermit};

/// Sockets above the limit of an address that may send one request, so that they can be told why they are refused: a WebSocket client
/// by a close frame, any other by a response. Further ones are refused at once.
const MAX_REFUSED_PER_ADDRESS: usize = 64;

/// The limit of sockets of one address.
#[derive(Debug, Clone)]
pub(super) struct SocketLimit {
    /// None if there is no limit.
    limits: Option<Limits>,
}

#[derive(Debug, Clone)]
struct Limits {
    sockets: Arc<AddressLimit>,
    refused: Arc<AddressLimit>,
}

/// An accepted socket, as its address counts it. A clone is the same socket.
#[derive(Debug, Clone)]
pub(super) enum SocketPermit {
    /// It is within the limit. None if there is no limit.
    Within(Option<AddressPermit>),
    /// The address has as many sockets as it may have.
    Above { sockets: Arc<AddressLimit>, _refused: AddressPermit },
    /// It comes from a trusted proxy, whose clients are counted with each request. None if there is no limit.
    Proxy(Option<Arc<AddressLimit>>),
}

/// The address has as many sockets as it may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TooManySockets;

/// The permits of a connection, which its protocol gets when it begins.
#[derive(Debug)]
pub(super) struct Admission {
    /// For its socket. None if sockets have no limit.
    pub(super) socket: Option<AddressPermit>,
    /// Until its first login. None if no login is required.
    pub(super) before_login: Option<AddressPermit>,
}

impl Admission {
    /// Whether there is nothing to be held.
    pub(super) fn is_empty(&self) -> bool {
        self.socket.is_none() && self.before_login.is_none()
    }
}

impl SocketLimit {
    pub(super) fn new(max: Option<usize>) -> Self {
        let limits =
            |max| Limits { sockets: AddressLimit::new(max), refused: AddressLimit::new(MAX_REFUSED_PER_ADDRESS) };
        Self { limits: max.map(limits) }
    }

    /// Counts a socket. None if it is to be closed at once.
    pub(super) fn accept(&self, address: IpAddr) -> Option<SocketPermit> {
        let Some(Limits { sockets, refused }) = &self.limits else { return Some(SocketPermit::Within(None)) };
        if let Some(permit) = sockets.admit(address) {
            return Some(SocketPermit::Within(Some(permit)));
        }
        refused.admit(address).map(|permit| SocketPermit::Above { sockets: Arc::clone(sockets), _refused: permit })
    }

    /// Accepts a socket of a trusted proxy, which is not limited by its own address.
    pub(super) fn accept_proxy(&self) -> SocketPermit {
        SocketPermit::Proxy(self.limits.as_ref().map(|limits| Arc::clone(&limits.sockets)))
    }
}

impl SocketPermit {
    /// Admits a request of a client on this socket. One that was accepted above the limit is admitted if another socket of its address has been
    /// closed meanwhile.
    pub(super) fn admit(&self, address: IpAddr) -> Result<Option<AddressPermit>, TooManySockets> {
        match self {
            Self::Within(permit) => Ok(permit.clone()),
            Self::Above { sockets, .. } | Self::Proxy(Some(sockets)) => {
                sockets.admit(address).map(Some).ok_or(TooManySockets)
            }
            Self::Proxy(None) => Ok(None),
        }
    }
}
