//! The state of a server and what it has done: for the embedding program, for `/health` and for `/metrics`.

pub(crate) mod counters;
pub(crate) mod operations;
pub(crate) mod page;

use std::net::SocketAddr;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use serde_json::{Value as Json, json};

use crate::ops::server_stats;
use crate::state::ServerState;

/// The state of a server, and what it has done since its start.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct ServerStats {
    /// Its name.
    pub name: String,
    /// The address that it listens on.
    pub address: SocketAddr,
    /// How long it has been running.
    pub uptime: Duration,
    /// Connections, in-process clients included.
    pub connections: usize,
    /// Connections that are logged in.
    pub authenticated: usize,
    /// Subscriptions of all connections.
    pub subscriptions: usize,
    /// Requests that have ended, successful or not.
    pub requests: u64,
    /// Requests that were answered with an error.
    pub failed: u64,
    /// Connections that were ended by a panic.
    pub panics: u64,
    /// Connections that were closed because their client did not read.
    pub slow_consumers: u64,
    /// The result of `server.stats`.
    pub wire: Json,
}

pub(crate) fn stats(server: &ServerState, address: SocketAddr) -> ServerStats {
    let connections = server.connections_info();
    let counters = &server.counters;
    ServerStats {
        name: server.options.name.clone(),
        address,
        uptime: server.started.elapsed(),
        connections: connections.len(),
        authenticated: connections.iter().filter(|connection| connection.user_id.is_some()).count(),
        subscriptions: server.subscription_count(),
        requests: server.operations.requests(),
        failed: server.operations.failed(),
        panics: counters.panics.load(Relaxed),
        slow_consumers: counters.slow_consumers.load(Relaxed),
        wire: server_stats(server),
    }
}

/// The answer of `/health`.
pub(crate) struct Health {
    /// Whether the server can do its work.
    pub(crate) is_ok: bool,
    uptime: Duration,
}

pub(crate) fn health(server: &ServerState) -> Health {
    Health { is_ok: !server.store.is_stopped(), uptime: server.started.elapsed() }
}

impl Health {
    /// What everybody may know.
    pub(crate) fn to_public_json(&self) -> Json {
        json!({"status": if self.is_ok { "ok" } else { "unavailable" }})
    }

    pub(crate) fn to_json(&self) -> Json {
        let status = if self.is_ok { "ok" } else { "the disk has failed: nothing is written until a restart" };
        let uptime = u64::try_from(self.uptime.as_millis()).unwrap_or(u64::MAX);
        json!({"status": status, "version": env!("CARGO_PKG_VERSION"), "uptimeMs": uptime})
    }
}
