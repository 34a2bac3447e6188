//! The settings of a server, each with a default.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::{PermissionCheck, Permissions, ProgrammaticQuery, TokenValidator};

/// The settings of a [`Server`](crate::Server).
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ServerOptions {
    /// What it calls itself. Default: `tidewire`.
    pub name: String,
    /// Where it listens. Default: 127.0.0.1, so that nobody else reaches a server without auth.
    pub host: String,
    /// Default: 8080. Zero picks a free one.
    pub port: u16,
    /// The path of the WebSocket. Default: `/`.
    pub path: String,
    /// The origins that a browser's page may have. Default: any.
    pub allowed_origins: Option<Vec<String>>,
    /// The longest message that is taken. Default: 1 MiB, as long as a record may be.
    pub max_payload_bytes: usize,
    /// How many connections there may be. Default: 100 000.
    pub max_connections: usize,
    /// How many one address may have. Default: as many as there may be.
    pub max_connections_per_ip: Option<usize>,
    /// The longest result. Default: 8 MiB.
    pub max_result_bytes: usize,
    /// How long a socket that is no WebSocket yet may take for the head of a request, and to take a byte of a response. Default: 10 s.
    pub handshake_timeout: Duration,
    /// How long a request may take. Default: 30 s.
    pub request_timeout: Duration,
    /// Requests that took longer are logged. Default: 1 s.
    pub slow_request: Duration,
    /// How it finds out that a client is gone.
    pub heartbeat: Heartbeat,
    /// What a client that does not read costs.
    pub backpressure: Backpressure,
    /// How many subscriptions there may be.
    pub connection_limits: ConnectionLimits,
    /// How many requests a user or address may make. Default: any number.
    pub rate_limit: Option<RateLimit>,
    /// Who may do what. Default: everybody everything.
    pub auth: Option<Auth>,
    /// Whether errors have details. Default: yes.
    pub expose_error_details: bool,
    /// How long a user whose sessions were revoked may not log in. Default: an hour.
    pub revocation_ttl: Duration,
    /// Certificate and key, as files in PEM. Default: none, plain TCP.
    pub tls: Option<TlsFiles>,
    /// Queries that are code of the host, by name.
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
            max_payload_bytes: 1 << 20,
            max_connections: 100_000,
            max_connections_per_ip: None,
            max_result_bytes: 8 << 20,
            handshake_timeout: Duration::from_secs(10),
            request_timeout: Duration::from_secs(30),
            slow_request: Duration::from_secs(1),
            heartbeat: Heartbeat::default(),
            backpressure: Backpressure::default(),
            connection_limits: ConnectionLimits::default(),
            rate_limit: None,
            auth: None,
            expose_error_details: true,
            revocation_ttl: Duration::from_hours(1),
            tls: None,
            queries: BTreeMap::new(),
        }
    }
}

/// Pings, and how long the answer may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Heartbeat {
    /// From one ping to the next. Default: 30 s.
    pub interval: Duration,
    /// From a ping to its pong. Default: 10 s.
    pub timeout: Duration,
}

impl Default for Heartbeat {
    fn default() -> Self {
        Self { interval: Duration::from_secs(30), timeout: Duration::from_secs(10) }
    }
}

/// What waits for a client that does not read.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Backpressure {
    /// So many bytes of pushes end the connection. Default: 1 MiB.
    pub max_buffered_bytes: usize,
    /// Above this part of them pushes are held back and requests are not run. Default: 0.8.
    pub high_water_mark: f64,
}

impl Default for Backpressure {
    fn default() -> Self {
        Self { max_buffered_bytes: 1 << 20, high_water_mark: 0.8 }
    }
}

/// How many subscriptions there may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConnectionLimits {
    /// On one connection. Default: 100.
    pub max_subscriptions_per_connection: usize,
    /// On all together. Default: 10 000.
    pub max_total_subscriptions: usize,
}

impl Default for ConnectionLimits {
    fn default() -> Self {
        Self { max_subscriptions_per_connection: 100, max_total_subscriptions: 10_000 }
    }
}

/// How many requests a user or an address may make.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct RateLimit {
    /// So many,
    pub max_requests: usize,
    /// in any span of this length.
    pub window: Duration,
}

impl RateLimit {
    /// So many requests in any span of this length.
    pub fn new(max_requests: usize, window: Duration) -> Self {
        Self { max_requests, window }
    }
}

/// Who is let in, and what they may do.
#[derive(Clone)]
#[non_exhaustive]
pub struct Auth {
    /// Whether a client has to log in at all. Default: yes.
    pub required: bool,
    /// Who a token belongs to.
    pub validator: Arc<dyn TokenValidator>,
    /// What may be done by whom. Default: everything that their role's tier allows.
    pub permissions: Permissions,
    /// Asked before the permissions. Default: nobody.
    pub check: Option<Arc<dyn PermissionCheck>>,
}

impl Auth {
    /// Everybody has to log in, and may do what their roles allow.
    pub fn new(validator: Arc<dyn TokenValidator>) -> Self {
        Self { required: true, validator, permissions: Permissions::default(), check: None }
    }
}

impl fmt::Debug for Auth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Auth")
            .field("required", &self.required)
            .field("permissions", &self.permissions)
            .finish_non_exhaustive()
    }
}

/// Where certificate and key are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate and those that lead to an authority, in PEM.
    pub certificate: PathBuf,
    /// Its private key, in PEM.
    pub key: PathBuf,
}
