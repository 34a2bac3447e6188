//! The supervisor: admission, limits, and graceful shutdown of connections.
//!
//! An admitted connection is counted until its [`Permit`] is dropped. The permit is dropped however the connection ends, so the count
//! is always exact. A connection that has ended is never restarted.

use std::any::Any;
use std::collections::hash_map::{Entry, HashMap};
use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, mpsc};
use tokio::time::Instant;

use crate::actor::{Actor, Limits};
use crate::alarms::Alarms;
use crate::mailbox::Mailbox;
use crate::memory::{Accounts, Holder};
use crate::push::{LossReason, PushOptions, PushQueues};
use crate::session::ConnectionInfo;
use crate::stats::SupervisorCounters;
use crate::sync::lock;
use crate::timeouts::saturating_add;
use crate::{ConnectionContext, ConnectionId, FairnessConfig, MemoryLimit, Protocol, SessionRegistry, Stats, Timeouts};

/// Builds a [`Supervisor`]: see [`Supervisor::builder`].
pub struct Builder<P: Protocol> {
    protocol: P,
    push: PushOptions<P::Frame>,
    fairness: FairnessConfig,
    limits: Limits,
    timeouts: Timeouts,
    max_connections: usize,
    max_per_address: usize,
    memory: MemoryLimit,
}

impl<P: Protocol> Builder<P> {
    /// Sets how high-priority and low-priority pushes share a connection. Default: [`FairnessConfig::default`].
    #[must_use]
    pub fn fairness(self, fairness: FairnessConfig) -> Self {
        Self { fairness, ..self }
    }

    /// Sets the channel that receives the frames dropped by a [policy](crate::PushPolicy). A frame that does not fit into it is
    /// counted and logged. Default: none, dropped frames are only counted.
    #[must_use]
    pub fn dead_letters(self, dead_letters: mpsc::Sender<P::Frame>) -> Self {
        self.on_lost(move |frame, _| dead_letters.try_send(frame).is_ok())
    }

    /// Sets the function that receives lost frames.
    pub(crate) fn on_lost(mut self, on_lost: impl Fn(P::Frame, LossReason) -> bool + Send + Sync + 'static) -> Self {
        self.push.on_lost = Some(Box::new(on_lost));
        self
    }

    /// Sets whether frames that are queued when a connection ends are also sent to the [dead letters](Self::dead_letters). Default:
    /// false, because frames for a peer that has left are rarely useful.
    #[must_use]
    pub fn keep_unsent(mut self, keep_unsent: bool) -> Self {
        self.push.keep_unsent = keep_unsent;
        self
    }

    /// Sets the capacity of the high-priority queue of a connection, in frames, at least one. Default: 16, because urgent frames
    /// are few: when 16 wait, the peer does not read.
    #[must_use]
    pub fn high_priority_capacity(mut self, frames: usize) -> Self {
        self.push.high_capacity = PushOptions::<P::Frame>::clamp_capacity(frames);
        self
    }

    /// Sets the capacity of the low-priority queue of a connection, in frames, at least one. Default: 256, enough for a burst,
    /// and few enough to notice a slow consumer.
    #[must_use]
    pub fn low_priority_capacity(mut self, frames: usize) -> Self {
        self.push.low_capacity = PushOptions::<P::Frame>::clamp_capacity(frames);
        self
    }

    /// Sets the limit of pushed frames that wait for a connection, in bytes, for each priority. Default: 1 MiB, so that ten
    /// thousand stalled connections fit into memory.
    #[must_use]
    pub fn push_bytes(mut self, bytes: usize) -> Self {
        self.push.lane_bytes = PushOptions::<P::Frame>::clamp_capacity(bytes);
        self
    }

    /// Sets the limit of [slots](crate::PushHandle::push_latest) of a connection. Default: 4096, more than the subscriptions of
    /// a busy page.
    #[must_use]
    pub fn max_slots(mut self, slots: usize) -> Self {
        self.push.max_slots = slots;
        self
    }

    /// Sets the limit of the frames in the slots of a connection, in bytes. Default: 16 MiB, 4 KiB for each slot.
    #[must_use]
    pub fn slot_bytes(mut self, bytes: usize) -> Self {
        self.push.slot_bytes = bytes;
        self
    }

    /// Sets the size of a batch, in bytes: no frame is added to a larger one. A high-priority push waits for one batch at most.
    /// Default: 64 KiB, about the size of a socket buffer.
    #[must_use]
    pub fn batch_bytes(mut self, bytes: usize) -> Self {
        self.limits.batch_bytes = bytes.max(1);
        self
    }

    /// Sets the limit of input that is read ahead of requests in flight, in bytes. Default: 64 KiB. Further input stays in the socket
    /// buffers, which slows the peer down.
    #[must_use]
    pub fn read_ahead_bytes(mut self, bytes: usize) -> Self {
        self.limits.read_ahead_bytes = bytes.max(1);
        self
    }

    /// Sets how many requests of a connection are handled concurrently. They are answered in order: a reply that is ready before
    /// its turn is kept. Default: 1, because not every protocol can run two handlers of a connection concurrently.
    #[must_use]
    pub fn max_in_flight(mut self, requests: usize) -> Self {
        self.limits.max_in_flight = requests.max(1);
        self
    }

    /// Sets the limit of the replies of a connection that are ready before their turn, in bytes. Above it no further request is
    /// handled until the peer has read. One reply may be larger. Default: 32 MiB.
    #[must_use]
    pub fn ready_reply_bytes(mut self, bytes: usize) -> Self {
        self.limits.ready_reply_bytes = bytes;
        self
    }

    /// Sets the limit of the memory that the connections hold together; several supervisors may share it. Above it the connection
    /// that holds the most is closed with [`CloseReason::MemoryLimit`](crate::CloseReason::MemoryLimit). Default: no limit.
    #[must_use]
    pub fn memory_limit(self, memory: MemoryLimit) -> Self {
        Self { memory, ..self }
    }

    /// Sets how long a connection waits for its peer. Default: [`Timeouts::default`].
    #[must_use]
    pub fn timeouts(self, timeouts: Timeouts) -> Self {
        Self { timeouts, ..self }
    }

    /// Sets the limit of connections. Default: 10 000, below the usual limit of open files.
    #[must_use]
    pub fn max_connections(self, connections: usize) -> Self {
        Self { max_connections: connections, ..self }
    }

    /// Sets the limit of connections from one IP address. Default: no limit, because clients behind a proxy share an address.
    #[must_use]
    pub fn max_connections_per_address(self, per_address: usize) -> Self {
        Self { max_per_address: per_address, ..self }
    }

    /// Builds the supervisor. Connections are served by [`Supervisor::serve`] or [`Permit::run`].
    pub fn build(self) -> Supervisor<P> {
        let registry = Arc::new(SessionRegistry::new());
        let shared = Arc::new(SupervisorShared {
            protocol: self.protocol,
            push: Arc::new(self.push),
            fairness: self.fairness,
            limits: self.limits,
            timeouts: self.timeouts,
            alarms: Arc::new(Alarms::new(Arc::clone(&registry))),
            counts: SupervisorCounters::default(),
            max_connections: self.max_connections,
            max_per_address: self.max_per_address,
            registry,
            ids: AtomicU64::new(0),
            admitted: Mutex::default(),
            grace: Mutex::default(),
            changed: Notify::new(),
            phase: AtomicShutdownPhase::default(),
            memory: self.memory,
        });
        // The `Arc` must be converted to `Arc<dyn Accounts>` before it is downgraded.
        let accounts: Arc<dyn Accounts> = Arc::<SupervisorShared<P>>::clone(&shared);
        shared.memory.register(Arc::downgrade(&accounts));
        Supervisor { shared }
    }
}

impl<P: Protocol> fmt::Debug for Builder<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder").field("limits", &self.limits).finish_non_exhaustive()
    }
}

/// Options of a [graceful shutdown](Supervisor::shutdown).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Shutdown {
    /// Time for which peers are served after the notice. Default: zero, because it is useful only if clients react to the notice.
    pub grace: Duration,
    /// Time from the beginning of the shutdown after which connections that have not ended are aborted. Default: 5 s, within the
    /// time that service managers give a process.
    pub deadline: Duration,
}

impl Shutdown {
    /// Sets [`grace`](#structfield.grace).
    #[must_use]
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// Sets [`deadline`](#structfield.deadline).
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }
}

impl Default for Shutdown {
    fn default() -> Self {
        Self { grace: Duration::ZERO, deadline: Duration::from_secs(5) }
    }
}

/// Admits, runs, lists and closes connections. Clones refer to the same supervisor.
pub struct Supervisor<P: Protocol> {
    shared: Arc<SupervisorShared<P>>,
}

/// The state that all connections of a supervisor share.
pub(crate) struct SupervisorShared<P: Protocol> {
    pub(crate) protocol: P,
    push: Arc<PushOptions<P::Frame>>,
    fairness: FairnessConfig,
    pub(crate) limits: Limits,
    pub(crate) timeouts: Timeouts,
    pub(crate) alarms: Arc<Alarms<P::Frame>>,
    pub(crate) counts: SupervisorCounters,
    max_connections: usize,
    max_per_address: usize,
    /// All running connections: a shutdown wakes them, and the stats and the memory limit read them.
    registry: Arc<SessionRegistry<P::Frame>>,
    ids: AtomicU64,
    admitted: Mutex<Admitted>,
    /// The grace period of the shutdown, after the peers were notified.
    grace: Mutex<Duration>,
    /// Notified when a connection has ended, and when the phase changes.
    changed: Notify,
    pub(crate) phase: AtomicShutdownPhase,
    memory: MemoryLimit,
}

/// The number of connections, in total and by address.
#[derive(Debug, Default)]
struct Admitted {
    total: usize,
    by_address: HashMap<IpAddr, usize>,
}

/// The phase of a shutdown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ShutdownPhase {
    Open = 0,
    /// The shutdown is announced to peers, which are served until the grace period is over.
    Grace = 1,
    /// Nothing more is read. Requests that were read are answered, queued pushes are written, and connections end.
    Closing = 2,
    /// Connections end at once.
    Aborted = 3,
}

#[derive(Debug, Default)]
pub(crate) struct AtomicShutdownPhase(AtomicU8);

impl AtomicShutdownPhase {
    pub(crate) fn get(&self) -> ShutdownPhase {
        match self.0.load(SeqCst) {
            0 => ShutdownPhase::Open,
            1 => ShutdownPhase::Grace,
            2 => ShutdownPhase::Closing,
            _ => ShutdownPhase::Aborted,
        }
    }
}

/// Why a connection was not admitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AdmitError {
    /// [`Builder::max_connections`] is reached.
    #[error("too many connections: {0} are open, which is the limit")]
    TooManyConnections(usize),
    /// [`Builder::max_connections_per_address`] is reached.
    #[error("too many connections from {0}: {1} are open, which is the limit per address")]
    TooManyFromAddress(IpAddr, usize),
    /// The server is shutting down.
    #[error("the server is shutting down")]
    ShuttingDown,
}

impl<P: Protocol> Supervisor<P> {
    /// Returns a builder of a server that speaks this protocol. Every setting has a default.
    pub fn builder(protocol: P) -> Builder<P> {
        Builder {
            protocol,
            push: PushOptions::new(),
            fairness: FairnessConfig::default(),
            limits: Limits {
                batch_bytes: 64 * 1024,
                read_ahead_bytes: 64 * 1024,
                max_in_flight: 1,
                ready_reply_bytes: 32 << 20,
            },
            timeouts: Timeouts::default(),
            max_connections: 10_000,
            max_per_address: usize::MAX,
            memory: MemoryLimit::new(usize::MAX),
        }
    }

    /// Admits a connection from this address. On an error, the caller can send a refusal before it closes the socket.
    pub fn admit(&self, peer: SocketAddr) -> Result<Permit<P>, AdmitError> {
        let SupervisorCounters { admitted, refused, .. } = &self.shared.counts;
        self.shared.add_connection(peer.ip()).inspect_err(|_| {
            refused.fetch_add(1, Relaxed);
        })?;
        admitted.fetch_add(1, Relaxed);
        let id = ConnectionId(self.shared.ids.fetch_add(1, SeqCst) + 1);
        Ok(Permit { shared: Arc::clone(&self.shared), id, peer, is_used: false })
    }

    /// Accepts and runs connections until [`shutdown`](Self::shutdown). A connection that is not admitted is closed at once. A failed
    /// accept is logged and retried after a pause, because it usually means that the process has too many open files.
    pub async fn serve(&self, listener: TcpListener) -> io::Result<()> {
        self.serve_with(listener, async |socket| Ok((socket, Vec::new()))).await
    }

    /// As [`serve`](Self::serve), but upgrades every socket first: to a TLS stream, a WebSocket, or both. `upgrade` returns the
    /// upgraded stream and the bytes that it has already read from it. It runs on the task of the connection, within the
    /// [`first_frame`](Timeouts::first_frame) timeout. If it fails, the connection is closed.
    ///
    /// ```no_run
    /// # use tidewire_conn::{Protocol, Supervisor};
    /// # use tidewire_conn::websocket::{self, Message, WebSocket};
    /// # async fn serve(server: Supervisor<impl Protocol<Codec = WebSocket, Frame = Message>>) -> std::io::Result<()> {
    /// let listener = tokio::net::TcpListener::bind("127.0.0.1:7000").await?;
    /// server
    ///     .serve_with(listener, async |mut socket| {
    ///         let already_read = websocket::accept(&mut socket, |_| None).await?;
    ///         Ok((socket, already_read))
    ///     })
    ///     .await
    /// # }
    /// ```
    pub async fn serve_with<S, U, F>(&self, listener: TcpListener, upgrade: U) -> io::Result<()>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
        U: Fn(TcpStream) -> F,
        F: Future<Output = io::Result<(S, Vec<u8>)>> + Send + 'static,
    {
        loop {
            let changed = self.shared.changed.notified();
            if self.shared.phase.get() != ShutdownPhase::Open {
                return Ok(());
            }
            tokio::select! {
                accepted = listener.accept() => match accepted {
                    Ok((socket, peer)) => match self.admit(peer) {
                        Ok(permit) => {
                            // Fails if the peer has already closed the connection, which the actor will notice.
                            if let Err(error) = socket.set_nodelay(true) {
                                tracing::debug!(%peer, %error, "TCP_NODELAY could not be set");
                            }
                            // The closure itself may panic before it returns a future.
                            match catch_unwind(AssertUnwindSafe(|| upgrade(socket))) {
                                Ok(upgrading) => drop(tokio::spawn(permit.upgrade(upgrading))),
                                Err(_) => permit.fail(&io::Error::other("the upgrade panicked")),
                            }
                        }
                        Err(reason) => tracing::info!(%peer, %reason, "connection refused"),
                    },
                    Err(error) => {
                        tracing::warn!(%error, "accept failed");
                        tokio::time::sleep(Duration::from_millis(50)).await;
                    }
                },
                () = changed => {}
            }
        }
    }

    /// Returns the registry of live connections.
    pub fn sessions(&self) -> &SessionRegistry<P::Frame> {
        &self.shared.registry
    }

    /// Returns the number of connections that are admitted and have not ended.
    pub fn count(&self) -> usize {
        lock(&self.shared.admitted).total
    }

    /// Returns the counters of all connections so far.
    pub fn stats(&self) -> Stats {
        let mut stats =
            Stats { connections: self.count(), push: self.shared.push.stats(), ..self.shared.counts.stats() };
        for info in self.shared.registry.running().iter().filter_map(|mailbox| mailbox.info()) {
            if !info.is_counted_as_ended.load(Relaxed) {
                stats.traffic += info.traffic.counters();
            }
        }
        stats
    }

    /// Returns the protocol.
    pub fn protocol(&self) -> &P {
        &self.shared.protocol
    }

    /// Shuts down gracefully. No more connections are admitted. Peers are [notified](Protocol::on_shutdown) and served for the
    /// grace period. Then nothing more is read, requests that were read are answered, and queued pushes are written. Connections
    /// that have not ended at the deadline are aborted. Returns when no connection is left. A [`Permit`] that is held but not run
    /// counts as a connection.
    pub async fn shutdown(&self, shutdown: Shutdown) {
        let deadline = saturating_add(Instant::now(), shutdown.deadline);
        let grace = deadline.min(saturating_add(Instant::now(), shutdown.grace));
        *lock(&self.shared.grace) = shutdown.grace.min(shutdown.deadline);
        for (phase, until) in [(ShutdownPhase::Grace, grace), (ShutdownPhase::Closing, deadline)] {
            self.enter(phase);
            if tokio::time::timeout_at(until, self.wait_until_empty()).await.is_ok() {
                return;
            }
        }
        tracing::warn!(connections = self.count(), "shutdown deadline passed: connections aborted");
        self.enter(ShutdownPhase::Aborted);
        self.wait_until_empty().await;
    }

    /// Enters a phase of the shutdown, and wakes all connections.
    fn enter(&self, phase: ShutdownPhase) {
        self.shared.phase.0.fetch_max(phase as u8, SeqCst);
        self.shared.changed.notify_waiters();
        for mailbox in self.shared.registry.running() {
            mailbox.wake();
        }
    }

    /// Waits until no connection is left.
    async fn wait_until_empty(&self) {
        loop {
            let changed = self.shared.changed.notified();
            if self.count() == 0 {
                return;
            }
            changed.await;
        }
    }
}

impl<P: Protocol> SupervisorShared<P> {
    pub(crate) fn grace(&self) -> Duration {
        *lock(&self.grace)
    }

    /// Adds a connection from this address to the counts of admitted connections, unless a limit is reached.
    fn add_connection(&self, address: IpAddr) -> Result<(), AdmitError> {
        let mut admitted = lock(&self.admitted);
        if self.phase.get() != ShutdownPhase::Open {
            return Err(AdmitError::ShuttingDown);
        }
        if admitted.total >= self.max_connections {
            return Err(AdmitError::TooManyConnections(admitted.total));
        }
        let own = admitted.by_address.get(&address).copied().unwrap_or(0);
        if own >= self.max_per_address {
            return Err(AdmitError::TooManyFromAddress(address, own));
        }
        admitted.total += 1;
        *admitted.by_address.entry(address).or_default() += 1;
        Ok(())
    }

    fn remove_connection(&self, address: IpAddr) {
        let mut admitted = lock(&self.admitted);
        admitted.total -= 1;
        if let Entry::Occupied(mut own) = admitted.by_address.entry(address) {
            *own.get_mut() -= 1;
            if *own.get() == 0 {
                own.remove();
            }
        }
    }
}

impl<P: Protocol> Accounts for SupervisorShared<P> {
    fn append_to(&self, holders: &mut Vec<Arc<dyn Holder>>) {
        let holds = |mailbox: &Arc<Mailbox<P::Frame>>| mailbox.info().is_some_and(|info| info.account.bytes() > 0);
        holders.extend(self.registry.running().into_iter().filter(holds).map(|mailbox| mailbox as Arc<dyn Holder>));
    }
}

impl<P: Protocol> Clone for Supervisor<P> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

impl<P: Protocol> fmt::Debug for Supervisor<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Supervisor").field("connections", &self.count()).finish_non_exhaustive()
    }
}

/// A permit for one connection. It counts against the limits of connections until it is dropped or its connection has ended.
pub struct Permit<P: Protocol> {
    shared: Arc<SupervisorShared<P>>,
    id: ConnectionId,
    peer: SocketAddr,
    /// The permit was used for a connection or for a handshake that failed, and the end is counted there. An unused permit is counted
    /// as dropped.
    is_used: bool,
}

impl<P: Protocol> Permit<P> {
    /// Returns the id that the connection will have.
    pub fn id(&self) -> ConnectionId {
        self.id
    }

    /// Runs the connection if its upgrade succeeds in time, and before the server shuts down.
    fn upgrade<S: AsyncRead + AsyncWrite + Unpin>(
        self,
        upgrade: impl Future<Output = io::Result<(S, Vec<u8>)>>,
    ) -> impl Future<Output = ()> {
        // Boxed, so that the memory is released when the upgrade is done.
        let upgraded = Box::pin(self.run_upgrade(upgrade));
        async {
            if let Some((permit, socket, already_read)) = upgraded.await {
                permit.run(socket, already_read).await;
            }
        }
    }

    /// Runs the upgrade. Returns `None` if it failed or timed out, or if the server shut down in the meantime.
    async fn run_upgrade<S>(
        self,
        upgrade: impl Future<Output = io::Result<(S, Vec<u8>)>>,
    ) -> Option<(Self, S, Vec<u8>)> {
        let SupervisorShared { timeouts, changed, phase, .. } = &*self.shared;
        let shuts_down = async {
            loop {
                let changed = changed.notified();
                if phase.get() >= ShutdownPhase::Closing {
                    return;
                }
                changed.await;
            }
        };
        let limit = timeouts.first_frame.unwrap_or(Duration::MAX);
        let upgraded = tokio::select! {
            upgraded = tokio::time::timeout(limit, upgrade) => upgraded.unwrap_or_else(|_| {
                Err(io::Error::new(io::ErrorKind::TimedOut, "handshake timed out"))
            }),
            () = shuts_down => Err(io::Error::other("the server is shutting down")),
        };
        match upgraded {
            Ok((socket, already_read)) => Some((self, socket, already_read)),
            Err(error) => {
                self.fail(&error);
                None
            }
        }
    }

    /// Counts and logs an upgrade that failed.
    fn fail(mut self, error: &io::Error) {
        self.is_used = true;
        self.shared.counts.count_ended("handshake");
        tracing::debug!(connection = %self.id, peer = %self.peer, %error, "handshake failed");
    }

    /// Runs the connection until it ends, on the task that polls the future. `already_read` contains bytes that were read from the
    /// socket during its upgrade.
    pub fn run<S: AsyncRead + AsyncWrite + Unpin>(
        self,
        socket: S,
        already_read: Vec<u8>,
    ) -> impl Future<Output = ()> + use<P, S> {
        self.run_with(socket, already_read, None)
    }

    /// As [`run`](Self::run), with an initial value of [`ConnectionContext::data`], for example the result of a handshake.
    pub fn run_with<S: AsyncRead + AsyncWrite + Unpin>(
        self,
        socket: S,
        already_read: Vec<u8>,
        data: Option<Box<dyn Any + Send>>,
    ) -> impl Future<Output = ()> + use<P, S> {
        Run::New(self, socket, already_read, data)
    }

    /// Creates the actor of the connection. Returns `None` if the protocol panicked.
    fn create_actor<S: AsyncRead + AsyncWrite + Unpin>(
        &mut self,
        socket: S,
        already_read: &[u8],
        data: Option<Box<dyn Any + Send>>,
    ) -> Option<Actor<P, S>> {
        self.is_used = true;
        let SupervisorShared { protocol, push, fairness, registry, .. } = &*self.shared;
        let Ok(codec) = catch_unwind(AssertUnwindSafe(|| protocol.codec())) else {
            tracing::error!(connection = %self.id, "Protocol::codec panicked");
            self.shared.counts.count_ended("panic");
            return None;
        };
        let info = Arc::new(ConnectionInfo::new(self.id, self.peer, self.shared.memory.clone()));
        let queues = PushQueues::for_connection(Arc::clone(push), *fairness, Arc::clone(&info));
        registry.add_running(self.id, &queues.mailbox);
        let context = ConnectionContext::new(info, Arc::clone(registry), data);
        Some(Actor::new(socket, already_read, Arc::clone(&self.shared), codec, context, queues))
    }
}

/// The future of a connection, which begins when it is first polled. An `async fn` would hold its arguments in addition to the actor
/// for as long as the connection lasts.
#[expect(clippy::large_enum_variant, reason = "a connection is `Running` nearly all the time")]
enum Run<P: Protocol, S> {
    New(Permit<P>, S, Vec<u8>, Option<Box<dyn Any + Send>>),
    Running {
        actor: Actor<P, S>,
        /// Dropped after the actor, so that a connection is counted until it has ended.
        _permit: Permit<P>,
    },
    Ended,
}

/// No field is ever pinned.
impl<P: Protocol, S> Unpin for Run<P, S> {}

impl<P: Protocol, S: AsyncRead + AsyncWrite + Unpin> Future for Run<P, S> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let run = self.get_mut();
        if matches!(run, Self::New(..))
            && let Self::New(mut permit, socket, already_read, data) = std::mem::replace(run, Self::Ended)
            && let Some(actor) = permit.create_actor(socket, &already_read, data)
        {
            *run = Self::Running { actor, _permit: permit };
        }
        if let Self::Running { actor, .. } = run {
            ready!(actor.poll_run(context));
            *run = Self::Ended;
        }
        Poll::Ready(())
    }
}

impl<P: Protocol> Drop for Permit<P> {
    fn drop(&mut self) {
        self.shared.registry.remove_running(self.id);
        if !self.is_used {
            self.shared.counts.count_ended("dropped");
        }
        self.shared.remove_connection(self.peer.ip());
        self.shared.changed.notify_waiters();
    }
}

impl<P: Protocol> fmt::Debug for Permit<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Permit").field("id", &self.id).field("peer", &self.peer).finish_non_exhaustive()
    }
}
