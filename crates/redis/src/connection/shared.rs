//! The state that the callers of a connection share with its actor.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};

use tokio::time::timeout_at;

use super::gate::Permit;
use super::queue::{Queue, Usage};
use super::request::PendingRequest;
use super::status::StatusSender;
use crate::cache::Cache;
use crate::observe::{ClientStats, Counters};
use crate::{ConnectionState, Error, Options, RequestPhase, WhileDown};

pub(crate) struct ConnectionShared {
    pub(crate) options: Options,
    pub(crate) status: StatusSender,
    pub(crate) queue: Queue,
    pub(crate) counters: Counters,
    /// Whether it is an exclusive connection of a client, which is not replaced.
    pub(super) is_exclusive: bool,
    /// The cache of the shared connection, if there is one.
    pub(crate) cache: Option<Cache>,
    /// The ID of the open connection on the server, or 0 if it is unknown.
    client_id: AtomicI64,
    /// How often `AUTH` was sent or answered on open connections: what the user may do may have changed.
    pub(crate) login_changes: AtomicU64,
}

impl ConnectionShared {
    /// The connection that all tasks of a client share.
    pub(crate) fn shared(options: Options) -> Self {
        Self::new(options, Counters::default(), false)
    }

    /// An exclusive connection of the client with this shared one.
    pub(crate) fn exclusive(shared: &Self) -> Self {
        let options = shared.options.clone().reconnect(false).while_down(WhileDown::WaitForAttempt);
        Self::new(options, Counters::of_another_connection(&shared.counters), true)
    }

    fn new(options: Options, counters: Counters, is_exclusive: bool) -> Self {
        let limit = Permit { commands: options.max_in_flight, bytes: options.max_in_flight_bytes };
        Self {
            options,
            status: StatusSender::new(),
            queue: Queue::new(limit),
            counters,
            is_exclusive,
            cache: None,
            client_id: AtomicI64::new(0),
            login_changes: AtomicU64::new(0),
        }
    }

    /// Sets the cache. The connection asks the server to track keys, and handles its invalidations.
    pub(crate) fn with_cache(self, cache: Option<Cache>) -> Self {
        Self { cache, ..self }
    }

    pub(super) fn set_client_id(&self, id: Option<i64>) {
        self.client_id.store(id.unwrap_or(0), Relaxed);
    }

    /// Returns the ID of the connection on the server, if it is known.
    pub(crate) fn client_id(&self) -> Option<i64> {
        Some(self.client_id.load(Relaxed)).filter(|id| *id != 0)
    }

    /// Whether the connection is open and accepts requests.
    pub(crate) fn is_open(&self) -> bool {
        self.status.state() == ConnectionState::Open && self.queue.is_accepting()
    }

    /// Waits for the outcome of the first attempt to connect.
    pub(crate) async fn attempted(&self) {
        let is_pending = |state| matches!(state, ConnectionState::Init | ConnectionState::Connecting);
        // Cannot fail, because `self` owns the sender.
        let _ = self.status.subscribe().wait_for(|status| !is_pending(status.state)).await;
    }

    /// Whether there is a connection, which may be closing.
    pub(crate) fn is_connected(&self) -> bool {
        matches!(self.status.state(), ConnectionState::Open | ConnectionState::Closing)
    }

    /// Queues a request once there is a permit for it, or fails at its deadline.
    pub(crate) async fn submit_in_turn(&self, bytes: &[u8], request: PendingRequest) -> Result<(), Error> {
        timeout_at(request.deadline, self.queue.submit_in_turn(bytes, request)).await.unwrap_or_else(|_| {
            self.counters.count_timeout(RequestPhase::Queued);
            Err(Error::TimedOut { phase: RequestPhase::Queued })
        })
    }

    /// Ends a request that will have no reply. Its permit is returned before its caller can send again.
    pub(super) fn fail(&self, request: PendingRequest, error: Error) {
        self.queue.release(request.permit);
        if let Some(reply) = request.reply {
            reply.fail(error);
        }
    }

    /// Ends an unsent request whose deadline has passed or whose caller has gone away.
    pub(super) fn time_out(&self, request: PendingRequest, phase: RequestPhase) {
        if request.has_caller() && !request.is_own() {
            self.counters.count_timeout(phase);
        }
        self.fail(request, Error::TimedOut { phase });
    }

    pub(crate) fn stats(&self) -> ClientStats {
        let stats = self.counters.snapshot();
        let Usage { queued, in_flight } = self.queue.usage();
        let cache = self.cache.as_ref().map(Cache::stats).unwrap_or_default();
        ClientStats { queued, in_flight: in_flight.commands, in_flight_bytes: in_flight.bytes, cache, ..stats }
    }
}

/// Keeps a connection open that is closing, until its deadline: the client itself may send requests over it.
pub(crate) struct Hold(Arc<ConnectionShared>);

impl Hold {
    pub(crate) fn new(connection: &Arc<ConnectionShared>) -> Self {
        connection.queue.hold();
        Self(Arc::clone(connection))
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.0.queue.unhold();
    }
}

impl fmt::Debug for ConnectionShared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConnectionShared").field("status", &*self.status.subscribe().borrow()).finish_non_exhaustive()
    }
}
