//! Pushing frames to a live connection, from any task.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tokio::sync::Semaphore;

use crate::mailbox::Mailbox;
use crate::outbox::Outbox;
use crate::session::Facts;
use crate::{Counters, FrameLike, MemoryAccount, ReplyTicket};

/// The priority of a pushed frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PushPriority {
    /// Written before other frames that wait.
    High,
    /// Written when no high-priority frame waits, or in its [fair share](FairnessConfig).
    Low,
}

/// What [`PushHandle::try_push`] does when the queue is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PushPolicy {
    /// Returns [`PushError::QueueFull`].
    ReturnErrorIfFull,
    /// Drops the frame and returns `Ok`. The drop is counted, and the frame goes to the dead letters if there are any.
    DropIfFull,
    /// As `DropIfFull`, and logs a warning, at most once a second.
    WarnAndDropIfFull,
}

/// Why a frame was not pushed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PushError {
    /// The queue of the connection is full.
    #[error("the connection's push queue is full")]
    QueueFull,
    /// The connection has ended.
    #[error("the connection is closed")]
    Closed,
}

impl From<PushError> for io::Error {
    fn from(error: PushError) -> Self {
        let kind = match error {
            PushError::QueueFull => io::ErrorKind::WouldBlock,
            PushError::Closed => io::ErrorKind::BrokenPipe,
        };
        Self::new(kind, error)
    }
}

/// Names frames of one kind in the outbox: the newest one ([`PushHandle::push_latest`]), or a sequence of them
/// ([`PushHandle::push_next`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(pub u64);

/// Receives lost frames. Returns false if it could not take the frame.
pub(crate) type OnLost<F> = Box<dyn Fn(F, Lost) -> bool + Send + Sync>;

/// How much may wait for one connection, and what becomes of the rest.
pub(crate) struct PushOptions<F> {
    pub(crate) high: usize,
    pub(crate) low: usize,
    pub(crate) slots: usize,
    pub(crate) slot_bytes: usize,
    pub(crate) bytes: usize,
    pub(crate) on_lost: Option<OnLost<F>>,
    pub(crate) keep_unsent: bool,
    pub(crate) counters: PushCounters,
}

/// Why a frame is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lost {
    /// There was no room, and the policy was to drop it.
    Dropped { warn: bool },
    /// It was queued when the connection ended.
    Unsent,
}

#[derive(Debug, Default)]
pub(crate) struct PushCounters {
    dropped: AtomicU64,
    unsent: AtomicU64,
    replaced: AtomicU64,
    undelivered: AtomicU64,
    /// When a warning was last logged, in milliseconds since the first, plus one.
    warned: AtomicU64,
}

impl<F: FrameLike> PushOptions<F> {
    /// Urgent frames are few; 16 of them in a row already wait for a reader that does not read.
    const HIGH: usize = 16;
    /// Enough for a burst, and little enough for a slow reader to be noticed.
    const LOW: usize = 256;
    /// As many subscriptions as a busy page has, and some.
    const SLOTS: usize = 4096;
    /// A result of 4 KB for each of them.
    const SLOT_BYTES: usize = 16 << 20;
    /// So that ten thousand connections that all stand still do not take the machine down.
    const BYTES: usize = 1 << 20;

    pub(crate) fn new() -> Self {
        Self {
            high: Self::HIGH,
            low: Self::LOW,
            slots: Self::SLOTS,
            slot_bytes: Self::SLOT_BYTES,
            bytes: Self::BYTES,
            on_lost: None,
            keep_unsent: false,
            counters: PushCounters::default(),
        }
    }

    /// At least one, and no more than can be counted.
    pub(crate) fn room(wanted: usize) -> usize {
        wanted.clamp(1, Semaphore::MAX_PERMITS)
    }

    pub(crate) fn lose(&self, frame: F, why: Lost) {
        let (counter, kept) = match why {
            Lost::Dropped { .. } => (&self.counters.dropped, true),
            Lost::Unsent => (&self.counters.unsent, self.keep_unsent),
        };
        counter.fetch_add(1, Relaxed);
        if why == (Lost::Dropped { warn: true }) && self.may_warn() {
            tracing::warn!(dropped = counter.load(Relaxed), "a frame was dropped: the connection's push queue is full");
        }
        if let Some(on_lost) = self.on_lost.as_ref().filter(|_| kept)
            && !on_lost(frame, why)
        {
            let undelivered = self.counters.undelivered.fetch_add(1, Relaxed) + 1;
            if self.may_warn() {
                tracing::warn!(undelivered, "a frame was lost: the dead-letter queue is full or closed");
            }
        }
    }

    pub(crate) fn note_replaced(&self) {
        self.counters.replaced.fetch_add(1, Relaxed);
    }

    /// At most once a second.
    fn may_warn(&self) -> bool {
        static START: std::sync::LazyLock<Instant> = std::sync::LazyLock::new(Instant::now);
        let now = u64::try_from(START.elapsed().as_millis()).unwrap_or(u64::MAX).saturating_add(1);
        let last = self.counters.warned.load(Relaxed);
        let pause = u64::try_from(Duration::from_secs(1).as_millis()).unwrap_or(u64::MAX);
        (last == 0 || now.saturating_sub(last) >= pause)
            && self.counters.warned.compare_exchange(last, now, Relaxed, Relaxed).is_ok()
    }

    pub(crate) fn stats(&self) -> PushStats {
        let PushCounters { dropped, unsent, replaced, undelivered, .. } = &self.counters;
        PushStats {
            dropped: dropped.load(Relaxed),
            unsent: unsent.load(Relaxed),
            replaced: replaced.load(Relaxed),
            undelivered: undelivered.load(Relaxed),
        }
    }
}

/// Counters of pushed frames that were not written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct PushStats {
    /// Frames that a policy dropped because the queue was full.
    pub dropped: u64,
    /// Frames that were queued when their connection ended.
    pub unsent: u64,
    /// Frames that a newer one replaced in their slot.
    pub replaced: u64,
    /// Frames that the dead letters could not take, because the queue was full or closed.
    pub undelivered: u64,
}

/// Pushes frames to one connection. Clones push to the same one; none of them keeps it alive.
pub struct PushHandle<F: FrameLike>(pub(crate) Arc<Mailbox<F>>);

impl<F: FrameLike> PushHandle<F> {
    pub(crate) fn new(mailbox: Arc<Mailbox<F>>) -> Self {
        mailbox.add_handle();
        Self(mailbox)
    }

    /// Queues an urgent frame; waits while the queue is full.
    pub async fn push_high_priority(&self, frame: F) -> Result<(), PushError> {
        self.0.outbox.push(frame, PushPriority::High).await.map(|must_wake| self.0.wake_if(must_wake))
    }

    /// Queues a frame; waits while the queue is full.
    pub async fn push_low_priority(&self, frame: F) -> Result<(), PushError> {
        self.0.outbox.push(frame, PushPriority::Low).await.map(|must_wake| self.0.wake_if(must_wake))
    }

    /// Queues a frame without waiting; if the queue is full, the policy decides. To a connection that has gone it is
    /// [`PushError::Closed`] under every policy.
    pub fn try_push(&self, frame: F, priority: PushPriority, policy: PushPolicy) -> Result<(), PushError> {
        self.0.push_or_drop(frame, priority, policy, None)
    }

    /// Puts a frame into a slot, in place of the unsent one that may be there. It never waits: a reader that stands still
    /// costs one frame per slot, and stops nobody. Refused with [`PushError::QueueFull`] if it needs one slot too many, or
    /// if the slots hold too many bytes.
    pub fn push_latest(&self, slot: Slot, frame: F) -> Result<(), PushError> {
        self.0.push_latest(slot, frame, None)
    }

    /// Queues a frame of a slot with low priority, behind all others of that priority, without waiting. Frames that are pushed this
    /// way do not replace each other; [`take_back`](Self::take_back) takes all of them back. Refused with [`PushError::QueueFull`]
    /// if there is no room.
    pub fn push_next(&self, slot: Slot, frame: F) -> Result<(), PushError> {
        self.0.push_next(slot, frame, None)
    }

    /// Takes back all unsent frames of a slot. Returns whether there were any. None of them is written after that, unless the
    /// writing of it has begun: for subscriptions that end.
    pub fn take_back(&self, slot: Slot) -> bool {
        self.0.take_back(slot)
    }

    /// How many bytes of pushed frames wait, in lanes and slots, and for replies. In a lane, a frame that is larger than all the room
    /// of it counts for that room.
    pub fn queued_bytes(&self) -> usize {
        self.0.outbox.queued_bytes()
    }

    /// The size of all frames that wait, but for the one in this slot, which a newer frame would replace.
    pub fn queued_bytes_besides(&self, slot: Slot) -> usize {
        self.0.outbox.queued_bytes_besides(slot)
    }

    /// What has gone through the connection when it last waited for its peer: whether a slow one takes anything at all.
    pub fn counters(&self) -> Counters {
        self.0.facts().map_or_else(Counters::default, |facts| facts.traffic.counters())
    }

    /// The memory account of the connection. None for bare [`PushQueues`].
    pub fn account(&self) -> Option<MemoryAccount> {
        self.0.facts().cloned().map(MemoryAccount)
    }

    /// Pushes that are never written before a certain reply. If the ticket is that of another connection, they are pushes like
    /// any other, so whoever tells many of what one has done need not ask which of them it was.
    pub fn after(&self, reply: ReplyTicket) -> PushAfter<'_, F> {
        PushAfter { handle: self, reply }
    }

    /// Ends the connection: replies that are not complete are dropped, nothing more is queued or handled, what is queued is
    /// written, and then this last frame.
    pub fn close(&self, last: Option<F>) {
        self.0.close(last);
    }

    /// Asks the actor of the connection to run [`Protocol::on_wake`](crate::Protocol::on_wake) on its own task, soon. Any number
    /// of calls before the hook runs lead to one run at least, which sees all that was written before the last of them. Cheap, and
    /// never waits. Does nothing if the connection is ending or has ended, or if the handle is that of bare [`PushQueues`].
    pub fn wake(&self) {
        self.0.request_wake();
    }

    /// Whether the connection has gone, or is about to go and takes no more.
    pub fn is_closed(&self) -> bool {
        self.0.outbox.is_closed()
    }
}

/// Pushes frames that are never written before a certain reply: see [`PushHandle::after`].
///
/// Until then they have their room in the queue, and others go ahead of them. None of these waits for room, since the reply
/// might wait for it as well.
#[derive(Debug)]
pub struct PushAfter<'a, F: FrameLike> {
    handle: &'a PushHandle<F>,
    reply: ReplyTicket,
}

impl<F: FrameLike> PushAfter<'_, F> {
    /// As [`PushHandle::try_push`], after the reply.
    pub fn try_push(&self, frame: F, priority: PushPriority, policy: PushPolicy) -> Result<(), PushError> {
        self.handle.0.push_or_drop(frame, priority, policy, Some(self.reply))
    }

    /// As [`PushHandle::push_next`], after the reply.
    pub fn push_next(&self, slot: Slot, frame: F) -> Result<(), PushError> {
        self.handle.0.push_next(slot, frame, Some(self.reply))
    }

    /// As [`PushHandle::push_latest`], after the reply. What is pushed to the slot later comes after it as well. An unsent frame
    /// that need not wait as long is kept beside the newest, so that a slot is not silent for want of an end of requests.
    pub fn push_latest(&self, slot: Slot, frame: F) -> Result<(), PushError> {
        self.handle.0.push_latest(slot, frame, Some(self.reply))
    }
}

impl<F: FrameLike> Clone for PushHandle<F> {
    fn clone(&self) -> Self {
        Self::new(Arc::clone(&self.0))
    }
}

impl<F: FrameLike> Drop for PushHandle<F> {
    fn drop(&mut self) {
        self.0.remove_handle();
    }
}

impl<F: FrameLike> fmt::Debug for PushHandle<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PushHandle").field("closed", &self.is_closed()).finish_non_exhaustive()
    }
}

/// How high-priority and low-priority frames share a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct FairnessConfig {
    /// A low-priority frame is written after this many high-priority frames in a row. Zero means strict priority. Default: 16,
    /// the default capacity of the high-priority queue, so that only a sustained flood is interrupted.
    pub max_high_before_low: usize,
    /// A low-priority frame is written when only high-priority frames were written for this long. Default: none, because it
    /// costs a look at the clock for each frame.
    pub time_slice: Option<Duration>,
}

impl FairnessConfig {
    /// Sets [`max_high_before_low`](#structfield.max_high_before_low).
    #[must_use]
    pub fn max_high_before_low(mut self, max_high_before_low: usize) -> Self {
        self.max_high_before_low = max_high_before_low;
        self
    }

    /// Sets [`time_slice`](#structfield.time_slice).
    #[must_use]
    pub fn time_slice(mut self, time_slice: Duration) -> Self {
        self.time_slice = Some(time_slice);
        self
    }
}

impl Default for FairnessConfig {
    fn default() -> Self {
        Self { max_high_before_low: 16, time_slice: None }
    }
}

/// The receiving end of what is pushed: what a connection actor has, and anyone who writes frames by other means.
///
/// ```
/// use tidewire_conn::{PushPriority, PushQueues};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// let (mut queues, handle) = PushQueues::<String>::bounded(4, 4);
/// handle.push_low_priority("news".into()).await.unwrap();
/// handle.push_high_priority("alarm".into()).await.unwrap();
/// drop(handle);
/// assert_eq!(queues.recv().await, Some((PushPriority::High, "alarm".into())));
/// assert_eq!(queues.recv().await, Some((PushPriority::Low, "news".into())));
/// assert_eq!(queues.recv().await, None);
/// # }
/// ```
pub struct PushQueues<F: FrameLike> {
    pub(crate) mailbox: Arc<Mailbox<F>>,
    fairness: FairnessConfig,
    /// Urgent frames since another one had its turn, and since when.
    run: u32,
    since: Option<Instant>,
    slots_next: bool,
    /// The queues were looked at since they last shrank.
    used: bool,
}

impl<F: FrameLike> PushQueues<F> {
    /// Queues with room for so many frames each, at least one, and with their first handle.
    pub fn bounded(high_capacity: usize, low_capacity: usize) -> (Self, PushHandle<F>) {
        let options = PushOptions {
            high: PushOptions::<F>::room(high_capacity),
            low: PushOptions::<F>::room(low_capacity),
            ..PushOptions::new()
        };
        let mailbox = Mailbox::new(Outbox::new(Arc::new(options), None), None);
        let queues = Self::new(mailbox, FairnessConfig::default());
        let handle = queues.handle();
        (queues, handle)
    }

    /// Creates the queues of a connection. They count as a handle, so that the actor is not woken when the last other is dropped.
    pub(crate) fn of_connection(options: Arc<PushOptions<F>>, fairness: FairnessConfig, facts: Arc<Facts>) -> Self {
        let outbox = Outbox::new(options, Some(MemoryAccount(Arc::clone(&facts))));
        let mailbox = Mailbox::new(outbox, Some(facts));
        mailbox.add_handle();
        Self::new(mailbox, fairness)
    }

    fn new(mailbox: Mailbox<F>, fairness: FairnessConfig) -> Self {
        Self { mailbox: Arc::new(mailbox), fairness, run: 0, since: None, slots_next: false, used: false }
    }

    /// Sets how the priorities share the queues. Default: [`FairnessConfig::default`].
    #[must_use]
    pub fn fairness(mut self, fairness: FairnessConfig) -> Self {
        self.fairness = fairness;
        self
    }

    pub(crate) fn outbox(&self) -> &Outbox<F> {
        &self.mailbox.outbox
    }

    /// A handle that pushes to these queues.
    pub fn handle(&self) -> PushHandle<F> {
        PushHandle::new(Arc::clone(&self.mailbox))
    }

    /// The next frame, urgent ones first but for the fair share of the others. None when all handles are gone and nothing is
    /// queued.
    pub async fn recv(&mut self) -> Option<(PushPriority, F)> {
        std::future::poll_fn(|context| self.poll_recv(context)).await
    }

    pub(crate) fn poll_recv(&mut self, context: &mut Context<'_>) -> Poll<Option<(PushPriority, F)>> {
        self.mailbox.set_waker(Some(context.waker().clone()));
        // Looked at before the queues: what the last handle pushed was queued before it went.
        let abandoned = !self.mailbox.has_handles();
        // Lowered before the look, so that what comes after it wakes again.
        self.outbox().take_ready();
        match self.try_recv() {
            Some(found) => Poll::Ready(Some(found)),
            None if abandoned => Poll::Ready(None),
            None => Poll::Pending,
        }
    }

    fn try_recv(&mut self) -> Option<(PushPriority, F)> {
        // Bare queues have no requests, and nothing waits for them.
        let (priority, frame) = self.try_next(false, false, u64::MAX)?;
        Some((priority, frame?))
    }

    /// Returns what is to be written next when `answered` requests have been answered: a frame of that priority, or none for the next
    /// part of the one that has been begun.
    pub(crate) fn try_next(
        &mut self,
        high_begun: bool,
        low_begun: bool,
        answered: u64,
    ) -> Option<(PushPriority, Option<F>)> {
        let order = if self.is_others_turn() {
            [PushPriority::Low, PushPriority::High]
        } else {
            [PushPriority::High, PushPriority::Low]
        };
        let is_begun = |priority| if priority == PushPriority::High { high_begun } else { low_begun };
        // The rest of a frame has the turn of its priority, and nothing of a later turn is taken before it.
        let begun = order.iter().position(|priority| is_begun(*priority));
        let fresh = &order[..begun.unwrap_or(order.len())];
        let taken = if fresh.is_empty() { None } else { self.take(fresh, answered) };
        let found = match taken {
            Some((priority, frame)) => Some((priority, Some(frame))),
            None => begun.map(|begun| (order[begun], None)),
        };
        if let Some((PushPriority::High, _)) = found {
            self.run = self.run.saturating_add(1);
            if self.fairness.time_slice.is_some() {
                self.since.get_or_insert_with(Instant::now);
            }
        } else {
            (self.run, self.since) = (0, None);
        }
        found
    }

    fn take(&mut self, order: &[PushPriority], answered: u64) -> Option<(PushPriority, F)> {
        self.used = true;
        self.mailbox.outbox.take(order, &mut self.slots_next, answered)
    }

    /// Releases memory that an idle connection does not need.
    pub(crate) fn shrink(&mut self) {
        // Queues that were not used have not grown.
        if std::mem::take(&mut self.used) {
            self.outbox().shrink();
        }
    }

    fn is_others_turn(&self) -> bool {
        let FairnessConfig { max_high_before_low, time_slice } = self.fairness;
        let enough = max_high_before_low > 0 && self.run as usize >= max_high_before_low;
        let long_enough = time_slice.zip(self.since).is_some_and(|(slice, since)| since.elapsed() >= slice);
        enough || long_enough
    }
}

impl<F: FrameLike> Drop for PushQueues<F> {
    fn drop(&mut self) {
        self.outbox().close();
    }
}

impl<F: FrameLike> fmt::Debug for PushQueues<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PushQueues").field("fairness", &self.fairness).finish_non_exhaustive()
    }
}
