//! The supervisor: admission, limits, and graceful shutdown of connections.
//!
//! Connections are children that are never restarted. A [`Permit`] counts a connection from its admission until the permit is
//! dropped, which happens however the connection ends, so the count is always exact.

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
use crate::push::{PushOptions, PushQueues};
use crate::session::Facts;
use crate::stats::Counts;
use crate::sync::lock;
use crate::timeouts::later;
use crate::{ConnectionContext, ConnectionId, FairnessConfig, MemoryLimit, Protocol, SessionRegistry, Stats, Timeouts};

/// Settings of a server for one protocol, each with a default.
pub struct Builder<P: Protocol> {
    protocol: P,
    push: PushOptions<P::Frame>,
    fairness: FairnessConfig,
    limits: Limits,
    timeouts: Timeouts,
    connections: usize,
    per_address: usize,
    memory: MemoryLimit,
}

impl<P: Protocol> Builder<P> {
    /// How urgent and other pushes share the way out. Default: [`FairnessConfig::default`].
    #[must_use]
    pub fn with_fairness(self, fairness: FairnessConfig) -> Self {
        Self { fairness, ..self }
    }

    /// Where frames go that a dropping policy drops. A full queue is counted and logged. Default: nowhere, they are counted.
    #[must_use]
    pub fn with_push_dlq(mut self, dead_letters: mpsc::Sender<P::Frame>) -> Self {
        self.push.dead_letters = Some(dead_letters);
        self
    }

    /// Also sends to the dead letters what was queued when a connection ended. Default: off, because it is seldom wanted
    /// when the peer has left.
    #[must_use]
    pub fn keep_unsent(mut self) -> Self {
        self.push.keep_unsent = true;
        self
    }

    /// How many urgent and other frames may wait for one connection, at least one each. Default: 16 and 256.
    #[must_use]
    pub fn push_capacities(mut self, high: usize, low: usize) -> Self {
        (self.push.high, self.push.low) = (PushOptions::<P::Frame>::room(high), PushOptions::<P::Frame>::room(low));
        self
    }

    /// How many [slots](crate::PushHandle::push_latest) one connection may have, and how many bytes they may hold together.
    /// Default: 4096 slots and 16 MiB.
    #[must_use]
    pub fn slot_capacities(mut self, slots: usize, bytes: usize) -> Self {
        (self.push.slots, self.push.slot_bytes) = (slots, bytes);
        self
    }

    /// How many bytes of pushed frames may wait for one connection, of each priority. Default: 1 MiB.
    #[must_use]
    pub fn push_bytes(mut self, bytes: usize) -> Self {
        self.push.bytes = PushOptions::<P::Frame>::room(bytes);
        self
    }

    /// How many bytes are gathered before they are written: what an urgent push waits for at most. Default: 64 KiB, a socket
    /// buffer's worth.
    #[must_use]
    pub fn batch_bytes(mut self, bytes: usize) -> Self {
        self.limits.batch = bytes.max(1);
        self
    }

    /// How many bytes are read ahead of a reply that takes its time. Default: 64 KiB.
    #[must_use]
    pub fn read_ahead_bytes(mut self, bytes: usize) -> Self {
        self.limits.read_ahead = bytes.max(1);
        self
    }

    /// How many requests of a connection are handled at once; they are answered in their order. A reply that is there before its
    /// turn is kept. Default: one.
    #[must_use]
    pub fn max_in_flight(mut self, requests: usize) -> Self {
        self.limits.in_flight = requests.max(1);
        self
    }

    /// Limit of the replies of a connection that are ready before their turn, in bytes. Above it no further request is handled until
    /// the peer has read. One reply may be larger. Default: 32 MiB.
    #[must_use]
    pub fn ready_reply_bytes(mut self, bytes: usize) -> Self {
        self.limits.ready_bytes = bytes;
        self
    }

    /// Limit of the memory that the connections hold together; several supervisors may share it. Above it the connection that holds
    /// the most is closed with [`CloseReason::MemoryLimit`](crate::CloseReason::MemoryLimit). Default: none.
    #[must_use]
    pub fn memory_limit(self, memory: MemoryLimit) -> Self {
        Self { memory, ..self }
    }

    /// How long a connection waits for its peer. Default: [`Timeouts::default`].
    #[must_use]
    pub fn timeouts(self, timeouts: Timeouts) -> Self {
        Self { timeouts, ..self }
    }

    /// How many connections there may be. Default: 10 000, below the usual limit on files.
    #[must_use]
    pub fn max_connections(self, connections: usize) -> Self {
        Self { connections, ..self }
    }

    /// How many connections one address may have. Default: as many as there may be.
    #[must_use]
    pub fn max_connections_per_address(self, per_address: usize) -> Self {
        Self { per_address, ..self }
    }

    /// The supervisor of a server with these settings.
    pub fn build(self) -> Supervisor<P> {
        let registry = Arc::new(SessionRegistry::new());
        let shared = Arc::new(Shared {
            protocol: self.protocol,
            push: Arc::new(self.push),
            fairness: self.fairness,
            limits: self.limits,
            timeouts: self.timeouts,
            alarms: Arc::new(Alarms::new(Arc::clone(&registry))),
            counts: Counts::default(),
            connections: self.connections,
            per_address: self.per_address,
            registry,
            ids: AtomicU64::new(0),
            admitted: Mutex::default(),
            grace: Mutex::default(),
            changed: Notify::new(),
            phase: SharedPhase::default(),
            memory: self.memory,
        });
        // Two steps, because a weak reference is converted by its type.
        let accounts: Arc<dyn Accounts> = Arc::<Shared<P>>::clone(&shared);
        shared.memory.register(Arc::downgrade(&accounts));
        Supervisor { shared }
    }
}

impl<P: Protocol> fmt::Debug for Builder<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder").field("limits", &self.limits).finish_non_exhaustive()
    }
}

/// How a server [shuts down](Supervisor::shutdown).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Shutdown {
    /// How long peers are served after they were told. Default: none, they are told and nothing more is read.
    pub grace: Duration,
    /// After so long, the grace included, connections are ended whatever they do. Default: 5 s.
    pub deadline: Duration,
}

impl Default for Shutdown {
    fn default() -> Self {
        Self { grace: Duration::ZERO, deadline: Duration::from_secs(5) }
    }
}

/// Admits connections, knows them, and ends them. Clones are the same supervisor.
pub struct Supervisor<P: Protocol> {
    shared: Arc<Shared<P>>,
}

/// The state that all connections of a supervisor share.
pub(crate) struct Shared<P: Protocol> {
    pub(crate) protocol: P,
    push: Arc<PushOptions<P::Frame>>,
    fairness: FairnessConfig,
    pub(crate) limits: Limits,
    pub(crate) timeouts: Timeouts,
    pub(crate) alarms: Arc<Alarms<P::Frame>>,
    pub(crate) counts: Counts,
    connections: usize,
    per_address: usize,
    /// All connections that run: what a shutdown wakes, and what stats and the memory limit look at.
    registry: Arc<SessionRegistry<P::Frame>>,
    ids: AtomicU64,
    admitted: Mutex<Admitted>,
    /// How long peers are served after a shutdown was announced.
    grace: Mutex<Duration>,
    /// Notified when a connection has ended, and when the phase changes.
    changed: Notify,
    pub(crate) phase: SharedPhase,
    memory: MemoryLimit,
}

/// The number of connections, in total and by address.
#[derive(Debug, Default)]
struct Admitted {
    all: usize,
    by_address: HashMap<IpAddr, usize>,
}

/// The phase of a shutdown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    Open = 0,
    /// The shutdown is announced to peers, which are served until the grace period is over.
    Notice = 1,
    /// Nothing more is read. Requests that were read are answered, queued pushes are written, and connections end.
    Closing = 2,
    /// Connections end at once.
    Aborted = 3,
}

#[derive(Debug, Default)]
pub(crate) struct SharedPhase(AtomicU8);

impl SharedPhase {
    pub(crate) fn get(&self) -> Phase {
        match self.0.load(SeqCst) {
            0 => Phase::Open,
            1 => Phase::Notice,
            2 => Phase::Closing,
            _ => Phase::Aborted,
        }
    }
}

/// Why a connection is not admitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refused {
    /// There are as many as there may be.
    #[error("there are {0} connections, and no more are admitted")]
    TooMany(usize),
    /// Its address has as many as one may have.
    #[error("{0} has {1} connections, and no more are admitted from one address")]
    TooManyFrom(IpAddr, usize),
    /// The server shuts down.
    #[error("the server is shutting down")]
    ShuttingDown,
}

impl<P: Protocol> Supervisor<P> {
    /// The settings of a server that speaks this protocol.
    pub fn with_protocol(protocol: P) -> Builder<P> {
        Builder {
            protocol,
            push: PushOptions::new(),
            fairness: FairnessConfig::default(),
            limits: Limits { batch: 64 * 1024, read_ahead: 64 * 1024, in_flight: 1, ready_bytes: 32 << 20 },
            timeouts: Timeouts::default(),
            connections: 10_000,
            per_address: usize::MAX,
            memory: MemoryLimit::new(usize::MAX),
        }
    }

    /// Admits a connection from that address, or says why not: so whoever accepts can refuse politely.
    pub fn admit(&self, peer: SocketAddr) -> Result<Permit<P>, Refused> {
        let Counts { admitted, refused, .. } = &self.shared.counts;
        self.shared.count_in(peer.ip()).inspect_err(|_| {
            refused.fetch_add(1, Relaxed);
        })?;
        admitted.fetch_add(1, Relaxed);
        let id = ConnectionId(self.shared.ids.fetch_add(1, SeqCst) + 1);
        Ok(Permit { shared: Arc::clone(&self.shared), id, peer, is_used: false })
    }

    /// Accepts and runs connections until [`shutdown`](Self::shutdown). One that is refused is closed at once. A failed
    /// accept is logged and tried again after a moment, since it mostly means that the process has too many files open.
    pub async fn serve(&self, listener: TcpListener) -> io::Result<()> {
        self.serve_with(listener, async |socket| Ok((socket, Vec::new()))).await
    }

    /// As [`serve`](Self::serve), and makes something else of every socket first: a TLS stream, a WebSocket, or both.
    /// `upgrade` returns it with what was read from it already. It runs on the task of the connection and has as long as the
    /// [first frame](Timeouts::first_frame) has; if it fails, that connection ends.
    ///
    /// ```no_run
    /// # use tidewire_conn::{accept_websocket, Message, Protocol, Supervisor, WebSocket};
    /// # async fn serve(server: Supervisor<impl Protocol<Codec = WebSocket, Frame = Message>>) -> std::io::Result<()> {
    /// let listener = tokio::net::TcpListener::bind("127.0.0.1:7000").await?;
    /// server
    ///     .serve_with(listener, async |mut socket| {
    ///         let already_read = accept_websocket(&mut socket, |_| None).await?;
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
            if self.shared.phase.get() != Phase::Open {
                return Ok(());
            }
            tokio::select! {
                accepted = listener.accept() => match accepted {
                    Ok((socket, peer)) => match self.admit(peer) {
                        Ok(permit) => {
                            // It fails when the peer has already left, which is that connection's affair.
                            if let Err(error) = socket.set_nodelay(true) {
                                tracing::debug!(%peer, %error, "small writes may be delayed");
                            }
                            // It may be more than a future, and panic before it gives one.
                            match catch_unwind(AssertUnwindSafe(|| upgrade(socket))) {
                                Ok(upgrading) => drop(tokio::spawn(permit.upgrade(upgrading))),
                                Err(_) => permit.fail(&io::Error::other("the upgrade panicked")),
                            }
                        }
                        Err(refused) => tracing::info!(%peer, %refused, "a connection was refused"),
                    },
                    Err(error) => {
                        tracing::warn!(%error, "a connection could not be accepted");
                        tokio::time::sleep(Duration::from_millis(50)).await;
                    }
                },
                () = changed => {}
            }
        }
    }

    /// The live connections.
    pub fn sessions(&self) -> &SessionRegistry<P::Frame> {
        &self.shared.registry
    }

    /// How many connections are admitted and have not ended.
    pub fn count(&self) -> usize {
        lock(&self.shared.admitted).all
    }

    /// What has happened on all connections so far.
    pub fn stats(&self) -> Stats {
        let mut stats =
            Stats { connections: self.count(), push: self.shared.push.stats(), ..self.shared.counts.stats() };
        for facts in self.shared.registry.running().iter().filter_map(|mailbox| mailbox.facts()) {
            if !facts.settled.load(Relaxed) {
                stats.traffic += facts.traffic.counters();
            }
        }
        stats
    }

    /// The protocol.
    pub fn protocol(&self) -> &P {
        &self.shared.protocol
    }

    /// Admits nobody any more and ends every connection. Peers are [told](Protocol::on_shutdown) and served for the grace
    /// period; then nothing more is read, what has been asked is answered and what is queued is written. What has not ended by
    /// the deadline is ended at once. Returns when there are none; a [`Permit`] that is held and not run counts as one.
    pub async fn shutdown(&self, shutdown: Shutdown) {
        let deadline = later(Instant::now(), shutdown.deadline);
        let grace = deadline.min(later(Instant::now(), shutdown.grace));
        *lock(&self.shared.grace) = shutdown.grace.min(shutdown.deadline);
        for (phase, until) in [(Phase::Notice, grace), (Phase::Closing, deadline)] {
            self.enter(phase);
            if tokio::time::timeout_at(until, self.empty()).await.is_ok() {
                return;
            }
        }
        tracing::warn!(connections = self.count(), "connections did not end in time and are aborted");
        self.enter(Phase::Aborted);
        self.empty().await;
    }

    fn enter(&self, phase: Phase) {
        self.shared.phase.0.fetch_max(phase as u8, SeqCst);
        self.shared.changed.notify_waiters();
        for mailbox in self.shared.registry.running() {
            mailbox.wake();
        }
    }

    async fn empty(&self) {
        loop {
            let changed = self.shared.changed.notified();
            if self.count() == 0 {
                return;
            }
            changed.await;
        }
    }
}

impl<P: Protocol> Shared<P> {
    pub(crate) fn grace(&self) -> Duration {
        *lock(&self.grace)
    }

    fn count_in(&self, address: IpAddr) -> Result<(), Refused> {
        let mut admitted = lock(&self.admitted);
        if self.phase.get() != Phase::Open {
            return Err(Refused::ShuttingDown);
        }
        if admitted.all >= self.connections {
            return Err(Refused::TooMany(admitted.all));
        }
        let own = admitted.by_address.get(&address).copied().unwrap_or(0);
        if own >= self.per_address {
            return Err(Refused::TooManyFrom(address, own));
        }
        admitted.all += 1;
        *admitted.by_address.entry(address).or_default() += 1;
        Ok(())
    }

    fn count_out(&self, address: IpAddr) {
        let mut admitted = lock(&self.admitted);
        admitted.all -= 1;
        if let Entry::Occupied(mut own) = admitted.by_address.entry(address) {
            *own.get_mut() -= 1;
            if *own.get() == 0 {
                own.remove();
            }
        }
    }
}

impl<P: Protocol> Accounts for Shared<P> {
    fn append_to(&self, holders: &mut Vec<Arc<dyn Holder>>) {
        let holds = |mailbox: &Arc<Mailbox<P::Frame>>| mailbox.facts().is_some_and(|facts| facts.account.bytes() > 0);
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

/// A permit for one connection, which counts until it is dropped or its connection has ended.
pub struct Permit<P: Protocol> {
    shared: Arc<Shared<P>>,
    id: ConnectionId,
    peer: SocketAddr,
    /// The permit was used for a connection, which counts its own end, or for a handshake that failed.
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
        let upgraded = Box::pin(self.upgraded(upgrade));
        async {
            if let Some((permit, socket, already_read)) = upgraded.await {
                permit.run(socket, already_read).await;
            }
        }
    }

    async fn upgraded<S>(self, upgrade: impl Future<Output = io::Result<(S, Vec<u8>)>>) -> Option<(Self, S, Vec<u8>)> {
        let Shared { timeouts, changed, phase, .. } = &*self.shared;
        let shuts_down = async {
            loop {
                let changed = changed.notified();
                if phase.get() >= Phase::Closing {
                    return;
                }
                changed.await;
            }
        };
        let limit = timeouts.first_frame.unwrap_or(Duration::MAX);
        let upgraded = tokio::select! {
            upgraded = tokio::time::timeout(limit, upgrade) => upgraded.unwrap_or_else(|_| {
                Err(io::Error::new(io::ErrorKind::TimedOut, "the handshake was not finished in time"))
            }),
            () = shuts_down => Err(io::Error::other("the server shuts down")),
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
        self.shared.counts.ended("handshake");
        tracing::debug!(connection = %self.id, peer = %self.peer, %error, "handshake failed");
    }

    /// Runs the connection to its end, on the task that polls this. `already_read` is what was read from the socket before,
    /// by whoever upgraded it.
    pub fn run<S: AsyncRead + AsyncWrite + Unpin>(
        self,
        socket: S,
        already_read: Vec<u8>,
    ) -> impl Future<Output = ()> + use<P, S> {
        self.run_with(socket, already_read, None)
    }

    /// As [`run`](Self::run), with what is known of the connection already: it is in [`ConnectionContext::data`] when the
    /// protocol first hears of it.
    pub fn run_with<S: AsyncRead + AsyncWrite + Unpin>(
        self,
        socket: S,
        already_read: Vec<u8>,
        data: Option<Box<dyn Any + Send>>,
    ) -> impl Future<Output = ()> + use<P, S> {
        Run::New(self, socket, already_read, data)
    }

    /// Creates the actor of the connection. None if the protocol panicked.
    fn begin<S: AsyncRead + AsyncWrite + Unpin>(
        &mut self,
        socket: S,
        already_read: &[u8],
        data: Option<Box<dyn Any + Send>>,
    ) -> Option<Actor<P, S>> {
        self.is_used = true;
        let Shared { protocol, push, fairness, registry, .. } = &*self.shared;
        let Ok(codec) = catch_unwind(AssertUnwindSafe(|| protocol.codec())) else {
            tracing::error!(connection = %self.id, "Protocol::codec panicked");
            self.shared.counts.ended("panic");
            return None;
        };
        let facts = Arc::new(Facts::new(self.id, self.peer, self.shared.memory.clone()));
        let queues = PushQueues::of_connection(Arc::clone(push), *fairness, Arc::clone(&facts));
        registry.add_running(self.id, &queues.mailbox);
        let context = ConnectionContext::new(facts, data);
        Some(Actor::new(socket, already_read, Arc::clone(&self.shared), codec, context, queues))
    }
}

/// A connection from its beginning, which is when it is first polled, to its end. An `async fn` would hold its arguments and the
/// actor side by side, for as long as the connection lasts.
#[expect(clippy::large_enum_variant, reason = "it is the largest nearly all the time")]
enum Run<P: Protocol, S> {
    New(Permit<P>, S, Vec<u8>, Option<Box<dyn Any + Send>>),
    Running {
        actor: Actor<P, S>,
        /// Dropped after the actor, so that a connection has ended before the count falls.
        _permit: Permit<P>,
    },
    Ended,
}

/// Nothing in it is ever pinned.
impl<P: Protocol, S> Unpin for Run<P, S> {}

impl<P: Protocol, S: AsyncRead + AsyncWrite + Unpin> Future for Run<P, S> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let run = self.get_mut();
        if matches!(run, Self::New(..))
            && let Self::New(mut permit, socket, already_read, data) = std::mem::replace(run, Self::Ended)
            && let Some(actor) = permit.begin(socket, &already_read, data)
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
            self.shared.counts.ended("dropped");
        }
        self.shared.count_out(self.peer.ip());
        self.shared.changed.notify_waiters();
    }
}

impl<P: Protocol> fmt::Debug for Permit<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Permit").field("id", &self.id).field("peer", &self.peer).finish_non_exhaustive()
    }
}
