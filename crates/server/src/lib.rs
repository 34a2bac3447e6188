//! Tidewire: a realtime backend. Applications define buckets of JSON records, clients subscribe to live queries over WebSocket, and
//! every commit reaches every subscriber that should see it.

mod auth;
mod client;
pub mod config;
mod machine;
mod metrics;
mod network;
mod ops;
mod options;
mod protocol;
mod push;
mod revoked_users;
mod server;
mod session;
mod state;
mod transport;
mod work;

pub use auth::{
    Access, DefaultAccess, Grants, Jwt, JwtAlgorithm, JwtError, JwtKey, JwtKeys, JwtOptions, PermissionCheck,
    Permissions, Rule, RuleError, Session, StaticToken, StaticTokens, StaticTokensError, Tier, TokenExpiry,
    TokenValidator, Validation, ValidatorFailed,
};
pub use client::{Client, ClientPush, ClientSubscription};
pub use metrics::ServerStats;
pub use network::{Network, NetworkError};
pub use options::{
    Auth, Backpressure, BeforeLogin, ConnectionLimits, Heartbeat, Memory, RateLimit, ServerOptions, TlsFiles,
};
pub use protocol::disconnect::Disconnect;
pub use protocol::error::{Code, RequestError};
pub use push::programmatic::ProgrammaticQuery;
pub use push::view::View;
pub use server::{ReloadError, Server, StartError};
pub use session::connection::ConnectionInfo;
pub use session::explanation::Explanation;
