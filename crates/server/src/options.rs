//! The settings of a server.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::machine;
use crate::{Network, PermissionCheck, Permissions, ProgrammaticQuery, Tier, TokenValidator};

/// The settings of a [`Server`](crate::Server).
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ServerOptions {
    /// The name of the server, sent to clients in the welcome. Default: `tidewire`.
    pub name: String,
    /// The address to listen on. Default: 127.0.0.1, so that a server without auth is not reachable from other machines.
    pub host: String,
    /// The port to listen on; 0 picks a free one. Default: 8080, because ports below 1024 need privileges.
    pub port: u16,
    /// The path of the WebSocket. Default: `/`, the shortest URL.
    pub path: String,
    /// The origins that browser pages may have. Default: none. Then any page may connect if clients must log in, because tokens are
    /// not cookies. Otherwise only pages of this machine and of the server's own host may, so that no page of a stranger can use a
    /// server that needs no login. Other clients than browsers send no origin.
    pub allowed_origins: Option<Vec<String>>,
    /// The names of the server that browser pages may use where clients need not log in and `allowed_origins` is not set. IP addresses
    /// and `localhost` are always allowed. Default: none, because the owner of a domain can make its name resolve to this server.
    pub allowed_hosts: Vec<String>,
    /// The proxies whose `Forwarded`, `X-Forwarded-For` and `X-Forwarded-Host` headers are believed. Default: none, because any client
    /// can send these headers.
    pub trusted_proxies: Vec<Network>,
    /// Whether the trusted proxies begin every connection with a header of the PROXY protocol, version 2. Default: false, because
    /// proxies that forward HTTP send headers instead.
    pub proxy_protocol: bool,
    /// The address of `/metrics` and of the details of `/health`, which are then not served on the port of clients; port 0 picks a
    /// free one. It has no TLS. Default: none, one port for all.
    pub admin_listen: Option<SocketAddr>,
    /// The limit of a message in bytes. Default: 1 MiB, the default limit of a record.
    pub max_payload_bytes: usize,
    /// The limit of connections. Default: 100 000, which take about half a GiB when idle.
    pub max_connections: usize,
    /// The limit of sockets of one IP address (IPv6: of a /64), before and after their upgrade. Default: none, because clients behind
    /// a proxy share one address.
    pub max_connections_per_ip: Option<usize>,
    /// The limit of a result in bytes. Default: 8 MiB, a few of the largest records.
    pub max_result_bytes: usize,
    /// The number of conditions in the filter of a request or of a named query. The values of `$in` are not counted. Default: 256.
    pub max_filter_conditions: usize,
    /// The timeout of a socket before its WebSocket handshake, for reading the request head and for each write. Default: 10 s,
    /// enough for slow networks.
    pub handshake_timeout: Duration,
    /// The timeout of a request. Default: 30 s, after which most clients have given up.
    pub request_timeout: Duration,
    /// Requests that take at least this long are logged and counted. Default: 1 s, far above the normal latency.
    pub slow_request: Duration,
    /// The detection of dead clients by pings.
    pub heartbeat: Heartbeat,
    /// The limits of a slow consumer.
    pub backpressure: Backpressure,
    /// The limit of memory.
    pub memory: Memory,
    /// The limits of subscriptions.
    pub connection_limits: ConnectionLimits,
    /// The rate limit of a user or IP address. Default: none, because the right limit depends on the application.
    pub rate_limit: Option<RateLimit>,
    /// Authentication and permissions. Default: none, so that a first session needs no setup; every client has full access.
    pub auth: Option<Auth>,
    /// Whether errors have details, such as the invalid fields of a record. Default: true, because clients need them to correct
    /// requests.
    pub expose_error_details: bool,
    /// How long a revoked user cannot log in. Default: 1 h, the usual lifetime of a signed token.
    pub revocation_ttl: Duration,
    /// The directory in which the admin operation `server.backup` creates backups. Default: none; the operation is then refused,
    /// so that no client can make the server write files.
    pub backup_dir: Option<PathBuf>,
    /// The certificate and its key. Default: none, plain TCP.
    pub tls: Option<TlsFiles>,
    /// Queries that the host application implements, by name.
    pub queries: BTreeMap<String, Arc<dyn ProgrammaticQuery>>,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            name: "tidewire".to_owned(),
            host: "127.0.0.1".to_owned(),
            port: 8080,
            path: "/".to_owned(),
            allowed_origins: None,
            allowed_hosts: Vec::new(),
            trusted_proxies: Vec::new(),
            proxy_protocol: false,
            admin_listen: None,
            max_payload_bytes: 1 << 20,
            max_connections: 100_000,
            max_connections_per_ip: None,
            max_result_bytes: 8 << 20,
            max_filter_conditions: 256,
            handshake_timeout: Duration::from_secs(10),
            request_timeout: Duration::from_secs(30),
            slow_request: Duration::from_secs(1),
            heartbeat: Heartbeat::default(),
            backpressure: Backpressure::default(),
            memory: Memory::default(),
            connection_limits: ConnectionLimits::default(),
            rate_limit: None,
            auth: None,
            expose_error_details: true,
            revocation_ttl: Duration::from_hours(1),
            backup_dir: None,
            tls: None,
            queries: BTreeMap::new(),
        }
    }
}

/// The interval of pings and the timeout of the pong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Heartbeat {
    /// The time between two pings. Default: 30 s, below the idle timeout of common proxies.
    pub interval: Duration,
    /// The time from a ping to its pong, after which the connection is closed. Default: 10 s, enough for slow networks.
    pub timeout: Duration,
}

impl Default for Heartbeat {
    fn default() -> Self {
        Self { interval: Duration::from_secs(30), timeout: Duration::from_secs(10) }
    }
}

/// The limits of the push buffer of a connection.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Backpressure {
    /// The limit of the push buffer in bytes. A client that reads nothing for three seconds while more would be buffered is
    /// disconnected as a slow consumer. Default: 1 MiB, which bounds the memory of a connection.
    pub max_buffered_bytes: usize,
    /// The fraction of `max_buffered_bytes` above which pushes are held back and requests are refused. Default: 0.8, which leaves
    /// room for pushes that are already on their way.
    pub high_water_mark: f64,
}

impl Default for Backpressure {
    fn default() -> Self {
        Self { max_buffered_bytes: 1 << 20, high_water_mark: 0.8 }
    }
}

/// The limit of the memory that the server holds for its clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Memory {
    /// The limit of what all connections over sockets hold together, in bytes: messages that are not complete or wait, requests in
    /// flight, and replies and pushes that the clients have not read. Above it the connection that holds the most is closed with
    /// [`Disconnect::MEMORY_LIMIT`](crate::Disconnect::MEMORY_LIMIT). Default: a quarter of the memory of the machine, or of its
    /// control group if that has a lower limit, but at least 64 MiB; 1 GiB if the system does not tell.
    pub max_bytes: usize,
}

impl Memory {
    const UNKNOWN_BYTES: usize = 1 << 30;
    const LEAST_BYTES: usize = 64 << 20;
}

impl Default for Memory {
    fn default() -> Self {
        let quarter = machine::memory_bytes().and_then(|bytes| usize::try_from(bytes / 4).ok());
        Self { max_bytes: quarter.unwrap_or(Self::UNKNOWN_BYTES).max(Self::LEAST_BYTES) }
    }
}

/// The limits of subscriptions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConnectionLimits {
    /// The limit for one connection. Default: 100, more than a page has views.
    pub max_subscriptions_per_connection: usize,
    /// The limit for all connections together. Default: 10 000, which bounds the work of a commit.
    pub max_total_subscriptions: usize,
}

impl Default for ConnectionLimits {
    fn default() -> Self {
        Self { max_subscriptions_per_connection: 100, max_total_subscriptions: 10_000 }
    }
}

/// A limit of requests in a sliding window, per user, or per IP address before the login.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct RateLimit {
    /// The number of requests in a window.
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

/// The settings of authentication and permissions.
#[derive(Clone)]
#[non_exhaustive]
pub struct Auth {
    /// Whether clients must log in. Default: true, because auth that can be skipped protects nothing.
    pub required: bool,
    /// Validates the tokens of logins.
    pub validator: Arc<dyn TokenValidator>,
    /// The permission rules. Default: none; sessions may do what their tiers allow.
    pub permissions: Permissions,
    /// The tier of a session that has none of the roles `reader`, `writer` and `admin`. Above it, only a permission rule for one of
    /// its roles, or the [check](Self::check), allows an operation. Default: [`Tier::Write`], because a user of the application
    /// reads and writes records, and does not define buckets.
    pub default_tier: Tier,
    /// The tier of clients without a login, if none is [required](Self::required). Permission rules do not apply to them. Default:
    /// none, so that such clients may do everything, as on a server without auth.
    pub anonymous_tier: Option<Tier>,
    /// A check of the host application, consulted before the rules. Default: none.
    pub check: Option<Arc<dyn PermissionCheck>>,
    /// The time from the connection to its first login, where a login is required. Later the connection is closed with
    /// [`Disconnect::LOGIN_TIMEOUT`](crate::Disconnect::LOGIN_TIMEOUT). Default: 2 min, enough to type a password.
    pub login_timeout: Option<Duration>,
    /// The failed logins of an IP address (IPv6: of a /64) in a sliding window. At the limit further logins are refused with
    /// `RATE_LIMITED`, also with a valid token. Default: 30 in a minute, more than clients with expired tokens make.
    pub login_rate_limit: RateLimit,
    /// The limits of clients that have not logged in, where a login is required.
    pub before_login: BeforeLogin,
}

impl Auth {
    /// Creates settings that require a login and have no permission rules.
    pub fn new(validator: Arc<dyn TokenValidator>) -> Self {
        Self {
            required: true,
            validator,
            permissions: Permissions::tiers_only(),
            default_tier: Tier::Write,
            anonymous_tier: None,
            check: None,
            login_timeout: Some(Duration::from_mins(2)),
            login_rate_limit: RateLimit::new(30, Duration::from_mins(1)),
            before_login: BeforeLogin::default(),
        }
    }
}

impl fmt::Debug for Auth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Auth")
            .field("required", &self.required)
            .field("permissions", &self.permissions)
            .field("default_tier", &self.default_tier)
            .field("anonymous_tier", &self.anonymous_tier)
            .field("login_timeout", &self.login_timeout)
            .field("login_rate_limit", &self.login_rate_limit)
            .field("before_login", &self.before_login)
            .finish_non_exhaustive()
    }
}

/// The limits of clients that have not logged in, where a login is required. They end with the first login of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct BeforeLogin {
    /// The limit of a message in bytes, and of messages that wait while a token is validated. The limit of the server applies too.
    /// Default: 16 KiB, room for a large signed token.
    pub max_payload_bytes: usize,
    /// The messages of one IP address (IPv6: of a /64) in a sliding window, whatever they are. Default: 1000 in 10 s, which a crowd
    /// behind one address does not reach when it reconnects.
    pub rate_limit: RateLimit,
    /// The limit of connections of one IP address (IPv6: of a /64) that have not logged in. Default: 1000, which hold at most a few
    /// dozen MiB.
    pub max_connections_per_ip: usize,
}

impl Default for BeforeLogin {
    fn default() -> Self {
        Self {
            max_payload_bytes: 16 << 10,
            rate_limit: RateLimit::new(1000, Duration::from_secs(10)),
            max_connections_per_ip: 1000,
        }
    }
}

/// The PEM files of the TLS certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate, followed by its intermediate certificates.
    pub certificate: PathBuf,
    /// The private key of the certificate.
    pub key: PathBuf,
}
