//! What is counted since the server was started.

use std::sync::atomic::{AtomicU64, AtomicUsize};

/// What is counted since the server was started, and what there is.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// Requests handled, whatever came of them.
    pub(crate) requests: AtomicU64,
    /// Messages that were no requests.
    pub(crate) unreadable: AtomicU64,
    /// Requests answered with an error.
    pub(crate) failed: AtomicU64,
    /// Requests refused because there were too many.
    pub(crate) rate_limited: AtomicU64,
    /// Requests not run because their client does not read.
    pub(crate) backpressure: AtomicU64,
    /// Requests that took too long.
    pub(crate) timed_out: AtomicU64,
    /// Requests that were logged as slow.
    pub(crate) slow: AtomicU64,
    /// Logins that failed.
    pub(crate) logins_failed: AtomicU64,
    /// Connections closed because their client does not read.
    pub(crate) slow_consumers: AtomicU64,
    /// Connections closed for want of a pong.
    pub(crate) heartbeats_missed: AtomicU64,
    /// Connections closed because sessions were revoked.
    pub(crate) revoked: AtomicU64,
    /// Connections closed by a panic.
    pub(crate) panics: AtomicU64,
    /// Subscriptions that ended by another's doing.
    pub(crate) subscriptions_ended: AtomicU64,
    /// Times that a subscription waited for its client to read.
    pub(crate) held_back: AtomicU64,
    /// Connections refused: their origin is not allowed.
    pub(crate) bad_origins: AtomicU64,
    /// Sockets refused before they said anything, because there were too many.
    pub(crate) refused_sockets: AtomicU64,
    /// Subscriptions on all connections.
    pub(crate) subscriptions: AtomicUsize,
}
