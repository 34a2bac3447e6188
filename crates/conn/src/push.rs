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
use crate::session::ConnectionInfo;
use crate::{Counters, FrameLike, MemoryAccount, ReplyTicket};

/// The priority of a pushed frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PushPriority {
    /// Written before low-priority frames.
    High,
    /// Written when no high-priority frame is queued, or as its [fair share](FairnessConfig).
    Low,
}

/// What [`PushHandle::try_push`] does when the queue is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PushPolicy {
    /// Returns [`PushError::QueueFull`].
    ReturnErrorIfFull,
    /// Drops the frame and returns `Ok`. The drop is counted, and the frame is sent to the dead-letter channel, if one is configured.
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

/// Identifies frames of one kind in the outbox: either only the newest is kept ([`PushHandle::push_latest`]), or all of them in
/// order ([`PushHandle::push_next`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(pub u64);

/// A function that receives lost frames. Returns false if it could not accept the frame.
pub(crate) type OnLost<F> = Box<dyn Fn(F, LossReason) -> bool + Send + Sync>;

/// The limits of an outbox, and the handling of frames that exceed them.
pub(crate) struct PushOptions<F> {
    pub(crate) high_capacity: usize,
    pub(crate) low_capacity: usize,
    pub(crate) max_slots: usize,
    pub(crate) slot_bytes: usize,
    pub(crate) lane_bytes: usize,
    pub(crate) on_lost: Option<OnLost<F>>,
    pub(crate) keep_unsent: bool,
    pub(crate) counters: PushCounters,
}

/// Why a frame was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LossReason {
    /// The queue was full, and the policy was to drop the frame. If `warn` is true, a warning is logged.
    Dropped { warn: bool },
    /// The frame was queued when the connection ended.
    Unsent,
}

#[derive(Debug, Default)]
pub(crate) struct PushCounters {
    dropped: AtomicU64,
    unsent: AtomicU64,
    replaced: AtomicU64,
    undelivered: AtomicU64,
    /// When a warning was last logged, in milliseconds since the first warning, plus one. Zero if none was logged.
    last_warning_millis: AtomicU64,
}

impl<F: FrameLike> PushOptions<F> {
    /// Urgent frames are few: when 16 wait, the peer does not read.
    const HIGH_CAPACITY_FRAMES: usize = 16;
    /// Enough for a burst, and few enough to notice a slow consumer.
    const LOW_CAPACITY_FRAMES: usize = 256;
    /// More than the subscriptions of a busy page.
    const MAX_SLOTS: usize = 4096;
    /// 4 KiB for each slot.
    const MAX_SLOT_BYTES: usize = 16 << 20;
    /// Ten thousand stalled connections fit into memory.
    const MAX_LANE_BYTES: usize = 1 << 20;

    pub(crate) fn new() -> Self {
        Self {
            high_capacity: Self::HIGH_CAPACITY_FRAMES,
            low_capacity: Self::LOW_CAPACITY_FRAMES,
            max_slots: Self::MAX_SLOTS,
            slot_bytes: Self::MAX_SLOT_BYTES,
            lane_bytes: Self::MAX_LANE_BYTES,
            on_lost: None,
            keep_unsent: false,
            counters: PushCounters::default(),
        }
    }

    /// Limits a capacity to the range from one to the maximum of a semaphore.
    pub(crate) fn clamp_capacity(capacity: usize) -> usize {
        capacity.clamp(1, Semaphore::MAX_PERMITS)
    }

    /// Counts a lost frame, and passes it to `on_lost`. An unsent frame is passed only with `keep_unsent`.
    pub(crate) fn count_lost(&self, frame: F, reason: LossReason) {
        let (counter, is_kept) = match reason {
            LossReason::Dropped { .. } => (&self.counters.dropped, true),
            LossReason::Unsent => (&self.counters.unsent, self.keep_unsent),
        };
        counter.fetch_add(1, Relaxed);
        if reason == (LossReason::Dropped { warn: true }) && self.may_warn() {
            tracing::warn!(dropped = counter.load(Relaxed), "frame dropped: push queue full");
        }
        if let Some(on_lost) = self.on_lost.as_ref().filter(|_| is_kept)
            && !on_lost(frame, reason)
        {
            let undelivered = self.counters.undelivered.fetch_add(1, Relaxed) + 1;
            if self.may_warn() {
                tracing::warn!(undelivered, "frame lost: dead-letter channel full or closed");
            }
        }
    }

    pub(crate) fn count_replaced(&self) {
        self.counters.replaced.fetch_add(1, Relaxed);
    }

    /// Whether a warning may be logged now, at most one per second.
    fn may_warn(&self) -> bool {
        static START: std::sync::LazyLock<Instant> = std::sync::LazyLock::new(Instant::now);
        let now = u64::try_from(START.elapsed().as_millis()).unwrap_or(u64::MAX).saturating_add(1);
        let last = self.counters.last_warning_millis.load(Relaxed);
        let pause = u64::try_from(Duration::from_secs(1).as_millis()).unwrap_or(u64::MAX);
        (last == 0 || now.saturating_sub(last) >= pause)
            && self.counters.last_warning_millis.compare_exchange(last, now, Relaxed, Relaxed).is_ok()
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
    /// Dropped or unsent frames that the dead-letter channel did not accept, because it was full or closed.
    pub undelivered: u64,
}

/// A handle that pushes frames to one connection. Clones push to the same connection. A handle does not keep the connection alive.
pub struct PushHandle<F: FrameLike>(pub(crate) Arc<Mailbox<F>>);

impl<F: FrameLike> PushHandle<F> {
    pub(crate) fn new(mailbox: Arc<Mailbox<F>>) -> Self {
        mailbox.add_handle();
        Self(mailbox)
    }

    /// Queues a high-priority frame. Waits while the queue is full.
    pub async fn push_high_priority(&self, frame: F) -> Result<(), PushError> {
        self.0.outbox.push(frame, PushPriority::High).await.map(|must_wake| self.0.wake_if(must_wake))
    }

    /// Queues a low-priority frame. Waits while the queue is full.
    pub async fn push_low_priority(&self, frame: F) -> Result<(), PushError> {
        self.0.outbox.push(frame, PushPriority::Low).await.map(|must_wake| self.0.wake_if(must_wake))
    }

    /// Queues a frame without waiting. If the queue is full, applies the policy. If the connection has ended, returns
    /// [`PushError::Closed`] whatever the policy is.
    pub fn try_push(&self, frame: F, priority: PushPriority, policy: PushPolicy) -> Result<(), PushError> {
        self.0.push_or_drop(frame, priority, policy, None)
    }

    /// Puts a frame into a slot without waiting, replacing the unsent frame of the slot. A slow consumer therefore costs one frame per
    /// slot and does not block pushers. Returns [`PushError::QueueFull`] if too many slots of the connection are in use, or have too
    /// many bytes.
    pub fn push_latest(&self, slot: Slot, frame: F) -> Result<(), PushError> {
        self.0.push_latest(slot, frame, None)
    }

    /// Queues a low-priority frame that belongs to a slot, without waiting. Frames pushed this way do not replace each other, and
    /// [`clear_slot`](Self::clear_slot) removes all of them. Returns [`PushError::QueueFull`] if the queue is full.
    pub fn push_next(&self, slot: Slot, frame: F) -> Result<(), PushError> {
        self.0.push_next(slot, frame, None)
    }

    /// Removes all unsent frames of a slot, for example when a subscription ends. Returns whether there were any. A frame that is
    /// already encoded in part is completed.
    pub fn clear_slot(&self, slot: Slot) -> bool {
        self.0.clear_slot(slot)
    }

    /// Returns the size of all queued frames: in both queues, in slots, and tied to a reply. A frame that is larger than the byte limit
    /// of its queue counts as that limit.
    pub fn queued_bytes(&self) -> usize {
        self.0.outbox.queued_bytes()
    }

    /// Returns the size of all queued frames except the one in this slot, which a newer frame would replace.
    pub fn queued_bytes_except(&self, slot: Slot) -> usize {
        self.0.outbox.queued_bytes_except(slot)
    }

    /// Returns the traffic of the connection, as of the last time it was idle, for example to see whether a slow consumer reads at all.
    pub fn counters(&self) -> Counters {
        self.0.info().map_or_else(Counters::default, |info| info.traffic.counters())
    }

    /// Returns the memory account of the connection. `None` for bare [`PushQueues`].
    pub fn account(&self) -> Option<MemoryAccount> {
        self.0.info().cloned().map(MemoryAccount)
    }

    /// Returns a view of this handle whose pushes are never written before the reply of `ticket`. A ticket of another connection
    /// has no effect, so a broadcast can use the ticket of the connection that caused it for all receivers.
    pub fn after(&self, ticket: ReplyTicket) -> PushAfter<'_, F> {
        PushAfter { handle: self, ticket }
    }

    /// Closes the connection. Incomplete replies are dropped, and nothing more is queued or handled. Queued frames are written, followed
    /// by the frame `last`.
    pub fn close(&self, last: Option<F>) {
        self.0.close(last);
    }

    /// Requests a run of [`Protocol::on_wake`](crate::Protocol::on_wake) on the task of the connection, without waiting. Calls before
    /// the hook runs are coalesced: a run follows the last of them, and sees everything that was written before it. Has no effect if
    /// the connection is ending or has ended, or for a handle of bare [`PushQueues`].
    pub fn wake(&self) {
        self.0.request_wake();
    }

    /// Whether the connection has ended, or is ending and accepts no more frames.
    pub fn is_closed(&self) -> bool {
        self.0.outbox.is_closed()
    }
}

/// Pushes frames that are never written before a certain reply: see [`PushHandle::after`].
///
/// Until the reply is encoded, the frames take up capacity in the queue, and other frames overtake them. None of the methods waits for
/// capacity, because a reply that waits for a push tied to itself could wait forever.
#[derive(Debug)]
pub struct PushAfter<'a, F: FrameLike> {
    handle: &'a PushHandle<F>,
    ticket: ReplyTicket,
}

impl<F: FrameLike> PushAfter<'_, F> {
    /// As [`PushHandle::try_push`], after the reply.
    pub fn try_push(&self, frame: F, priority: PushPriority, policy: PushPolicy) -> Result<(), PushError> {
        self.handle.0.push_or_drop(frame, priority, policy, Some(self.ticket))
    }

    /// As [`PushHandle::push_next`], after the reply.
    pub fn push_next(&self, slot: Slot, frame: F) -> Result<(), PushError> {
        self.handle.0.push_next(slot, frame, Some(self.ticket))
    }

    /// As [`PushHandle::push_latest`], after the reply. Frames that are pushed to the slot later wait for the reply as well. An
    /// unsent frame that waits for an earlier reply is kept in addition to the newest, so that frames of the slot are written even if
    /// requests are always in flight.
    pub fn push_latest(&self, slot: Slot, frame: F) -> Result<(), PushError> {
        self.handle.0.push_latest(slot, frame, Some(self.ticket))
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
    /// reads the clock for each frame.
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

/// The receiving end of a [`PushHandle`]. Every connection actor has one. An application can use bare queues, without a connection, and
/// write the frames by other means.
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
    /// The number of high-priority frames taken since the last other frame.
    high_in_a_row: u32,
    /// When the first of them was taken.
    high_since: Option<Instant>,
    /// Whether the last low-priority turn tried the slots before the low lane. The turns alternate.
    slots_first: bool,
    /// A frame was taken since the queues were last shrunk.
    was_used: bool,
}

impl<F: FrameLike> PushQueues<F> {
    /// Creates queues with these capacities in frames, at least one each, and returns them with a handle.
    pub fn bounded(high_capacity: usize, low_capacity: usize) -> (Self, PushHandle<F>) {
        let options = PushOptions {
            high_capacity: PushOptions::<F>::clamp_capacity(high_capacity),
            low_capacity: PushOptions::<F>::clamp_capacity(low_capacity),
            ..PushOptions::new()
        };
        let mailbox = Mailbox::new(Outbox::new(Arc::new(options), None), None);
        let queues = Self::new(mailbox, FairnessConfig::default());
        let handle = queues.handle();
        (queues, handle)
    }

    /// Creates the queues of a connection. They count as a handle, so that dropping the last handle does not wake the actor.
    pub(crate) fn for_connection(
        options: Arc<PushOptions<F>>,
        fairness: FairnessConfig,
        info: Arc<ConnectionInfo>,
    ) -> Self {
        let outbox = Outbox::new(options, Some(MemoryAccount(Arc::clone(&info))));
        let mailbox = Mailbox::new(outbox, Some(info));
        mailbox.add_handle();
        Self::new(mailbox, fairness)
    }

    fn new(mailbox: Mailbox<F>, fairness: FairnessConfig) -> Self {
        Self {
            mailbox: Arc::new(mailbox),
            fairness,
            high_in_a_row: 0,
            high_since: None,
            slots_first: false,
            was_used: false,
        }
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

    /// Returns a handle that pushes to these queues.
    pub fn handle(&self) -> PushHandle<F> {
        PushHandle::new(Arc::clone(&self.mailbox))
    }

    /// Waits for the next frame: high priority first, with a fair share for low priority. Returns `None` when all handles have been
    /// dropped and nothing is queued.
    pub async fn recv(&mut self) -> Option<(PushPriority, F)> {
        std::future::poll_fn(|context| self.poll_recv(context)).await
    }

    pub(crate) fn poll_recv(&mut self, context: &mut Context<'_>) -> Poll<Option<(PushPriority, F)>> {
        self.mailbox.set_waker(Some(context.waker().clone()));
        // Checked before the queues, because the last handle queued its frames before it was dropped.
        let is_abandoned = !self.mailbox.has_handles();
        // Cleared before the queues are read, so that a later push wakes this task again.
        self.outbox().take_ready();
        match self.try_recv() {
            Some(found) => Poll::Ready(Some(found)),
            None if is_abandoned => Poll::Ready(None),
            None => Poll::Pending,
        }
    }

    fn try_recv(&mut self) -> Option<(PushPriority, F)> {
        // Bare queues have no requests that a frame could wait for.
        let (priority, frame) = self.try_next(false, false, u64::MAX)?;
        Some((priority, frame?))
    }

    /// Returns the next frame to write, with its priority, when `answered` requests have been answered. The frame is `None` if the next
    /// output is the rest of a frame of this priority that was encoded in part.
    pub(crate) fn try_next(
        &mut self,
        is_high_partial: bool,
        is_low_partial: bool,
        answered: u64,
    ) -> Option<(PushPriority, Option<F>)> {
        let order = if self.is_low_turn() {
            [PushPriority::Low, PushPriority::High]
        } else {
            [PushPriority::High, PushPriority::Low]
        };
        let is_partial = |priority| if priority == PushPriority::High { is_high_partial } else { is_low_partial };
        // The rest of a frame is written in the turn of its priority, before any frame of a later turn.
        let partial = order.iter().position(|priority| is_partial(*priority));
        let before_partial = &order[..partial.unwrap_or(order.len())];
        let taken = if before_partial.is_empty() { None } else { self.take(before_partial, answered) };
        let found = match taken {
            Some((priority, frame)) => Some((priority, Some(frame))),
            None => partial.map(|partial| (order[partial], None)),
        };
        if let Some((PushPriority::High, _)) = found {
            self.high_in_a_row = self.high_in_a_row.saturating_add(1);
            if self.fairness.time_slice.is_some() {
                self.high_since.get_or_insert_with(Instant::now);
            }
        } else {
            (self.high_in_a_row, self.high_since) = (0, None);
        }
        found
    }

    fn take(&mut self, order: &[PushPriority], answered: u64) -> Option<(PushPriority, F)> {
        self.was_used = true;
        self.mailbox.outbox.take(order, &mut self.slots_first, answered)
    }

    /// Releases memory that an idle connection does not need.
    pub(crate) fn shrink(&mut self) {
        // If no frame was taken, the queues have no spare memory.
        if std::mem::take(&mut self.was_used) {
            self.outbox().shrink();
        }
    }

    /// Whether a low-priority frame is next, because high-priority frames have used up their share.
    fn is_low_turn(&self) -> bool {
        let FairnessConfig { max_high_before_low, time_slice } = self.fairness;
        let is_count_reached = max_high_before_low > 0 && self.high_in_a_row as usize >= max_high_before_low;
        let is_time_over = time_slice.zip(self.high_since).is_some_and(|(slice, since)| since.elapsed() >= slice);
        is_count_reached || is_time_over
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
