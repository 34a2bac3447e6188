//! Statistics and metrics of a server: [`ServerStats`], `/health` and `/metrics`.

pub(crate) mod counters;
pub(crate) mod operations;
pub(crate) mod page;

use std::net::SocketAddr;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use serde_json::{Value as Json, json};

use crate::ops::server_stats;
use crate::state::ServerState;

/// The current state of a server, and its counters since it started.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct ServerStats {
    /// The name of the server.
    pub name: String,
    /// The address on which the server listens.
    pub address: SocketAddr,
    /// The time since the server started.
    pub uptime: Duration,
    /// The number of connections, including in-process clients.
    pub connections: usize,
    /// The number of connections that are logged in.
    pub authenticated: usize,
    /// The number of subscriptions of all connections.
    pub subscriptions: usize,
    /// The number of requests that have ended, successfully or not.
    pub requests: u64,
    /// The number of requests that were answered with an error.
    pub failed: u64,
    /// The number of connections closed by a panic.
    pub panics: u64,
    /// The number of connections closed because the client did not read its pushes.
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

/// The response of `/health`.
pub(crate) struct Health {
    /// Whether the store accepts writes.
    pub(crate) is_ok: bool,
    uptime: Duration,
}

pub(crate) fn health(server: &ServerState) -> Health {
    Health { is_ok: !server.store.is_stopped(), uptime: server.started.elapsed() }
}

impl Health {
    /// Returns the part without details, for unauthenticated clients.
    pub(crate) fn to_public_json(&self) -> Json {
        json!({"status": if self.is_ok { "ok" } else { "unavailable" }})
    }

    pub(crate) fn to_json(&self) -> Json {
        let status = if self.is_ok { "ok" } else { "the disk has failed: nothing is written until a restart" };
        let uptime = u64::try_from(self.uptime.as_millis()).unwrap_or(u64::MAX);
        json!({"status": status, "version": env!("CARGO_PKG_VERSION"), "uptimeMs": uptime})
    }
}
