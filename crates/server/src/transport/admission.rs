//! Admission of sockets by the limits of their address.
//!
//! A socket is counted once: the permit that it acquires when it is accepted moves to its WebSocket connection.

use std::net::IpAddr;
use std::sync::Arc;

use crate::session::address_limit::{AddressLimit, AddressPermit};

/// Number of sockets above the limit of an address that may still send one request, so that they receive the reason: a WebSocket
/// client as a close frame, any other as a response. Further sockets are closed immediately.
const MAX_REJECTED_PER_ADDRESS: usize = 64;

/// The limit of sockets per address.
#[derive(Debug, Clone)]
pub(super) struct SocketLimit {
    /// `None` means unlimited.
    limits: Option<Limits>,
}

#[derive(Debug, Clone)]
struct Limits {
    sockets: Arc<AddressLimit>,
    rejected: Arc<AddressLimit>,
}

/// The permit of an accepted socket. Clones share the permit.
#[derive(Debug, Clone)]
pub(super) enum SocketPermit {
    /// Within the limit; `None` if there is no limit.
    Within(Option<AddressPermit>),
    /// Above the limit of the address.
    Above { sockets: Arc<AddressLimit>, _rejected: AddressPermit },
    /// From a trusted proxy, whose clients are counted per request; `None` if there is no limit.
    Proxy(Option<Arc<AddressLimit>>),
}

/// The limit of sockets of an address is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TooManySockets;

/// The permits of a connection.
#[derive(Debug)]
pub(super) struct Admission {
    /// The permit of the socket; `None` if sockets are not limited.
    pub(super) socket: Option<AddressPermit>,
    /// Held until the first login; `None` if no login is required.
    pub(super) before_login: Option<AddressPermit>,
}

impl Admission {
    /// Returns whether it holds no permit.
    pub(super) fn is_empty(&self) -> bool {
        self.socket.is_none() && self.before_login.is_none()
    }
}

impl SocketLimit {
    pub(super) fn new(max: Option<usize>) -> Self {
        let limits =
            |max| Limits { sockets: AddressLimit::new(max), rejected: AddressLimit::new(MAX_REJECTED_PER_ADDRESS) };
        Self { limits: max.map(limits) }
    }

    /// Counts a socket. Returns `None` if it must be closed immediately.
    pub(super) fn accept(&self, address: IpAddr) -> Option<SocketPermit> {
        let Some(Limits { sockets, rejected }) = &self.limits else { return Some(SocketPermit::Within(None)) };
        if let Some(permit) = sockets.admit(address) {
            return Some(SocketPermit::Within(Some(permit)));
        }
        rejected.admit(address).map(|permit| SocketPermit::Above { sockets: Arc::clone(sockets), _rejected: permit })
    }

    /// Accepts a socket of a trusted proxy, whose own address is not limited.
    pub(super) fn accept_proxy(&self) -> SocketPermit {
        SocketPermit::Proxy(self.limits.as_ref().map(|limits| Arc::clone(&limits.sockets)))
    }
}

impl SocketPermit {
    /// Admits a request on this socket. A socket that was accepted above the limit is admitted if another socket of its address has
    /// been closed since.
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
