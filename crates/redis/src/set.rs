//! Several connections to one server.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use crate::connection::after;
use crate::observe::ClientStats;
use crate::{Client, Connection, ConnectionError, ConnectionState, Options};

/// Options of a [`ClientSet`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClientSetOptions {
    /// The number of clients, each with a connection of its own. Zero counts as one. Default: 2, the smallest number that
    /// uses another core.
    pub clients: usize,
    /// The time between two checks of a connection. Default: 5 s, as long as `connect_timeout`, which limits each check.
    pub health_interval: Duration,
}

impl Default for ClientSetOptions {
    fn default() -> Self {
        Self { clients: 2, health_interval: Duration::from_secs(5) }
    }
}

impl ClientSetOptions {
    /// Sets [`clients`](#structfield.clients).
    #[must_use]
    pub fn clients(mut self, clients: usize) -> Self {
        self.clients = clients;
        self
    }

    /// Sets [`health_interval`](#structfield.health_interval).
    #[must_use]
    pub fn health_interval(mut self, health_interval: Duration) -> Self {
        self.health_interval = health_interval;
        self
    }
}

/// Several clients of one server, for programs that keep the task of one connection busy. Clones share them.
///
/// ```
/// use tidewire_redis::{ClientSet, ClientSetOptions, Options, commands};
///
/// # #[tokio::main]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let redis = tidewire_testkit::RedisServer::start();
/// # let options = Options::default().address(redis.addr());
/// let set = ClientSet::connect(options, ClientSetOptions::default().clients(4)).await?;
/// // Requests for one key are sent in the order of their submission.
/// set.for_key("visits").send(commands::incr("visits")).await?;
/// // All others go where the fewest commands are in flight.
/// let visits: u64 = set.least_loaded().send(commands::get("visits").returning()).await?;
/// assert_eq!(visits, 1);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct ClientSet(Arc<SetShared>);

#[derive(Debug)]
struct SetShared {
    /// At least one.
    clients: Vec<Client>,
    /// Where the next search for a client begins, so that clients with the same load take turns.
    next: AtomicUsize,
}

impl ClientSet {
    /// Creates the clients and their drivers, which must be [run](Connection::run).
    ///
    /// All have the same options. If there is a name, `-0`, `-1` and so on are appended to it.
    pub fn new(options: &Options, set: ClientSetOptions) -> (Self, Vec<Connection>) {
        let client = |index| {
            let mut options = options.clone();
            options.name = options.name.map(|name| format!("{name}-{index}"));
            Client::with_health_checks(options, Some(set.health_interval))
        };
        let (clients, connections) = (0..set.clients.max(1)).map(client).unzip();
        (Self(Arc::new(SetShared { clients, next: AtomicUsize::new(0) })), connections)
    }

    /// Creates the clients, each running on a new task of the current tokio runtime, and waits for the first attempts to connect.
    ///
    /// # Errors
    ///
    /// Why one of the attempts failed. Then all clients are closed.
    pub async fn connect(options: Options, set: ClientSetOptions) -> Result<Self, ConnectionError> {
        let set = Self::start(options, set);
        for client in set.clients() {
            client.first_attempt().await?;
        }
        Ok(set)
    }

    /// Creates the clients, each running on a new task of the current tokio runtime. They connect in the background.
    ///
    /// # Panics
    ///
    /// If it is called outside of a tokio runtime.
    #[expect(clippy::needless_pass_by_value, reason = "like `Client::start`")]
    pub fn start(options: Options, set: ClientSetOptions) -> Self {
        let (set, connections) = Self::new(&options, set);
        for connection in connections {
            tokio::spawn(connection.run());
        }
        set
    }

    /// Returns the clients.
    pub fn clients(&self) -> &[Client] {
        &self.0.clients
    }

    /// Returns the client with the fewest commands in flight, of those whose connection is open and has not failed its last check.
    /// If there is none, of those that are open, and else any.
    pub fn least_loaded(&self) -> &Client {
        let clients = self.clients();
        let first = self.0.next.fetch_add(1, Relaxed);
        let rank = |index: &usize| {
            let shared = &clients[*index].shared;
            let (state, generation) = shared.connection.status.state_and_generation();
            let is_open = state == ConnectionState::Open;
            let is_healthy = is_open && shared.health.is_healthy(generation);
            (!is_healthy, !is_open, shared.connection.queue.usage().in_flight.commands)
        };
        let turns = (0..clients.len()).map(|offset| first.wrapping_add(offset) % clients.len());
        &clients[turns.min_by_key(rank).unwrap_or_default()]
    }

    /// Returns the client for a key, always the same one, so that requests for the key are sent in the order of their submission.
    ///
    /// While its connection is not open, they fail or wait as [`Options::while_down`] says, and are not sent over another one.
    pub fn for_key(&self, key: impl AsRef<[u8]>) -> &Client {
        // FNV-1a.
        let hash = key
            .as_ref()
            .iter()
            .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3));
        let clients = self.clients();
        let index = usize::try_from(hash % clients.len() as u64).unwrap_or_default();
        &clients[index]
    }

    /// Returns the statistics of each client.
    pub fn stats(&self) -> Vec<ClientStats> {
        self.clients().iter().map(Client::stats).collect()
    }

    /// Closes all clients at the same time, as [`Client::close`] does.
    pub async fn close(&self, grace: Duration) {
        let deadline = after(grace);
        for client in self.clients() {
            client.shared.close(deadline);
        }
        for client in self.clients() {
            client.close(grace).await;
        }
    }
}
