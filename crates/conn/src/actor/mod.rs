//! The actor of one connection: the only code that reads from its socket and writes to it, in one task.
//!
//! # The path of a frame
//!
//! 1. The supervisor admits the connection with a permit. Its actor runs after the TLS or WebSocket handshake, if there is one
//!    (`tls.rs`, `websocket/`).
//! 2. The actor reads into a buffer that all connections of a thread share, so an idle connection holds no buffer (`input`).
//! 3. The codec takes a whole frame out of the input. The body is split off, not copied.
//! 4. The application's [`Protocol`] replies with frames, or with a future or stream that the actor polls. `replies` keeps the
//!    replies in the order of the requests.
//! 5. The outbox has the frames that other tasks push (`outbox/`, `push.rs`).
//! 6. The actor gathers pushes and replies into one batch, writes it, and flushes once (`sending`, `batch.rs`).
//! 7. When there is nothing to do, the actor is idle (`idle`): it releases its buffers, and sets an alarm if it waits for the
//!    peer (`alarms.rs`, `timeouts.rs`).
//!
//! `lifecycle` has the stages from the beginning of a connection to its end, and `linger` closes its socket.
//!
//! # Fairness
//!
//! The actor works in turns. In a turn it gathers pushes and replies into the batch, handles input, writes and reads. The protocol
//! chooses whether pushes or replies come first. In every turn that begins with capacity in the batch, pushes, replies and requests
//! get at least one frame each. Pushes, and replies that come before pushes, fill at most three quarters of the batch while others wait.
//! So a high-priority push waits for one batch at most, and a flood of one kind does not stop the others.
//!
//! If a peer does not read, the batch becomes full. Then the actor takes nothing from the outbox, pushers wait, and no request is
//! handled. The actor still decodes input, up to the read-ahead limit, and passes each frame to [`Protocol::on_waiting`], which can
//! consume a heartbeat; other frames wait. The codec's control frames are encoded when the batch has capacity again.
//!
//! # Timeouts
//!
//! Timeouts are checked only after an alarm has fired and the connection is idle. By then the runtime has polled the sockets, so
//! input that has arrived is read before a timeout is detected. Ticks are the exception: a connection that is never idle runs them
//! when it yields to other tasks.

mod idle;
mod input;
mod lifecycle;
mod linger;
mod parked;
mod replies;
mod sending;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::Instant;

use self::input::Input;
use self::lifecycle::{Lifecycle, Linger};
use self::replies::{Replies, ReplyStep};
use self::sending::{FrameKind, Unfinished};
use crate::batch::Batch;
use crate::codec::Codec;
use crate::memory::STEP_BYTES;
use crate::push::PushQueues;
use crate::supervisor::{ShutdownPhase, SupervisorShared};
use crate::timeouts::{Watch, saturating_add};
use crate::{CloseReason, ConnectionContext, Protocol, ServiceOrder};

/// The actor yields to other tasks after this many turns.
const MAX_TURNS_PER_POLL: usize = 16;
/// The actor also yields after it has written this many batches, so that a peer that reads fast does not occupy the thread.
const MAX_BATCHES_PER_POLL: u64 = 4;
/// Limit of the pushes, and of the replies, that are gathered in a turn. Without it, empty frames could prolong a turn, because they
/// do not fill the batch.
const MAX_FRAMES_PER_TURN: usize = 4096;
/// An estimate of the bytes that a codec adds to a small frame.
const FRAME_OVERHEAD_BYTES: usize = 8;

/// The limits of an actor.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// The size of a full batch. No further frame is added to it.
    pub(crate) batch_bytes: usize,
    /// Limit of the input that is read ahead of the requests in flight.
    pub(crate) read_ahead_bytes: usize,
    /// Limit of the requests that are handled concurrently.
    pub(crate) max_in_flight: usize,
    /// Limit of the replies that are ready before their turn. Above it no further request is handled.
    pub(crate) ready_reply_bytes: usize,
}

pub(crate) struct Actor<P: Protocol, S> {
    socket: S,
    shared: Arc<SupervisorShared<P>>,
    codec: P::Codec,
    context: ConnectionContext<P::Frame>,
    queues: PushQueues<P::Frame>,
    lifecycle: Lifecycle<CloseReason<P>>,
    input: Input<P::Frame>,
    batch: Batch,
    /// Bytes were written since the socket was last flushed.
    needs_flush: bool,
    replies: Replies<P>,
    unfinished: Unfinished<P::Frame>,
    watch: Watch,
    /// The time of the alarm that is set.
    alarm: Option<Instant>,
    /// A clone of the waker in the mailbox.
    waker: Option<Waker>,
    /// The phase of a shutdown that the actor has entered.
    phase: ShutdownPhase,
    /// A shutdown has begun, and the protocol has not yet announced it to the peer.
    must_announce_shutdown: bool,
    /// The last poll let other connections run first because the memory limit is exceeded.
    has_yielded: bool,
    /// The bytes that are recorded in the account of the connection, in multiples of [`STEP_BYTES`].
    recorded_steps: u32,
}

/// Whether a step made progress, or the reason to end the connection at once.
type Progress<P> = Result<bool, CloseReason<P>>;

impl<P: Protocol, S: AsyncRead + AsyncWrite + Unpin> Actor<P, S> {
    pub(crate) fn new(
        socket: S,
        already_read: &[u8],
        shared: Arc<SupervisorShared<P>>,
        codec: P::Codec,
        mut context: ConnectionContext<P::Frame>,
        queues: PushQueues<P::Frame>,
    ) -> Self {
        let watch = Watch::new(context.since());
        if let Some(tick) = shared.timeouts.tick {
            context.tick_within(tick);
        }
        Self {
            socket,
            shared,
            codec,
            context,
            queues,
            lifecycle: Lifecycle::Starting,
            input: Input::new(already_read),
            batch: Batch::default(),
            needs_flush: false,
            replies: Replies::new(),
            unfinished: Unfinished::default(),
            watch,
            alarm: None,
            waker: None,
            phase: ShutdownPhase::Open,
            must_announce_shutdown: false,
            has_yielded: false,
            recorded_steps: 0,
        }
    }

    /// Runs the connection to its end.
    ///
    /// Not an `async fn`, because its future would hold the actor twice.
    pub(crate) fn poll_run(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if !self.lifecycle.is_lingering() {
            let polled = catch_unwind(AssertUnwindSafe(|| {
                self.start();
                self.poll(context)
            }));
            let Poll::Ready(reason) = polled.unwrap_or(Poll::Ready(CloseReason::Panic)) else {
                self.record_held();
                return Poll::Pending;
            };
            if matches!(reason, CloseReason::Io(_)) {
                self.end(&reason, None);
                return Poll::Ready(());
            }
            let deadline = saturating_add(Instant::now(), self.shared.timeouts.linger);
            self.end(&reason, Some(Linger { deadline, is_shut_down: false, discarded: 0 }));
            self.prepare_to_linger(deadline);
        }
        self.poll_linger(context)
    }

    /// Notifies the protocol of the connection, once.
    fn start(&mut self) {
        if self.lifecycle.start() {
            self.shared.protocol.on_connection_setup(self.queues.handle(), &mut self.context);
            for frame in self.shared.protocol.greeting(&mut self.context) {
                self.send_whole(frame);
            }
        }
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<CloseReason<P>> {
        self.register_waker(context);
        // Above the memory limit, connections that are being closed run first and release their memory. Yields only once, so that no
        // connection waits for another.
        self.has_yielded = !self.has_yielded && self.context.is_memory_exceeded() && !self.queues.mailbox.has_signals();
        if self.has_yielded {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        if self.replies.len() > 1 {
            self.replies.poll_ahead(context);
        }
        let written = self.context.counters.bytes_out;
        for _ in 0..MAX_TURNS_PER_POLL {
            if self.context.counters.bytes_out - written > MAX_BATCHES_PER_POLL * self.shared.limits.batch_bytes as u64
            {
                break;
            }
            match self.turn_or_idle(context) {
                // If the connection was already closing, its first reason is kept.
                Err(reason) => return Poll::Ready(self.lifecycle.take_reason().unwrap_or(reason)),
                Ok(false) => return Poll::Pending,
                Ok(true) => {}
            }
            if self.is_written()
                && let Some(reason) = self.lifecycle.take_reason()
            {
                return Poll::Ready(reason);
            }
            if self.context.is_memory_exceeded() {
                break;
            }
        }
        if self.context.next_tick_millis.is_some() {
            self.tick_while_busy();
        }
        context.waker().wake_by_ref();
        Poll::Pending
    }

    fn turn_or_idle(&mut self, context: &mut Context<'_>) -> Progress<P> {
        let phase = self.shared.phase.get();
        if phase > self.phase {
            self.enter(phase)?;
        }
        if self.queues.mailbox.has_signals() {
            self.handle_signals()?;
        }
        if self.turn(context)? { Ok(true) } else { self.idle() }
    }

    /// Stores the waker of this task in the mailbox. It rarely changes, so the cost is a comparison.
    fn register_waker(&mut self, context: &Context<'_>) {
        if self.waker.as_ref().is_none_or(|waker| !waker.will_wake(context.waker())) {
            self.queues.mailbox.set_waker(Some(context.waker().clone()));
            self.waker = Some(context.waker().clone());
        }
    }

    /// Acts on the signals in the mailbox: the memory limit is exceeded, or another task has closed the connection or requested
    /// [`Protocol::on_wake`].
    #[cold]
    fn handle_signals(&mut self) -> Result<(), CloseReason<P>> {
        if self.queues.mailbox.take_over_limit() {
            if !self.is_written() || !self.lifecycle.is_serving() {
                // A frame may be written in part, so nothing can follow it.
                return Err(CloseReason::MemoryLimit);
            }
            self.close(CloseReason::MemoryLimit);
            self.discard_unencoded();
        }
        if self.queues.mailbox.is_close_requested() && self.lifecycle.flush() {
            self.replies.clear();
        }
        if self.queues.mailbox.take_wake_request() && self.lifecycle.is_serving() {
            // Set before the hook runs, so that a push by the hook does not wake this task: the next turn reads the outbox anyway.
            self.queues.outbox().set_ready();
            self.shared.protocol.on_wake(&mut self.context);
        }
        Ok(())
    }

    /// Drops all input, replies and pushes that are not yet encoded, because the connection is ending.
    fn discard_unencoded(&mut self) {
        self.input.clear();
        self.replies.clear();
        self.queues.outbox().close();
        self.drop_unfinished();
        self.unfinished.reply = None;
    }

    /// Records the memory of the connection in its account, except for the outbox.
    fn record_held(&mut self) {
        let held = self.input.bytes.capacity()
            + self.codec.held_bytes()
            + self.input.parked.bytes()
            + self.replies.ready_bytes()
            + self.unfinished.held_bytes()
            + self.batch.held_bytes();
        self.record(held);
    }

    /// Enters the next phase of a shutdown.
    #[cold]
    fn enter(&mut self, phase: ShutdownPhase) -> Result<(), CloseReason<P>> {
        if phase == ShutdownPhase::Aborted {
            return Err(CloseReason::Shutdown);
        }
        self.must_announce_shutdown |= self.phase == ShutdownPhase::Open;
        self.phase = phase;
        if phase == ShutdownPhase::Closing {
            self.context.set_closing();
            self.queues.outbox().stop_accepting();
            self.lifecycle.drain();
        }
        Ok(())
    }

    /// Closes the connection, with [`Protocol::last_frame`].
    fn close(&mut self, reason: CloseReason<P>) {
        if self.lifecycle.is_serving()
            && !matches!(reason, CloseReason::Peer)
            && let Some(frame) = self.shared.protocol.last_frame(&reason, &mut self.context)
        {
            self.send_whole(frame);
        }
        self.close_silently(reason);
    }

    /// Closes the connection with the frame `last`, or with [`Protocol::last_frame`] if it is `None`.
    fn close_with(&mut self, last: Option<P::Frame>, reason: CloseReason<P>) {
        match last {
            Some(last) => {
                self.send_whole(last);
                self.close_silently(reason);
            }
            None => self.close(reason),
        }
    }

    /// Closes the connection without a last frame.
    fn close_silently(&mut self, reason: CloseReason<P>) {
        self.replies.clear();
        self.lifecycle.close(reason);
    }

    fn is_written(&self) -> bool {
        self.batch.is_empty() && !self.needs_flush
    }

    /// Runs one turn: gathers pushes and replies, handles input, writes and reads. Returns whether to run another one.
    fn turn(&mut self, context: &mut Context<'_>) -> Progress<P> {
        let has_capacity = self.batch.len() < self.shared.limits.batch_bytes;
        let mut progress = false;
        if self.lifecycle.is_serving() {
            if has_capacity {
                if P::HOLD_PUSHES || P::ORDER == ServiceOrder::RepliesFirst {
                    progress |= self.gather_replies(context);
                    progress |= self.announce_shutdown();
                    progress |= self.gather_pushes();
                } else {
                    progress |= self.announce_shutdown();
                    progress |= self.gather_pushes();
                    progress |= self.gather_replies(context);
                }
                progress |= self.handle_input(context, true);
                progress |= self.close_if_done();
            } else if self.input.may_have_frame {
                progress |= self.handle_input(context, false);
            }
        }
        match self.write(context) {
            Ok(written) => progress |= written,
            Err(reason) => {
                if P::HANDLE_INPUT_AFTER_WRITE_ERROR {
                    self.handle_remaining_input(context);
                }
                return Err(reason);
            }
        }
        let has_read = self.read(context)?;
        progress |= has_read;
        if progress && !has_read && has_capacity && self.is_quiet() {
            // Another turn would find nothing to do, and any new event wakes the actor.
            return Ok(false);
        }
        // If the connection is closing and has nothing left to write, returns true, so that `poll` ends it.
        Ok(progress || !self.lifecycle.is_serving() && self.is_written())
    }

    /// Whether there is nothing to do until a new event. The input has no complete frame then.
    fn is_quiet(&self) -> bool {
        let Input { parked, has_ended, may_have_frame, .. } = &self.input;
        let is_handled =
            !may_have_frame && !self.must_announce_shutdown && self.replies.is_empty() && parked.is_empty();
        let is_open = !has_ended && self.lifecycle.may_read() && !self.codec.is_closing();
        is_handled && is_open && !self.queues.outbox().is_ready() && self.is_written()
    }

    /// Whether pushes wait because replies must not be interrupted, and one is in progress.
    fn holds_pushes(&self) -> bool {
        P::HOLD_PUSHES && !self.replies.is_empty()
    }

    /// Announces a shutdown to the peer.
    fn announce_shutdown(&mut self) -> bool {
        if !self.must_announce_shutdown || self.holds_pushes() || !self.lifecycle.is_serving() {
            return false;
        }
        self.must_announce_shutdown = false;
        if let Some(frame) = self.shared.protocol.on_shutdown(self.shared.grace(), &mut self.context) {
            self.send_whole(frame);
        }
        true
    }

    /// Closes the connection if it is draining or flushing and has finished, if its peer has closed its side and all requests are
    /// answered, or if the codec is closed. Returns whether it is closing.
    fn close_if_done(&mut self) -> bool {
        if !self.lifecycle.is_serving() {
            return true;
        }
        let is_sent = self.unfinished.reply.is_none();
        let is_answered = is_sent && self.replies.is_empty() && self.input.parked.is_empty();
        if is_answered && let Some(reason) = self.lifecycle.take_decode_error() {
            self.close(reason);
            self.codec.encode_control(&mut self.batch, true);
            return true;
        }
        let peer_is_closing = self.codec.is_closing();
        if peer_is_closing && is_answered {
            self.codec.encode_control(&mut self.batch, true);
        }
        if self.codec.is_closed() {
            self.close_silently(if peer_is_closing { CloseReason::Peer } else { CloseReason::Handle });
            return true;
        }
        let is_handled = is_answered && !self.input.may_have_frame;
        let is_done = match self.lifecycle {
            Lifecycle::Open => is_handled && self.input.has_ended,
            Lifecycle::Draining => is_handled,
            Lifecycle::Flushing => is_sent,
            _ => false,
        };
        if !is_done || self.queues.outbox().is_ready() {
            return false;
        }
        match self.lifecycle {
            Lifecycle::Flushing => self.close_with(self.queues.outbox().take_last(), CloseReason::Handle),
            Lifecycle::Draining => self.close(CloseReason::Shutdown),
            _ => {
                // All frames have been handled; the rest of the input is not a whole frame.
                let finished = self.codec.finish(&self.input.bytes);
                self.close(finished.map_or_else(CloseReason::Decode, |()| CloseReason::Peer));
            }
        }
        true
    }

    /// Returns the size up to which pushes or replies may fill the batch: three quarters of it if others wait.
    fn batch_limit(&self, others_wait: bool) -> usize {
        let batch = self.shared.limits.batch_bytes;
        if others_wait { batch / 4 * 3 } else { batch }
    }

    /// Encodes queued pushes. Returns whether there were any. Costs one load if there are none.
    #[inline]
    fn gather_pushes(&mut self) -> bool {
        if !self.queues.outbox().is_ready() {
            return false;
        }
        self.gather_queued()
    }

    #[cold]
    #[inline(never)]
    fn gather_queued(&mut self) -> bool {
        if !self.lifecycle.is_serving() || self.holds_pushes() || !self.queues.outbox().take_ready() {
            return false;
        }
        let limit = self.batch_limit(!self.replies.is_empty() || !self.input.bytes.is_empty());
        let (frames, bytes) = self.queues.outbox().lane_totals();
        // Reserves the capacity for small frames at once. Larger frames are rarely copied.
        if frames > 1 && bytes / frames < Batch::MIN_SHARED_BYTES {
            self.batch.reserve((bytes + frames * FRAME_OVERHEAD_BYTES).min(limit));
        }
        let mut progress = false;
        for _ in 0..MAX_FRAMES_PER_TURN {
            if progress && self.batch.len() >= limit || !self.lifecycle.is_serving() {
                break;
            }
            let Unfinished { high, low, .. } = &self.unfinished;
            let Some((priority, frame)) = self.queues.try_next(high.is_some(), low.is_some(), self.context.answered)
            else {
                return self.report_drained() || progress;
            };
            match frame {
                Some(frame) => self.send(frame, FrameKind::Push(priority)),
                None => self.send_next_part(FrameKind::Push(priority)),
            }
            progress = true;
            if self.codec.is_closed() {
                // The frame was a close frame, and nothing can be sent after it.
                break;
            }
        }
        // There may be more frames, and `take_ready` has cleared the flag.
        self.queues.outbox().set_ready();
        progress
    }

    /// Notifies the protocol if the outbox is drained. Returns whether it was, because the hook may push.
    fn report_drained(&mut self) -> bool {
        let is_drained = self.queues.outbox().take_drained();
        if is_drained {
            self.shared.protocol.on_drained(&mut self.context);
        }
        is_drained
    }

    /// Encodes replies that are ready. Returns whether there were any.
    fn gather_replies(&mut self, context: &mut Context<'_>) -> bool {
        let limit = self.batch_limit(P::ORDER == ServiceOrder::RepliesFirst && self.queues.outbox().is_ready());
        let mut progress = false;
        for _ in 0..MAX_FRAMES_PER_TURN {
            if progress && self.batch.len() >= limit || !self.lifecycle.is_serving() {
                break;
            }
            if self.unfinished.reply.is_some() {
                self.send_next_part(FrameKind::Reply);
                progress = true;
                continue;
            }
            let Poll::Ready(Some(step)) = self.replies.poll_next(context, self.codec.is_closing()) else { break };
            progress = true;
            match step {
                ReplyStep::Frame(frame) => self.send(frame, FrameKind::Reply),
                ReplyStep::InTurn(closure) => self.call_in_turn(closure),
                ReplyStep::End => self.end_request(),
                ReplyStep::Panicked => self.answer_panic(),
                ReplyStep::Close(None) => {
                    self.end_request();
                    self.close(CloseReason::Handler);
                }
                ReplyStep::Close(Some(frame)) => {
                    self.send_whole(frame);
                    self.end_request();
                    self.close_silently(CloseReason::Handler);
                }
                ReplyStep::Failed(error) => self.close(CloseReason::Protocol(error)),
            }
        }
        progress
    }
}

impl<P: Protocol, S> Actor<P, S> {
    /// Records the bytes that the connection holds in its account.
    fn record(&mut self, held: usize) {
        let steps = u32::try_from(held / STEP_BYTES).unwrap_or(u32::MAX);
        if steps != self.recorded_steps {
            let before = std::mem::replace(&mut self.recorded_steps, steps);
            let bytes = |steps: u32| (steps as usize * STEP_BYTES).cast_signed();
            self.context.change_account(bytes(steps) - bytes(before));
        }
    }

    /// Drops pushes that were encoded in part, and counts them as unsent.
    fn drop_unfinished(&mut self) {
        let Unfinished { high, low, .. } = &mut self.unfinished;
        for unfinished in [high.take(), low.take()].into_iter().flatten() {
            self.queues.outbox().count_unsent(unfinished.0);
        }
    }

    /// Ends the connection, and notifies the protocol once.
    fn end(&mut self, reason: &CloseReason<P>, linger: Option<Linger>) {
        self.queues.outbox().close();
        self.drop_unfinished();
        if !self.lifecycle.end(linger) {
            return;
        }
        let Self { shared, context, .. } = self;
        shared.counts.count_ended(reason.label());
        context.add_traffic_to(&shared.counts.traffic);
        tracing::debug!(connection = %context.id(), %reason, "connection ended");
        if catch_unwind(AssertUnwindSafe(|| shared.protocol.on_connection_closed(reason, context))).is_err() {
            tracing::error!(connection = %context.id(), "on_connection_closed panicked");
        }
    }
}

impl<P: Protocol, S> Drop for Actor<P, S> {
    /// Ends a connection whose task was aborted.
    fn drop(&mut self) {
        self.record(0);
        self.end(&CloseReason::Dropped, None);
        // A waker keeps the whole task alive, and a handle may live longer than the connection.
        self.queues.mailbox.set_waker(None);
        if let Some(alarm) = self.alarm {
            self.shared.alarms.cancel(self.context.id(), alarm);
        }
    }
}
