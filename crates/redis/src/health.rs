//! Periodic checks of a connection.
//!
//! A check is a `PING` of the client itself, behind the requests that are queued. A connection that does not answer within
//! [`Options::connect_timeout`](crate::Options::connect_timeout) is unhealthy until a later check succeeds. It is probed like any connection
//! with an overdue reply, and replaced if the server stays silent.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use tokio::time::sleep;

use crate::client::ClientShared;
use crate::connection::after;
use crate::resp::encode_command;
use crate::{ConnectionState, ServerError};

/// The result of the last check.
#[derive(Debug, Default)]
pub(crate) struct Health {
    /// The generation of the connection that has failed its last check, or 0. A new connection is healthy.
    failed: AtomicU64,
}

impl Health {
    /// Whether the connection of this generation has not failed its last check.
    pub(crate) fn is_healthy(&self, generation: u64) -> bool {
        self.failed.load(Relaxed) != generation
    }
}

/// Checks the shared connection of a client while it is open.
pub(crate) async fn check_regularly(client: Arc<ClientShared>, interval: Duration) -> Infallible {
    let connection = &client.connection;
    let (mut ping, mut status) = (Vec::new(), connection.status.subscribe());
    encode_command(&["PING"], &mut ping);
    loop {
        sleep(interval).await;
        // Cannot fail, because `connection` owns the sender.
        let generation =
            status.wait_for(|status| status.state == ConnectionState::Open).await.map_or(0, |open| open.generation);
        let replied = connection.call_own(&ping, after(connection.options.connect_timeout)).await;
        let error = replied.map(|reply| reply.as_error().map(|text| ServerError::parse(text)));
        // An error such as NOPERM is an answer.
        let has_failed = error.map_or(true, |error| error.is_some_and(|error| error.code.is_temporary()));
        client.health.failed.store(if has_failed { generation } else { 0 }, Relaxed);
        if has_failed {
            connection.counters.count(|stats| stats.health_checks_failed += 1);
        }
    }
}
