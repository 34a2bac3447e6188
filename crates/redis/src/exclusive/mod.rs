//! Exclusive connections: for commands that a shared connection cannot have.
//!
//! The set opens a connection when it needs one and keeps it for the next caller. At most
//! [`Options::max_exclusive`](crate::Options::max_exclusive) are in use at a time; further callers wait. Each is a connection
//! with its own actor, like the shared one, but it is not replaced when it is lost: its only request ends with the error, and the next
//! caller gets another connection.

pub(crate) mod blocking;
mod unclaimed;

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Weak};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{Instant, timeout_at};

pub use self::unclaimed::{UnclaimedHook, UnclaimedReply};
use crate::client::ClientShared;
use crate::connection::{Actor, ConnectionShared};
use crate::observe::ExclusiveStats;
use crate::sync::{Mutex, lock};
use crate::{Error, Options, RequestOutcome, RequestPhase};

/// The exclusive connections of a client.
pub(crate) struct ExclusiveSet {
    state: Mutex<SetState>,
    /// A permit for each connection that may be in use.
    permits: Arc<Semaphore>,
    /// Whether the client is closing.
    is_closed: watch::Sender<bool>,
}

struct SetState {
    /// Connections that no caller uses, the last used one last.
    idle: Vec<Arc<ConnectionShared>>,
    /// All connections that have not ended.
    all: Vec<Weak<ConnectionShared>>,
    stats: ExclusiveStats,
    /// When all connections must have ended, if the client is closing.
    closing: Option<Instant>,
}

/// A connection that one caller uses. When it is dropped, the connection goes back to the set, or is closed if it cannot be used again.
pub(crate) struct Lease {
    client: Arc<ClientShared>,
    connection: Arc<ConnectionShared>,
    /// Whether the next caller must not have the connection, for example because keys are watched.
    is_tainted: AtomicBool,
    _permit: OwnedSemaphorePermit,
}

impl ExclusiveSet {
    pub(crate) fn new(options: &Options) -> Self {
        let state = SetState { idle: Vec::new(), all: Vec::new(), stats: ExclusiveStats::default(), closing: None };
        // With a limit of zero no command could be sent.
        let limit = options.max_exclusive.clamp(1, Semaphore::MAX_PERMITS);
        Self {
            state: Mutex::new(state),
            permits: Arc::new(Semaphore::new(limit)),
            is_closed: watch::Sender::new(false),
        }
    }

    /// Takes a connection that is open or being opened. Fails at the deadline, if all are in use.
    pub(crate) async fn lease(&self, client: &Arc<ClientShared>, deadline: Instant) -> Result<Lease, Error> {
        let closed = || Error::Closed { outcome: RequestOutcome::NeverSent };
        let timed_out = || {
            client.connection.counters.count_timeout(RequestPhase::Queued);
            Error::TimedOut { phase: RequestPhase::Queued }
        };
        if deadline <= Instant::now() {
            return Err(timed_out());
        }
        let permit = match timeout_at(deadline, Arc::clone(&self.permits).acquire_owned()).await {
            Ok(permit) => permit.map_err(|_| closed())?,
            Err(_) => return Err(timed_out()),
        };
        let connection = match self.take_idle() {
            Some(connection) => connection,
            None => self.open(client).ok_or_else(closed)?,
        };
        Ok(Lease { client: Arc::clone(client), connection, is_tainted: AtomicBool::new(false), _permit: permit })
    }

    /// Takes the idle connection that was last used. Those that the server has closed meanwhile are dropped.
    fn take_idle(&self) -> Option<Arc<ConnectionShared>> {
        let mut state = lock(&self.state);
        while let Some(connection) = state.idle.pop() {
            if connection.is_open() {
                return Some(connection);
            }
        }
        None
    }

    /// Starts a connection. Returns `None` if the client is closed.
    fn open(&self, client: &ClientShared) -> Option<Arc<ConnectionShared>> {
        let connection = Arc::new(ConnectionShared::exclusive(&client.connection));
        let mut actor = Actor::new(Arc::clone(&connection));
        let mut state = lock(&self.state);
        if state.closing.is_some() {
            return None;
        }
        state.stats.opened += 1;
        state.all.retain(|connection| connection.strong_count() > 0);
        state.all.push(Arc::downgrade(&connection));
        drop(state);
        client.tasks.spawn(async move { actor.run().await }).then_some(connection)
    }

    /// Closes all connections.
    pub(crate) fn close(&self, deadline: Instant) {
        self.permits.close();
        let all: Vec<_> = {
            let mut state = lock(&self.state);
            state.closing = Some(state.closing.map_or(deadline, |closing| closing.min(deadline)));
            state.idle.clear();
            state.all.iter().filter_map(Weak::upgrade).collect()
        };
        for connection in all {
            connection.queue.close(deadline);
        }
        self.is_closed.send_replace(true);
    }

    /// Waits until the client is closing.
    pub(crate) async fn closed(&self) {
        // Cannot fail, because `self` owns the sender.
        let _ = self.is_closed.subscribe().wait_for(|is_closed| *is_closed).await;
    }

    pub(crate) fn stats(&self) -> ExclusiveStats {
        let state = lock(&self.state);
        let open = state.all.iter().filter_map(Weak::upgrade).filter(|connection| connection.is_open()).count();
        let idle = state.idle.iter().filter(|connection| connection.is_open()).count();
        ExclusiveStats { open, in_use: open - idle, ..state.stats }
    }

    pub(crate) fn count(&self, add: impl FnOnce(&mut ExclusiveStats)) {
        add(&mut lock(&self.state).stats);
    }
}

impl Lease {
    pub(crate) fn connection(&self) -> &ConnectionShared {
        &self.connection
    }

    pub(crate) fn client(&self) -> &Arc<ClientShared> {
        &self.client
    }

    /// Has the connection closed when the lease is dropped, unless [`clear_taint`](Self::clear_taint) is called. Returns whether it
    /// was so already.
    pub(crate) fn taint(&self) -> bool {
        self.is_tainted.swap(true, Relaxed)
    }

    /// Allows the next caller to have the connection.
    pub(crate) fn clear_taint(&self) {
        self.is_tainted.store(false, Relaxed);
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease").field("connection", &self.connection).finish_non_exhaustive()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let is_clean = !*self.is_tainted.get_mut() && self.connection.queue.usage().in_flight.commands == 0;
        let mut state = lock(&self.client.exclusive.state);
        if is_clean && state.closing.is_none() && self.connection.is_open() {
            state.idle.push(Arc::clone(&self.connection));
        } else {
            drop(state);
            self.connection.queue.close(Instant::now());
        }
    }
}
