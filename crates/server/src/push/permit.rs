//! Permits that limit the subscriptions of a connection, and of all connections together.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use crate::session::connection::Connection;
use crate::state::ServerState;
use crate::{Code, RequestError};

/// A permit for one subscription. It is released on drop.
#[derive(Debug)]
pub(crate) struct SubscriptionPermit {
    server: Arc<ServerState>,
    connection_count: Arc<AtomicUsize>,
}

impl SubscriptionPermit {
    pub(crate) fn acquire(connection: &Connection) -> Result<Self, RequestError> {
        let (server, connection_count) = (&connection.server, &connection.subscription_count);
        let limits = server.options.connection_limits;
        let full = |max, owner| {
            let message = format!("{owner} has reached its limit of {max} subscriptions; unsubscribe from some first");
            RequestError::new(Code::RateLimited, message)
        };
        let acquire = |count: &AtomicUsize, max| {
            count.fetch_update(SeqCst, SeqCst, |count| (count < max).then_some(count + 1)).is_ok()
        };
        if !acquire(connection_count, limits.max_subscriptions_per_connection) {
            return Err(full(limits.max_subscriptions_per_connection, "this connection"));
        }
        if !acquire(&server.subscriptions, limits.max_total_subscriptions) {
            connection_count.fetch_sub(1, SeqCst);
            return Err(full(limits.max_total_subscriptions, "the server"));
        }
        Ok(Self { server: Arc::clone(server), connection_count: Arc::clone(connection_count) })
    }
}

impl Drop for SubscriptionPermit {
    fn drop(&mut self) {
        self.connection_count.fetch_sub(1, SeqCst);
        self.server.subscriptions.fetch_sub(1, SeqCst);
    }
}
