//! Server options.

mod limits;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

pub use self::limits::{Backpressure, ConnectionLimits, Heartbeat, Memory, RateLimit};
use crate::auth::Auth;
use crate::{Network, ProgrammaticQuery};

/// The options of a [`Server`](crate::Server).
///
/// ```
/// use std::time::Duration;
/// use tidewire::{RateLimit, ServerOptions};
///
/// let options = ServerOptions::default()
///     .port(0)
///     .allowed_origins(["https://tide.example"])
///     .rate_limit(RateLimit::new(100, Duration::from_secs(1)));
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ServerOptions {
    /// The name of the server in `server.stats` and `store.stats`. Default: `tidewire`.
    pub name: String,
    /// The address to listen on. Default: 127.0.0.1, so that a server without auth is not reachable from other machines.
    pub host: String,
    /// The port to listen on; 0 picks a free port. Default: 8080, because ports below 1024 need privileges.
    pub port: u16,
    /// The path of the WebSocket endpoint. Default: `/`, the shortest URL.
    pub path: String,
    /// The origins from which browser pages may connect. Clients other than browsers send no origin and are not restricted.
    ///
    /// Default: none. Then pages of any origin may connect if clients must log in, because browsers send cookies automatically but not
    /// tokens. If no login is required, only pages from this machine or from the server's own host may connect, so that other websites
    /// cannot use the server.
    pub allowed_origins: Option<Vec<String>>,
    /// The host names under which browser pages may reach the server if no login is required and `allowed_origins` is not set. IP
    /// addresses and `localhost` are always allowed. Default: none, which prevents DNS rebinding.
    pub allowed_hosts: Vec<String>,
    /// The proxies whose `Forwarded`, `X-Forwarded-For` and `X-Forwarded-Host` headers are trusted. Default: none, because any client
    /// can send these headers.
    pub trusted_proxies: Vec<Network>,
    /// Whether the trusted proxies start every connection with a PROXY protocol version 2 header. Default: false, because HTTP proxies
    /// send forwarding headers instead.
    pub proxy_protocol: bool,
    /// The address of the admin listener, which serves `/metrics` and the details of `/health` without TLS. If it is set, the client port
    /// does not serve them. Port 0 picks a free port. Default: none, everything on one port.
    pub admin_listen: Option<SocketAddr>,
    /// The maximum size of a message in bytes. Default: 1 MiB, the default limit of a record.
    pub max_payload_bytes: usize,
    /// The maximum number of connections. Default: 100 000, which use about half a GiB when idle.
    pub max_connections: usize,
    /// The maximum number of sockets of one IP address (for IPv6, of a /64), before and after the upgrade. Default: none, because
    /// clients behind a proxy share one address.
    pub max_connections_per_ip: Option<usize>,
    /// The maximum size of a result in bytes. Default: 8 MiB, a few of the largest records.
    pub max_result_bytes: usize,
    /// The maximum number of conditions in the filter of a request or of a named query. The values of `$in` are not counted. Default:
    /// 256.
    pub max_filter_conditions: usize,
    /// The timeout of a TLS handshake. Before the WebSocket handshake, it is also the timeout for reading a request head and for each
    /// write. Default: 10 s, enough for slow networks.
    pub handshake_timeout: Duration,
    /// The timeout of a request. Default: 30 s, after which most clients have given up.
    pub request_timeout: Duration,
    /// A request that takes at least this long is logged and counted as slow. Default: 1 s, far above the normal latency.
    pub slow_request: Duration,
    /// The detection of dead clients by pings.
    pub heartbeat: Heartbeat,
    /// The limits of the push buffer of a connection.
    pub backpressure: Backpressure,
    /// The memory limit of all connections.
    pub memory: Memory,
    /// The limits of subscriptions.
    pub connection_limits: ConnectionLimits,
    /// The rate limit per user or IP address. Default: none, because the right limit depends on the application.
    pub rate_limit: Option<RateLimit>,
    /// Authentication and permissions. Default: none, so that a first session needs no setup; every client has full access.
    pub auth: Option<Auth>,
    /// Whether errors include details, such as the invalid fields of a record. Default: true, because clients need them to correct
    /// requests.
    pub expose_error_details: bool,
    /// How long a revoked user cannot log in. Default: 1 h, the usual lifetime of a signed token.
    pub revocation_ttl: Duration,
    /// The directory in which the operation `server.backup` creates backups. Default: none, which disables the operation, so that no
    /// client can make the server write files.
    pub backup_dir: Option<PathBuf>,
    /// The certificate and its key. Default: none, plain TCP.
    pub tls: Option<TlsFiles>,
    /// Queries implemented in code by the embedding program, by name.
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

impl ServerOptions {
    /// Sets [`name`](#structfield.name).
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// Sets [`host`](#structfield.host).
    #[must_use]
    pub fn host(mut self, host: impl Into<String>) -> Self {
        self.host = host.into();
        self
    }

    /// Sets [`port`](#structfield.port).
    #[must_use]
    pub fn port(mut self, port: u16) -> Self {
        self.port = port;
        self
    }

    /// Sets [`path`](#structfield.path).
    #[must_use]
    pub fn path(mut self, path: impl Into<String>) -> Self {
        self.path = path.into();
        self
    }

    /// Sets [`allowed_origins`](#structfield.allowed_origins).
    #[must_use]
    pub fn allowed_origins(mut self, allowed_origins: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.allowed_origins = Some(allowed_origins.into_iter().map(Into::into).collect());
        self
    }

    /// Sets [`allowed_hosts`](#structfield.allowed_hosts).
    #[must_use]
    pub fn allowed_hosts(mut self, allowed_hosts: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.allowed_hosts = allowed_hosts.into_iter().map(Into::into).collect();
        self
    }

    /// Sets [`trusted_proxies`](#structfield.trusted_proxies).
    #[must_use]
    pub fn trusted_proxies(mut self, trusted_proxies: impl IntoIterator<Item = Network>) -> Self {
        self.trusted_proxies = trusted_proxies.into_iter().collect();
        self
    }

    /// Sets [`proxy_protocol`](#structfield.proxy_protocol).
    #[must_use]
    pub fn proxy_protocol(mut self, proxy_protocol: bool) -> Self {
        self.proxy_protocol = proxy_protocol;
        self
    }

    /// Sets [`admin_listen`](#structfield.admin_listen).
    #[must_use]
    pub fn admin_listen(mut self, admin_listen: impl Into<SocketAddr>) -> Self {
        self.admin_listen = Some(admin_listen.into());
        self
    }

    /// Sets [`max_payload_bytes`](#structfield.max_payload_bytes).
    #[must_use]
    pub fn max_payload_bytes(mut self, max_payload_bytes: usize) -> Self {
        self.max_payload_bytes = max_payload_bytes;
        self
    }

    /// Sets [`max_connections`](#structfield.max_connections).
    #[must_use]
    pub fn max_connections(mut self, max_connections: usize) -> Self {
        self.max_connections = max_connections;
        self
    }

    /// Sets [`max_connections_per_ip`](#structfield.max_connections_per_ip).
    #[must_use]
    pub fn max_connections_per_ip(mut self, max_connections_per_ip: usize) -> Self {
        self.max_connections_per_ip = Some(max_connections_per_ip);
        self
    }

    /// Sets [`max_result_bytes`](#structfield.max_result_bytes).
    #[must_use]
    pub fn max_result_bytes(mut self, max_result_bytes: usize) -> Self {
        self.max_result_bytes = max_result_bytes;
        self
    }

    /// Sets [`max_filter_conditions`](#structfield.max_filter_conditions).
    #[must_use]
    pub fn max_filter_conditions(mut self, max_filter_conditions: usize) -> Self {
        self.max_filter_conditions = max_filter_conditions;
        self
    }

    /// Sets [`handshake_timeout`](#structfield.handshake_timeout).
    #[must_use]
    pub fn handshake_timeout(mut self, handshake_timeout: Duration) -> Self {
        self.handshake_timeout = handshake_timeout;
        self
    }

    /// Sets [`request_timeout`](#structfield.request_timeout).
    #[must_use]
    pub fn request_timeout(mut self, request_timeout: Duration) -> Self {
        self.request_timeout = request_timeout;
        self
    }

    /// Sets [`slow_request`](#structfield.slow_request).
    #[must_use]
    pub fn slow_request(mut self, slow_request: Duration) -> Self {
        self.slow_request = slow_request;
        self
    }

    /// Sets [`heartbeat`](#structfield.heartbeat).
    #[must_use]
    pub fn heartbeat(mut self, heartbeat: Heartbeat) -> Self {
        self.heartbeat = heartbeat;
        self
    }

    /// Sets [`backpressure`](#structfield.backpressure).
    #[must_use]
    pub fn backpressure(mut self, backpressure: Backpressure) -> Self {
        self.backpressure = backpressure;
        self
    }

    /// Sets [`memory`](#structfield.memory).
    #[must_use]
    pub fn memory(mut self, memory: Memory) -> Self {
        self.memory = memory;
        self
    }

    /// Sets [`connection_limits`](#structfield.connection_limits).
    #[must_use]
    pub fn connection_limits(mut self, connection_limits: ConnectionLimits) -> Self {
        self.connection_limits = connection_limits;
        self
    }

    /// Sets [`rate_limit`](#structfield.rate_limit).
    #[must_use]
    pub fn rate_limit(mut self, rate_limit: RateLimit) -> Self {
        self.rate_limit = Some(rate_limit);
        self
    }

    /// Sets [`auth`](#structfield.auth).
    #[must_use]
    pub fn auth(mut self, auth: Auth) -> Self {
        self.auth = Some(auth);
        self
    }

    /// Sets [`expose_error_details`](#structfield.expose_error_details).
    #[must_use]
    pub fn expose_error_details(mut self, expose_error_details: bool) -> Self {
        self.expose_error_details = expose_error_details;
        self
    }

    /// Sets [`revocation_ttl`](#structfield.revocation_ttl).
    #[must_use]
    pub fn revocation_ttl(mut self, revocation_ttl: Duration) -> Self {
        self.revocation_ttl = revocation_ttl;
        self
    }

    /// Sets [`backup_dir`](#structfield.backup_dir).
    #[must_use]
    pub fn backup_dir(mut self, backup_dir: impl Into<PathBuf>) -> Self {
        self.backup_dir = Some(backup_dir.into());
        self
    }

    /// Sets [`tls`](#structfield.tls).
    #[must_use]
    pub fn tls(mut self, tls: TlsFiles) -> Self {
        self.tls = Some(tls);
        self
    }

    /// Adds a query to [`queries`](#structfield.queries).
    #[must_use]
    pub fn query(mut self, name: impl Into<String>, query: impl ProgrammaticQuery) -> Self {
        self.queries.insert(name.into(), Arc::new(query));
        self
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
