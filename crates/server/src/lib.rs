//! Tidewire: a realtime backend. Applications define buckets of JSON records, clients subscribe to live queries over WebSocket, and
//! every commit reaches every subscriber that should see it.

mod account;
mod auth;
mod caller;
mod command;
pub mod config;
mod connection;
mod core;
mod counters;
mod error;
mod failure;
mod following;
mod listen;
mod metrics;
mod operation;
mod options;
mod outlet;
mod patient;
mod programmatic;
mod rate;
mod reading;
mod reply;
mod request;
mod serve;
mod server;
mod subscription;
mod view;
mod wire;
mod writing;

pub use auth::{
    Access, DefaultAccess, Granted, Jwt, JwtAlgorithm, JwtError, JwtKey, JwtOptions, PermissionCheck, Permissions,
    Rule, RuleError, Session, StaticToken, StaticTokens, StaticTokensError, Tier, TokenExpiry, TokenValidator,
    Validation, ValidatorFailed,
};
pub use connection::ConnectionInfo;
pub use error::{Code, RequestError};
pub use metrics::ServerStats;
pub use options::{Auth, Backpressure, ConnectionLimits, Heartbeat, RateLimit, ServerOptions, TlsFiles};
pub use programmatic::ProgrammaticQuery;
pub use server::{Server, StartError};
pub use view::View;
