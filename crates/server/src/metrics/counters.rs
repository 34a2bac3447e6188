//! Event counters of the server.

use std::sync::atomic::AtomicU64;

/// Event counters since the start of the server. Requests are counted per
/// [operation](super::operations::OperationMetrics).
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// Messages that were not valid requests.
    pub(crate) invalid: AtomicU64,
    /// Requests rejected by the rate limit.
    pub(crate) rate_limited: AtomicU64,
    /// Requests rejected because the client does not read its pushes.
    pub(crate) backpressure: AtomicU64,
    /// Requests that timed out.
    pub(crate) timed_out: AtomicU64,
    /// Requests that were logged as slow.
    pub(crate) slow: AtomicU64,
    pub(crate) logins_failed: AtomicU64,
    /// Logins rejected because of too many failed logins from the address.
    pub(crate) logins_throttled: AtomicU64,
    /// Connections closed because the client did not log in within the login timeout.
    pub(crate) logins_timed_out: AtomicU64,
    /// Messages rejected by the rate limit before login.
    pub(crate) before_login_limited: AtomicU64,
    /// Connections rejected because their address has too many, in total or before login.
    pub(crate) rejected_connections: AtomicU64,
    /// Connections closed because the client did not read its pushes.
    pub(crate) slow_consumers: AtomicU64,
    /// Connections closed because no pong arrived.
    pub(crate) heartbeats_missed: AtomicU64,
    /// Connections closed because their session was revoked.
    pub(crate) revoked: AtomicU64,
    /// Connections closed by a panic.
    pub(crate) panics: AtomicU64,
    /// Subscriptions ended by the server.
    pub(crate) subscriptions_ended: AtomicU64,
    /// Pushes dropped because the push buffer was full. The client gets a snapshot when it has read.
    pub(crate) held_back: AtomicU64,
    /// HTTP requests rejected because of their origin or host.
    pub(crate) rejected_origins: AtomicU64,
    /// HTTP requests with forwarding headers from peers that are not trusted proxies.
    pub(crate) forwarded_ignored: AtomicU64,
    /// HTTP requests from trusted proxies with invalid forwarding headers.
    pub(crate) forwarded_invalid: AtomicU64,
    /// Sockets closed because of a missing, invalid or untrusted PROXY protocol header.
    pub(crate) rejected_proxy_headers: AtomicU64,
    /// Sockets rejected because there were too many, in total or from one address.
    pub(crate) rejected_sockets: AtomicU64,
    pub(crate) backups: AtomicU64,
    pub(crate) backups_failed: AtomicU64,
}
