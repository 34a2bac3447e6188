//! Limits of connections, memory and requests.

use std::time::Duration;

use crate::machine;

/// The interval of pings and the timeout of pongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Heartbeat {
    /// The interval between pings. Default: 30 s, below the idle timeout of common proxies.
    pub interval: Duration,
    /// How long to wait for a pong before the connection is closed. Default: 10 s, enough for slow networks.
    pub timeout: Duration,
}

impl Default for Heartbeat {
    fn default() -> Self {
        Self { interval: Duration::from_secs(30), timeout: Duration::from_secs(10) }
    }
}

impl Heartbeat {
    /// Sets [`interval`](#structfield.interval).
    #[must_use]
    pub fn interval(mut self, interval: Duration) -> Self {
        self.interval = interval;
        self
    }

    /// Sets [`timeout`](#structfield.timeout).
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }
}

/// The limits of the push buffer of a connection.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Backpressure {
    /// The limit of the push buffer in bytes. If pushes do not fit and the client reads nothing for three seconds, it is disconnected as a
    /// slow consumer. Default: 1 MiB, which bounds the memory of a connection.
    pub max_buffered_bytes: usize,
    /// The fraction of `max_buffered_bytes` above which requests are rejected. Default: 0.8, so that pushes caused by requests in
    /// flight still fit.
    pub high_water_mark: f64,
}

impl Default for Backpressure {
    fn default() -> Self {
        Self { max_buffered_bytes: 1 << 20, high_water_mark: 0.8 }
    }
}

impl Backpressure {
    /// Sets [`max_buffered_bytes`](#structfield.max_buffered_bytes).
    #[must_use]
    pub fn max_buffered_bytes(mut self, max_buffered_bytes: usize) -> Self {
        self.max_buffered_bytes = max_buffered_bytes;
        self
    }

    /// Sets [`high_water_mark`](#structfield.high_water_mark).
    #[must_use]
    pub fn high_water_mark(mut self, high_water_mark: f64) -> Self {
        self.high_water_mark = high_water_mark;
        self
    }
}

/// The limit of the memory held for clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Memory {
    /// The limit of the memory held by all socket connections together, in bytes: incomplete and queued messages, requests in flight,
    /// and replies and pushes that clients have not read. When it is exceeded, the connection that holds the most is closed with
    /// [`Disconnect::MEMORY_LIMIT`](crate::Disconnect::MEMORY_LIMIT). Default: a quarter of the memory of the machine, or of the limit
    /// of its control group if that is lower, but at least 64 MiB; 1 GiB if the memory size is unknown.
    pub max_bytes: usize,
}

impl Memory {
    const FALLBACK_BYTES: usize = 1 << 30;
    const MIN_BYTES: usize = 64 << 20;

    /// Sets [`max_bytes`](#structfield.max_bytes).
    #[must_use]
    pub fn max_bytes(mut self, max_bytes: usize) -> Self {
        self.max_bytes = max_bytes;
        self
    }
}

impl Default for Memory {
    fn default() -> Self {
        let quarter = machine::memory_bytes().and_then(|bytes| usize::try_from(bytes / 4).ok());
        Self { max_bytes: quarter.unwrap_or(Self::FALLBACK_BYTES).max(Self::MIN_BYTES) }
    }
}

/// The limits of subscriptions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConnectionLimits {
    /// The limit for one connection. Default: 100, more than most applications need.
    pub max_subscriptions_per_connection: usize,
    /// The limit for all connections together. Default: 10 000, which bounds the fan-out of a commit.
    pub max_total_subscriptions: usize,
}

impl Default for ConnectionLimits {
    fn default() -> Self {
        Self { max_subscriptions_per_connection: 100, max_total_subscriptions: 10_000 }
    }
}

impl ConnectionLimits {
    /// Sets [`max_subscriptions_per_connection`](#structfield.max_subscriptions_per_connection).
    #[must_use]
    pub fn max_subscriptions_per_connection(mut self, max_subscriptions_per_connection: usize) -> Self {
        self.max_subscriptions_per_connection = max_subscriptions_per_connection;
        self
    }

    /// Sets [`max_total_subscriptions`](#structfield.max_total_subscriptions).
    #[must_use]
    pub fn max_total_subscriptions(mut self, max_total_subscriptions: usize) -> Self {
        self.max_total_subscriptions = max_total_subscriptions;
        self
    }
}

/// A limit of requests in a sliding window, per user or, without a login, per IP address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct RateLimit {
    /// The maximum number of requests in a window.
    pub max_requests: usize,
    /// The length of the window.
    pub window: Duration,
}

impl RateLimit {
    /// Creates a limit of `max_requests` in any `window`.
    pub fn new(max_requests: usize, window: Duration) -> Self {
        Self { max_requests, window }
    }
}
