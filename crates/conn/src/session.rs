//! The context of a connection, for its protocol, and its public facts, for other tasks.

use std::any::Any;
use std::fmt;
use std::net::SocketAddr;
use std::num::{NonZeroU64, NonZeroUsize};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;

use crate::mailbox::Mailbox;
use crate::memory::{Account, MemoryAccount, MemoryLimit};
use crate::sync::lock;
use crate::timeouts::later;
use crate::{ConnectionId, Frame, FrameLike, PushHandle, SessionRegistry};

/// The public facts of a connection, for other tasks.
pub(crate) struct Facts {
    pub(crate) id: ConnectionId,
    pub(crate) peer: SocketAddr,
    pub(crate) since: Instant,
    pub(crate) traffic: Traffic,
    /// The traffic is part of the total of connections that have ended.
    pub(crate) settled: AtomicBool,
    /// The grace period of a shutdown has ended. Not in the context, because it would take a word there.
    pub(crate) closing: AtomicBool,
    /// What the protocol shares with other tasks.
    pub(crate) data: Mutex<Option<Arc<dyn Any + Send + Sync>>>,
    pub(crate) account: Account,
}

impl Facts {
    pub(crate) fn new(id: ConnectionId, peer: SocketAddr, limit: MemoryLimit) -> Self {
        Self {
            id,
            peer,
            since: Instant::now(),
            traffic: Traffic::default(),
            settled: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            data: Mutex::new(None),
            account: Account::new(limit),
        }
    }
}

/// The traffic of a connection, counted by its actor only.
#[derive(Debug, Default)]
pub(crate) struct Traffic {
    frames_in: AtomicU64,
    frames_out: AtomicU64,
    bytes_in: AtomicU64,
    bytes_out: AtomicU64,
}

impl Traffic {
    pub(crate) fn publish(&self, counters: &Counters) {
        self.frames_in.store(counters.frames_in, Relaxed);
        self.frames_out.store(counters.frames_out, Relaxed);
        self.bytes_in.store(counters.bytes_in, Relaxed);
        self.bytes_out.store(counters.bytes_out, Relaxed);
    }

    /// Adds the traffic of a connection that has ended.
    pub(crate) fn add(&self, counters: &Counters) {
        self.frames_in.fetch_add(counters.frames_in, Relaxed);
        self.frames_out.fetch_add(counters.frames_out, Relaxed);
        self.bytes_in.fetch_add(counters.bytes_in, Relaxed);
        self.bytes_out.fetch_add(counters.bytes_out, Relaxed);
    }

    pub(crate) fn counters(&self) -> Counters {
        Counters {
            frames_in: self.frames_in.load(Relaxed),
            frames_out: self.frames_out.load(Relaxed),
            bytes_in: self.bytes_in.load(Relaxed),
            bytes_out: self.bytes_out.load(Relaxed),
        }
    }
}

/// What has gone through a connection so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Counters {
    /// Frames read.
    pub frames_in: u64,
    /// Frames handed to the codec.
    pub frames_out: u64,
    /// Bytes read.
    pub bytes_in: u64,
    /// Bytes written.
    pub bytes_out: u64,
}

impl std::ops::AddAssign for Counters {
    fn add_assign(&mut self, other: Self) {
        self.frames_in += other.frames_in;
        self.frames_out += other.frames_out;
        self.bytes_in += other.bytes_in;
        self.bytes_out += other.bytes_out;
    }
}

/// A live connection, as the [registry](crate::SessionRegistry) lists it. It keeps the connection neither alive nor listed.
pub struct Session<F: FrameLike> {
    id: ConnectionId,
    mailbox: Arc<Mailbox<F>>,
}

impl<F: FrameLike> Session<F> {
    pub(crate) fn new(id: ConnectionId, mailbox: Arc<Mailbox<F>>) -> Self {
        Self { id, mailbox }
    }

    /// Its name.
    pub fn id(&self) -> ConnectionId {
        self.id
    }

    /// Pushes to it.
    pub fn handle(&self) -> PushHandle<F> {
        PushHandle::new(Arc::clone(&self.mailbox))
    }

    /// Whom it connects to. None if the handle that was [inserted](crate::SessionRegistry::insert) is that of bare
    /// [`PushQueues`](crate::PushQueues), which nobody connects.
    pub fn peer(&self) -> Option<SocketAddr> {
        self.mailbox.facts().map(|facts| facts.peer)
    }

    /// When it began; none for bare queues.
    pub fn since(&self) -> Option<Instant> {
        self.mailbox.facts().map(|facts| facts.since)
    }

    /// What has gone through it, as of the last time its actor rested; nothing for bare queues.
    pub fn counters(&self) -> Counters {
        self.mailbox.facts().map(|facts| facts.traffic.counters()).unwrap_or_default()
    }

    /// What the protocol [shared](ConnectionContext::share), if it is of this type.
    pub fn data<T: Any + Send + Sync>(&self) -> Option<Arc<T>> {
        let facts = self.mailbox.facts()?;
        let data = lock(&facts.data).clone();
        data?.downcast().ok()
    }

    pub(crate) fn mailbox(&self) -> &Mailbox<F> {
        &self.mailbox
    }
}

impl<F: FrameLike> fmt::Debug for Session<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").field("id", &self.id).field("peer", &self.peer()).finish_non_exhaustive()
    }
}

/// Names the reply to one request of one connection. What is pushed [after](PushHandle::after) it is never written before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ReplyTicket {
    pub(crate) connection: ConnectionId,
    /// Counted from one.
    pub(crate) request: u64,
}

/// A tick does not follow another one sooner, nor a call of [`ConnectionContext::tick_within`].
const SHORTEST_TICK: Duration = Duration::from_millis(1);

/// The state of one connection, which every hook of its [`Protocol`](crate::Protocol) gets. `F` is the type of its frames.
#[non_exhaustive]
pub struct ConnectionContext<F: FrameLike = Frame> {
    facts: Arc<Facts>,
    sessions: Arc<SessionRegistry<F>>,
    pub(crate) counters: Counters,
    /// Requests so far, the current one included.
    pub(crate) requests: u64,
    /// How many of them have been answered.
    pub(crate) answered: u64,
    /// When the next tick comes, in milliseconds after the beginning.
    pub(crate) tick: Option<NonZeroU64>,
    /// Bytes that were encoded and not written when the current tick began.
    pub(crate) unsent_bytes: usize,
    /// The limit of a frame that is read, and of frames that wait, if the protocol has set one.
    pub(crate) input_limit: Option<NonZeroUsize>,
    /// State of the protocol for this connection.
    pub data: Option<Box<dyn Any + Send>>,
}

impl<F: FrameLike> ConnectionContext<F> {
    /// The memory account of the connection.
    pub fn account(&self) -> MemoryAccount {
        MemoryAccount(Arc::clone(&self.facts))
    }

    /// Whether all connections together hold more than the memory limit.
    pub(crate) fn is_memory_exceeded(&self) -> bool {
        self.facts.account.is_limit_exceeded()
    }

    /// Records that the actor holds more or fewer bytes.
    pub(crate) fn change_account(&self, by: isize) {
        if self.facts.account.change(by) {
            self.facts.account.enforce();
        }
    }

    pub(crate) fn new(facts: Arc<Facts>, sessions: Arc<SessionRegistry<F>>, data: Option<Box<dyn Any + Send>>) -> Self {
        Self {
            facts,
            sessions,
            counters: Counters::default(),
            requests: 0,
            answered: 0,
            tick: None,
            unsent_bytes: 0,
            input_limit: None,
            data,
        }
    }

    /// Returns the id of the connection.
    pub fn id(&self) -> ConnectionId {
        self.facts.id
    }

    /// Returns the registry of the live connections of the supervisor, this one included: to push to others from a hook.
    pub fn sessions(&self) -> &SessionRegistry<F> {
        &self.sessions
    }

    /// Returns the address of the peer.
    pub fn peer(&self) -> SocketAddr {
        self.facts.peer
    }

    /// Returns when the connection began.
    pub fn since(&self) -> Instant {
        self.facts.since
    }

    /// Returns what has gone through it, up to this moment. Bytes count as written when the socket has taken them.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// In [`Protocol::on_tick`](crate::Protocol::on_tick): the bytes that are encoded and not yet written. A frame that the tick returns
    /// is written after them: it has been written when [`Counters::bytes_out`] has grown by more.
    pub fn unsent_bytes(&self) -> usize {
        self.unsent_bytes
    }

    /// Brings the next [`Protocol::on_tick`](crate::Protocol::on_tick) forward, so that it comes at most `after` from now: also if
    /// ticks were stopped, or if there is no [first tick](crate::Timeouts::tick). It never puts a tick off. Callable from every hook;
    /// in `on_tick` itself, the earlier of this and what the hook returns applies. The resolution is one millisecond, which is also
    /// the shortest time.
    pub fn tick_within(&mut self, after: Duration) {
        let at = self.since().elapsed().saturating_add(after.max(SHORTEST_TICK));
        // Rounded up, so that no tick comes before its time.
        let millis = u64::try_from(at.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX);
        let at = NonZeroU64::new(millis).unwrap_or(NonZeroU64::MIN);
        self.tick = Some(self.tick.map_or(at, |before| before.min(at)));
    }

    /// Limits the input of this connection from the next frame on, for example until its peer has logged in. `bytes` limits a frame,
    /// if the codec [supports it](crate::codec::Codec::set_max_frame), and the frames that wait for requests in flight. The [read-ahead](crate::Builder::read_ahead_bytes) applies too, if it is less. A later call replaces the
    /// limit. Callable from every hook.
    pub fn limit_input(&mut self, bytes: usize) {
        self.input_limit = NonZeroUsize::new(bytes.max(1));
    }

    /// When the next tick comes.
    pub(crate) fn tick_at(&self) -> Option<Instant> {
        self.tick.map(|tick| later(self.since(), Duration::from_millis(tick.get())))
    }

    /// Whether the grace period of a [shutdown](crate::Supervisor::shutdown) has ended: nothing more is read. Frames that were read
    /// before still come to [`Protocol::on_frame`](crate::Protocol::on_frame), which may refuse them.
    pub fn is_closing(&self) -> bool {
        self.facts.closing.load(Relaxed)
    }

    pub(crate) fn set_closing(&self) {
        self.facts.closing.store(true, Relaxed);
    }

    /// In [`Protocol::on_frame`](crate::Protocol::on_frame): how many requests before this one are not answered yet. None are when
    /// a reply is decided [in its turn](crate::Reply::InTurn).
    pub fn in_flight(&self) -> usize {
        let before = self.requests.saturating_sub(self.answered).saturating_sub(1);
        usize::try_from(before).unwrap_or(usize::MAX)
    }

    /// In [`Protocol::on_frame`](crate::Protocol::on_frame), and when a reply is decided in its turn: names the reply to this frame,
    /// for pushes that must not come before it.
    pub fn ticket(&self) -> ReplyTicket {
        ReplyTicket { connection: self.facts.id, request: self.requests }
    }

    /// Whether the reply that this ticket names has been handed to the codec. In
    /// [`Protocol::on_command_end`](crate::Protocol::on_command_end) the one that ends has been.
    pub fn is_answered(&self, ticket: ReplyTicket) -> bool {
        ticket.connection == self.facts.id && ticket.request <= self.answered
    }

    /// Shows something to whoever lists the connections, in place of what was shown before: see [`Session::data`].
    pub fn share<T: Any + Send + Sync>(&self, data: T) {
        // The old value is dropped after the lock has been released: its drop may use the session.
        let before = lock(&self.facts.data).replace(Arc::new(data));
        drop(before);
    }

    /// Adds the traffic to that of connections that have ended.
    pub(crate) fn settle(&self, ended: &Traffic) {
        self.publish();
        self.facts.settled.store(true, Relaxed);
        ended.add(&self.counters);
    }

    pub(crate) fn publish(&self) {
        self.facts.traffic.publish(&self.counters);
    }
}

impl<F: FrameLike> fmt::Debug for ConnectionContext<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConnectionContext").field("id", &self.id()).field("peer", &self.peer()).finish_non_exhaustive()
    }
}
