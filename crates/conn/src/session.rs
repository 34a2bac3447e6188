//! The context of a connection, which its protocol uses, and the information that other tasks can read.

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
use crate::timeouts::saturating_add;
use crate::{ConnectionId, Frame, FrameLike, PushHandle, SessionRegistry};

/// The part of a connection's state that other tasks can read.
pub(crate) struct ConnectionInfo {
    pub(crate) id: ConnectionId,
    pub(crate) peer: SocketAddr,
    pub(crate) since: Instant,
    pub(crate) traffic: Traffic,
    /// The traffic is part of the total of ended connections.
    pub(crate) is_counted_as_ended: AtomicBool,
    /// The grace period of a shutdown has ended. Stored here, because a field of the context would take a whole word.
    pub(crate) is_closing: AtomicBool,
    /// Data that the protocol shares with other tasks.
    pub(crate) data: Mutex<Option<Arc<dyn Any + Send + Sync>>>,
    pub(crate) account: Account,
}

impl ConnectionInfo {
    pub(crate) fn new(id: ConnectionId, peer: SocketAddr, limit: MemoryLimit) -> Self {
        Self {
            id,
            peer,
            since: Instant::now(),
            traffic: Traffic::default(),
            is_counted_as_ended: AtomicBool::new(false),
            is_closing: AtomicBool::new(false),
            data: Mutex::new(None),
            account: Account::new(limit),
        }
    }
}

/// Traffic counters that other tasks can read: of one connection, written only by its actor, or of all ended connections.
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

/// The traffic of a connection: frames and bytes in both directions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Counters {
    /// Frames read.
    pub frames_in: u64,
    /// Frames encoded.
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

/// A live connection, as listed by the [registry](crate::SessionRegistry). Holding a session does not keep the connection alive.
pub struct Session<F: FrameLike> {
    id: ConnectionId,
    mailbox: Arc<Mailbox<F>>,
}

impl<F: FrameLike> Session<F> {
    pub(crate) fn new(id: ConnectionId, mailbox: Arc<Mailbox<F>>) -> Self {
        Self { id, mailbox }
    }

    /// Returns the id of the connection.
    pub fn id(&self) -> ConnectionId {
        self.id
    }

    /// Returns a handle that pushes to the connection.
    pub fn handle(&self) -> PushHandle<F> {
        PushHandle::new(Arc::clone(&self.mailbox))
    }

    /// Returns the address of the peer. `None` if the [inserted](crate::SessionRegistry::insert) handle belongs to bare
    /// [`PushQueues`](crate::PushQueues), which have no connection.
    pub fn peer(&self) -> Option<SocketAddr> {
        self.mailbox.info().map(|info| info.peer)
    }

    /// Returns when the connection began. `None` for bare queues.
    pub fn since(&self) -> Option<Instant> {
        self.mailbox.info().map(|info| info.since)
    }

    /// Returns the traffic of the connection, as of the last time its actor was idle. Zero for bare queues.
    pub fn counters(&self) -> Counters {
        self.mailbox.info().map(|info| info.traffic.counters()).unwrap_or_default()
    }

    /// Returns the data that the protocol [shared](ConnectionContext::share), if it has this type.
    pub fn data<T: Any + Send + Sync>(&self) -> Option<Arc<T>> {
        let info = self.mailbox.info()?;
        let data = lock(&info.data).clone();
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

/// Identifies the reply to one request of one connection. Frames that are pushed [after](PushHandle::after) a ticket are never written
/// before its reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ReplyTicket {
    pub(crate) connection: ConnectionId,
    /// The number of the request, counted from one.
    pub(crate) request: u64,
}

/// The shortest time to the next tick, from the last one or from a call of [`ConnectionContext::tick_within`].
const MIN_TICK_INTERVAL: Duration = Duration::from_millis(1);

/// The state of one connection, which every hook of its [`Protocol`](crate::Protocol) gets. `F` is the type of its frames.
#[non_exhaustive]
pub struct ConnectionContext<F: FrameLike = Frame> {
    info: Arc<ConnectionInfo>,
    sessions: Arc<SessionRegistry<F>>,
    pub(crate) counters: Counters,
    /// The number of requests so far, including the current one.
    pub(crate) requests: u64,
    /// The number of requests that have been answered.
    pub(crate) answered: u64,
    /// The time of the next tick, in milliseconds since the connection began.
    pub(crate) next_tick_millis: Option<NonZeroU64>,
    /// Bytes that were encoded and not written when the current tick began.
    pub(crate) unsent_bytes: usize,
    /// The limit that the protocol has set with [`limit_input`](Self::limit_input), in bytes.
    pub(crate) input_limit: Option<NonZeroUsize>,
    /// State of the protocol for this connection.
    pub data: Option<Box<dyn Any + Send>>,
}

impl<F: FrameLike> ConnectionContext<F> {
    /// Returns the memory account of the connection.
    pub fn account(&self) -> MemoryAccount {
        MemoryAccount(Arc::clone(&self.info))
    }

    /// Whether all connections together hold more than the memory limit.
    pub(crate) fn is_memory_exceeded(&self) -> bool {
        self.info.account.is_limit_exceeded()
    }

    /// Records that the actor holds more or fewer bytes.
    pub(crate) fn change_account(&self, by: isize) {
        if self.info.account.change(by) {
            self.info.account.enforce();
        }
    }

    pub(crate) fn new(
        info: Arc<ConnectionInfo>,
        sessions: Arc<SessionRegistry<F>>,
        data: Option<Box<dyn Any + Send>>,
    ) -> Self {
        Self {
            info,
            sessions,
            counters: Counters::default(),
            requests: 0,
            answered: 0,
            next_tick_millis: None,
            unsent_bytes: 0,
            input_limit: None,
            data,
        }
    }

    /// Returns the id of the connection.
    pub fn id(&self) -> ConnectionId {
        self.info.id
    }

    /// Returns the registry of the live connections of the supervisor, for example to push to other connections. It contains this
    /// connection too.
    pub fn sessions(&self) -> &SessionRegistry<F> {
        &self.sessions
    }

    /// Returns the address of the peer.
    pub fn peer(&self) -> SocketAddr {
        self.info.peer
    }

    /// Returns when the connection began.
    pub fn since(&self) -> Instant {
        self.info.since
    }

    /// Returns the traffic of the connection up to now. Bytes count as written when the socket has accepted them.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Returns the number of bytes that were encoded and not yet written when the current [tick](crate::Protocol::on_tick) began. They
    /// are written before a frame that the tick returns: the first byte of that frame has been written when [`Counters::bytes_out`] has
    /// grown by more than this number.
    pub fn unsent_bytes(&self) -> usize {
        self.unsent_bytes
    }

    /// Schedules the next [`Protocol::on_tick`](crate::Protocol::on_tick) at most `after` from now, even if ticks were stopped or
    /// [none](crate::Timeouts::tick) is configured. An earlier tick is not delayed. Can be called from every hook. If `on_tick` itself
    /// calls it, the earlier of this time and the returned time applies. The resolution and the minimum are one millisecond.
    pub fn tick_within(&mut self, after: Duration) {
        let at = self.since().elapsed().saturating_add(after.max(MIN_TICK_INTERVAL));
        // Rounded up, so that no tick comes early.
        let millis = u64::try_from(at.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX);
        let at = NonZeroU64::new(millis).unwrap_or(NonZeroU64::MIN);
        self.next_tick_millis = Some(self.next_tick_millis.map_or(at, |before| before.min(at)));
    }

    /// Limits the input of this connection from the next frame on, for example until its peer has logged in. `bytes` limits the
    /// size of a frame, if the codec [supports it](crate::codec::Codec::set_max_frame), and the total of frames that wait for requests
    /// in flight. A smaller [read-ahead limit](crate::Builder::read_ahead_bytes) still applies. A later call replaces the limit. Can be
    /// called from every hook.
    pub fn limit_input(&mut self, bytes: usize) {
        self.input_limit = NonZeroUsize::new(bytes.max(1));
    }

    /// Returns the time of the next tick.
    pub(crate) fn tick_at(&self) -> Option<Instant> {
        self.next_tick_millis.map(|tick| saturating_add(self.since(), Duration::from_millis(tick.get())))
    }

    /// Whether the grace period of a [shutdown](crate::Supervisor::shutdown) has ended. Nothing more is read. Frames that were read
    /// before are still passed to [`Protocol::on_frame`](crate::Protocol::on_frame), which may reject them.
    pub fn is_closing(&self) -> bool {
        self.info.is_closing.load(Relaxed)
    }

    pub(crate) fn set_closing(&self) {
        self.info.is_closing.store(true, Relaxed);
    }

    /// Returns the number of earlier requests that are not answered yet. For use in
    /// [`Protocol::on_frame`](crate::Protocol::on_frame); always zero in the closure of [`Reply::InTurn`](crate::Reply::InTurn).
    pub fn in_flight(&self) -> usize {
        let before = self.requests.saturating_sub(self.answered).saturating_sub(1);
        usize::try_from(before).unwrap_or(usize::MAX)
    }

    /// Returns a ticket for the reply to the current frame, for pushes that must not be written before it. For use in
    /// [`Protocol::on_frame`](crate::Protocol::on_frame) and in the closure of [`Reply::InTurn`](crate::Reply::InTurn).
    pub fn ticket(&self) -> ReplyTicket {
        ReplyTicket { connection: self.info.id, request: self.requests }
    }

    /// Whether the reply of this ticket has been encoded. In [`Protocol::on_command_end`](crate::Protocol::on_command_end) this
    /// includes the reply that has just ended.
    pub fn is_answered(&self, ticket: ReplyTicket) -> bool {
        ticket.connection == self.info.id && ticket.request <= self.answered
    }

    /// Publishes data for tasks that list the connections, replacing the data published before: see [`Session::data`].
    pub fn share<T: Any + Send + Sync>(&self, data: T) {
        // The old value is dropped after the lock has been released: its drop may use the session.
        let before = lock(&self.info.data).replace(Arc::new(data));
        drop(before);
    }

    /// Publishes the traffic, and adds it to the total of ended connections.
    pub(crate) fn add_traffic_to(&self, total: &Traffic) {
        self.publish();
        self.info.is_counted_as_ended.store(true, Relaxed);
        total.add(&self.counters);
    }

    /// Makes the traffic visible to other tasks.
    pub(crate) fn publish(&self) {
        self.info.traffic.publish(&self.counters);
    }
}

impl<F: FrameLike> fmt::Debug for ConnectionContext<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConnectionContext").field("id", &self.id()).field("peer", &self.peer()).finish_non_exhaustive()
    }
}
