//! The driver of a client.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};

use crate::client::ClientShared;
use crate::connection::Actor;
use crate::health;
use crate::rotation::LoginPublisher;
use crate::tasks::TaskRunner;

/// The driver of a client: its shared connection and its background tasks. It does nothing until it is [run](Self::run).
///
/// Dropping it closes the client: requests in flight end with [`Error::Closed`](crate::Error::Closed).
#[must_use = "nothing is sent unless it is run"]
pub struct Connection {
    shared: Arc<ClientShared>,
    tasks: TaskRunner,
    /// If the provider of credentials announces changes.
    publisher: Option<LoginPublisher>,
    /// The time between checks of the connection, if it is checked.
    health_interval: Option<Duration>,
    /// Dropped last, because it publishes [`ConnectionState::Closed`](crate::ConnectionState::Closed).
    actor: Actor,
}

impl Connection {
    pub(crate) fn new(
        shared: Arc<ClientShared>,
        tasks: TaskRunner,
        publisher: Option<LoginPublisher>,
        health_interval: Option<Duration>,
    ) -> Self {
        let actor = Actor::new(Arc::clone(&shared.connection));
        Self { shared, tasks, publisher, health_interval, actor }
    }

    /// Connects, sends, receives and reconnects. Returns when the client has been closed, its last handle has been dropped, or the
    /// server has refused the login.
    pub async fn run(mut self) {
        // Aborted when the shared connection has ended.
        let mut until_close = JoinSet::new();
        if let Some(publisher) = self.publisher.take() {
            until_close.spawn(publisher.run());
        }
        if let Some(interval) = self.health_interval {
            let client = Arc::clone(&self.shared);
            until_close.spawn(async move { match health::check_regularly(client, interval).await {} });
        }
        tokio::select! {
            biased;
            () = self.actor.run() => {}
            never = self.tasks.run() => match never {},
        }
        drop(until_close);
        // Unless the client is closing, its login was refused, so the other connections cannot be replaced either.
        let deadline = self.shared.connection.queue.closing().unwrap_or_else(Instant::now);
        self.shared.close(deadline);
        // Tasks that do not end in time are aborted. Their requests end with them.
        let _ = timeout_at(deadline, self.tasks.finish()).await;
        self.tasks.abort().await;
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").finish_non_exhaustive()
    }
}
