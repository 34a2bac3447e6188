//! Counters of the server.

use std::sync::atomic::AtomicU64;

/// What has happened since the start. Requests are counted by [operation](super::operations::OperationMetrics).
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// Messages that were not valid requests.
    pub(crate) invalid: AtomicU64,
    /// Requests refused by the rate limit.
    pub(crate) rate_limited: AtomicU64,
    /// Requests not run because the client does not read.
    pub(crate) backpressure: AtomicU64,
    /// Requests that missed their deadline.
    pub(crate) timed_out: AtomicU64,
    /// Requests that were logged as slow.
    pub(crate) slow: AtomicU64,
    pub(crate) logins_failed: AtomicU64,
    /// Logins refused because their address had failed too often.
    pub(crate) logins_throttled: AtomicU64,
    /// Connections closed because no login came in time.
    pub(crate) logins_timed_out: AtomicU64,
    /// Messages refused because their address sent too many before a login.
    pub(crate) before_login_limited: AtomicU64,
    /// Connections refused because their address has too many, in all or before a login.
    pub(crate) refused_connections: AtomicU64,
    /// Connections closed because the client does not read.
    pub(crate) slow_consumers: AtomicU64,
    /// Connections closed because no pong came.
    pub(crate) heartbeats_missed: AtomicU64,
    /// Connections closed because their session was revoked.
    pub(crate) revoked: AtomicU64,
    /// Connections closed by a panic.
    pub(crate) panics: AtomicU64,
    /// Subscriptions that the server has ended.
    pub(crate) subscriptions_ended: AtomicU64,
    /// Pushes dropped because the buffer of the connection was full.
    pub(crate) held_back: AtomicU64,
    /// Requests refused because of their origin or host.
    pub(crate) bad_origins: AtomicU64,
    /// Requests with forwarding headers from peers that are not trusted proxies.
    pub(crate) forwarded_ignored: AtomicU64,
    /// Requests of trusted proxies whose forwarding headers do not name the client.
    pub(crate) forwarded_invalid: AtomicU64,
    /// Sockets closed because of the PROXY protocol.
    pub(crate) proxy_headers_refused: AtomicU64,
    /// Sockets refused because there were too many, in all or from one address.
    pub(crate) refused_sockets: AtomicU64,
    pub(crate) backups: AtomicU64,
    pub(crate) backups_failed: AtomicU64,
}
