//! The actor of one connection: it owns the socket for life, and reads and writes it in one task.
//!
//! # The path of a frame
//!
//! 1. The supervisor admits the connection with a permit. Its actor runs after the TLS or WebSocket handshake, if there is one
//!    (`tls.rs`, `websocket/`).
//! 2. The actor reads into a buffer that all connections of a thread share, so an idle connection holds no buffer.
//! 3. The codec takes a whole frame out of the input. The body is split off, not copied.
//! 4. The application's [`Protocol`] answers with frames, or with a future or stream that the actor polls. `replies` keeps the
//!    replies in the order of the requests.
//! 5. The outbox takes the frames that other tasks push (`outbox/`, `push.rs`).
//! 6. The actor gathers pushes and replies into one batch, writes it, and flushes once (`sending`, `batch.rs`).
//! 7. When there is nothing to do, the actor rests (`resting`): it releases its buffers, and sets an alarm if it waits for the
//!    peer (`alarms.rs`, `timeouts.rs`).
//!
//! # Fairness
//!
//! Pushes, replies and input are served in the order that the protocol chooses. Each has a share of every turn that began with
//! room in the batch: while others wait, pushes or replies that come first fill at most three quarters of it, and every kind gets
//! at least one frame. So a high-priority push waits for one batch at most, and a flood of one kind does not stop the others.
//!
//! A peer that does not read fills the batch. Then the actor takes nothing from the outbox, whose pushers wait, and handles no
//! request. It still decodes input, up to the read-ahead limit: a frame that only shows that the peer is alive is reported to the
//! protocol ([`Protocol::on_waiting`]), and the other frames wait. The codec's control frames are encoded when the batch has room
//! again.
//!
//! # Timeouts
//!
//! Timeouts are checked only after an alarm, because by then the runtime has polled the sockets and input that has arrived counts
//! first. Ticks are the exception: a connection that never rests runs them when it yields to other tasks.

mod parked;
mod replies;
mod resting;
mod sending;

use std::cell::Cell;
use std::io;
use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll, Waker};

use bytes::BytesMut;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Instant;

use self::parked::Parked;
use self::replies::{Replies, Step};
use self::resting::Parting;
use self::sending::{Source, Unfinished};
use crate::batch::Batch;
use crate::memory::STEP_BYTES;
use crate::protocol::ReplyInTurn;
use crate::push::PushQueues;
use crate::supervisor::{Phase, Shared};
use crate::timeouts::Watch;
use crate::{CloseReason, Codec, ConnectionContext, FrameLike, Protocol, Reply, ServiceOrder};

/// How much is read at a time, into a buffer that all connections of a thread share: an idle connection holds none.
const READ: usize = 16 * 1024;
/// After so many turns other tasks have theirs.
const TURNS: usize = 16;
/// And after so many batches: a peer that reads as fast as it is written to must not keep the thread for itself.
const BATCHES: u64 = 4;
/// So many frames of a kind are gathered in a turn at most, in case they have no bytes.
const FRAMES: usize = 4096;

/// What a codec adds to a small frame, or somewhat more.
const OVERHEAD: usize = 8;

thread_local! {
    /// Taken while it is used: a socket may run another connection when it is read.
    static SCRATCH: Cell<Option<Box<[u8]>>> = const { Cell::new(None) };
}

/// What bounds an actor.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// How many bytes are gathered before they are written.
    pub(crate) batch: usize,
    /// How many bytes are read ahead of the requests that are being handled.
    pub(crate) read_ahead: usize,
    /// How many requests are handled at once.
    pub(crate) in_flight: usize,
    /// How many bytes of replies may be ready before their turn. Above it no further request is handled.
    pub(crate) ready_bytes: usize,
}

pub(crate) struct Actor<P: Protocol, S> {
    socket: S,
    shared: Arc<Shared<P>>,
    codec: P::Codec,
    context: ConnectionContext,
    queues: PushQueues<P::Frame>,
    input: BytesMut,
    batch: Batch,
    /// Whole frames that wait until their requests may be handled.
    parked: Parked<P::Frame>,
    replies: Replies<P>,
    unfinished: Unfinished<P::Frame>,
    watch: Watch,
    /// For when an alarm is set.
    alarm: Option<Instant>,
    /// Whom the outbox wakes.
    waker: Option<Waker>,
    /// Nothing more is decoded, and when all that was asked is answered the connection ends for this reason.
    failed: Option<Box<CloseReason<P>>>,
    /// Nothing more is read or handled, and when all is written the connection ends for this reason.
    ending: Option<Box<CloseReason<P>>>,
    /// How much of a shutdown it has seen.
    phase: Phase,
    /// What it still has is written, and then it ends.
    leaving: Option<Leaving>,
    state: State,
    /// What it holds, as recorded in its account, in multiples of [`STEP_BYTES`].
    recorded_steps: u32,
    /// The connection has ended, and its stream has yet to.
    parting: Option<Box<Parting>>,
}

#[derive(Debug, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own, and all combinations occur")]
struct State {
    /// The peer sends nothing more.
    heard_out: bool,
    unflushed: bool,
    /// Whole frames may be left in the input.
    backlog: bool,
    /// The protocol knows of the connection, and not yet of its end.
    begun: bool,
    /// The peer has yet to be told of a shutdown.
    owes_notice: bool,
    /// It ends, and the peer is not waited for.
    given_up: bool,
    /// It has let others run before it because the memory limit is exceeded.
    has_yielded: bool,
}

/// On whose account a connection ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Leaving {
    /// The server shuts down: what has been read is still answered.
    Shutdown,
    /// Somebody closed it by a handle.
    Handle,
}

/// Whether a step got anywhere.
type Progress<P> = Result<bool, CloseReason<P>>;

impl<P: Protocol, S: AsyncRead + AsyncWrite + Unpin> Actor<P, S> {
    pub(crate) fn new(
        socket: S,
        already_read: &[u8],
        shared: Arc<Shared<P>>,
        codec: P::Codec,
        mut context: ConnectionContext,
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
            input: BytesMut::from(already_read),
            batch: Batch::default(),
            parked: Parked::default(),
            replies: Replies::new(),
            unfinished: Unfinished::default(),
            watch,
            alarm: None,
            waker: None,
            failed: None,
            ending: None,
            phase: Phase::Open,
            leaving: None,
            state: State::default(),
            recorded_steps: 0,
            parting: None,
        }
    }

    /// Runs the connection to its end. The protocol is told exactly once, however it ends.
    ///
    /// No `async fn`, since its future would have room for the actor twice.
    pub(crate) fn poll_run(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if self.parting.is_none() {
            let reason = match self.set_up() {
                Ok(()) => {
                    let polled = catch_unwind(AssertUnwindSafe(|| self.poll(context)));
                    match polled.unwrap_or(Poll::Ready(CloseReason::Panic)) {
                        Poll::Ready(reason) => reason,
                        Poll::Pending => {
                            self.record_held();
                            return Poll::Pending;
                        }
                    }
                }
                Err(reason) => reason,
            };
            self.end_serving(&reason);
            if matches!(reason, CloseReason::Io(_)) {
                return Poll::Ready(());
            }
            self.part();
        }
        self.poll_linger(context)
    }

    /// Tells the protocol, unless it knows.
    fn set_up(&mut self) -> Result<(), CloseReason<P>> {
        if std::mem::replace(&mut self.state.begun, true) {
            return Ok(());
        }
        let setup = catch_unwind(AssertUnwindSafe(|| {
            let handle = self.queues.handle();
            self.shared.protocol.on_connection_setup(handle, &mut self.context);
            for frame in self.shared.protocol.greeting(&mut self.context) {
                self.send_whole(frame);
            }
        }));
        setup.map_err(|_| CloseReason::Panic)
    }

    fn end_serving(&mut self, reason: &CloseReason<P>) {
        self.queues.outbox().close();
        self.lose_unfinished();
        self.tell_end(reason);
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<CloseReason<P>> {
        self.register(context);
        // Connections that are being closed run first, and release what they hold. Once, so that no connection waits for another.
        self.state.has_yielded =
            !self.state.has_yielded && self.context.is_memory_exceeded() && !self.queues.mailbox.has_signals();
        if self.state.has_yielded {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        if self.replies.len() > 1 {
            self.replies.poll_ahead(context);
        }
        let written = self.context.counters.bytes_out;
        for _ in 0..TURNS {
            if self.context.counters.bytes_out - written > BATCHES * self.shared.limits.batch as u64 {
                break;
            }
            let phase = self.shared.phase.get();
            if phase == Phase::Aborted {
                return Poll::Ready(self.ending.take().map_or(CloseReason::Shutdown, |reason| *reason));
            }
            if phase > self.phase {
                self.enter(phase);
            }
            if self.queues.mailbox.has_signals()
                && let Some(reason) = self.heed_signals()
            {
                return Poll::Ready(reason);
            }
            let moved = match self.turn(context) {
                Ok(false) => self.rest(),
                moved => moved,
            };
            match moved {
                // That its last words could not be written is not why it ends.
                Err(reason) => return Poll::Ready(self.ending.take().map_or(reason, |ending| *ending)),
                Ok(false) => return Poll::Pending,
                Ok(true) => {}
            }
            if self.is_written()
                && let Some(reason) = self.ending.take()
            {
                return Poll::Ready(*reason);
            }
            if self.context.is_memory_exceeded() {
                break;
            }
        }
        if self.context.tick.is_some() {
            self.tick_unrested();
        }
        context.waker().wake_by_ref();
        Poll::Pending
    }

    /// Seldom another one than before, so it costs a comparison.
    fn register(&mut self, context: &Context<'_>) {
        if self.waker.as_ref().is_none_or(|waker| !waker.will_wake(context.waker())) {
            self.queues.mailbox.set_waker(Some(context.waker().clone()));
            self.waker = Some(context.waker().clone());
        }
    }

    /// A handle has closed the connection, or asks for the protocol's hook; or the memory limit closes it. Returns why it ends, if
    /// it ends at once.
    #[cold]
    fn heed_signals(&mut self) -> Option<CloseReason<P>> {
        if self.queues.mailbox.take_over_limit() {
            if !self.is_written() || self.ending.is_some() {
                // A frame may be written in part, so nothing can follow it.
                return Some(self.ending.take().map_or(CloseReason::MemoryLimit, |reason| *reason));
            }
            self.end(CloseReason::MemoryLimit);
            self.release();
        }
        if self.queues.mailbox.is_close_requested() && self.leaving.replace(Leaving::Handle) != Some(Leaving::Handle) {
            self.replies.clear();
        }
        if self.queues.mailbox.take_wake_request() && self.ending.is_none() {
            // This turn looks at the outbox in any case, or the first with room does: a push from the hook need not wake this task.
            self.queues.outbox().set_ready();
            self.shared.protocol.on_wake(&mut self.context);
        }
        None
    }

    /// Drops all that waits to be handled or encoded. The connection is ending.
    fn release(&mut self) {
        self.input = BytesMut::new();
        self.parked.clear();
        self.replies.clear();
        self.queues.outbox().close();
        self.lose_unfinished();
        self.unfinished.reply = None;
    }

    /// Records in its account what the connection holds, beside the outbox.
    fn record_held(&mut self) {
        let held = self.input.capacity()
            + self.codec.held_bytes()
            + self.parked.bytes()
            + self.replies.ready_bytes()
            + self.unfinished.held_bytes()
            + self.batch.held_bytes();
        self.record(held);
    }

    /// A shutdown has come further.
    fn enter(&mut self, phase: Phase) {
        self.state.owes_notice |= self.phase == Phase::Open;
        self.phase = phase;
        if phase == Phase::Closing {
            self.context.set_closing();
            self.queues.outbox().refuse();
            self.leaving.get_or_insert(Leaving::Shutdown);
        }
    }

    /// Nothing more is handled or gathered; what is gathered is written, and a last word.
    fn end(&mut self, reason: CloseReason<P>) {
        if self.ending.is_none()
            && !matches!(reason, CloseReason::Peer)
            && let Some(frame) = self.shared.protocol.last_word(&reason, &mut self.context)
        {
            self.send_whole(frame);
        }
        self.end_silently(reason);
    }

    /// The last word has been said.
    fn end_silently(&mut self, reason: CloseReason<P>) {
        self.replies.clear();
        self.ending.get_or_insert_with(|| Box::new(reason));
    }

    fn is_written(&self) -> bool {
        self.batch.is_empty() && !self.state.unflushed
    }

    fn turn(&mut self, context: &mut Context<'_>) -> Progress<P> {
        let room = self.batch.len() < self.shared.limits.batch;
        let mut progress = false;
        if room && self.ending.is_none() {
            if P::HOLD_PUSHES || P::ORDER == ServiceOrder::RepliesFirst {
                progress |= self.gather_replies(context);
                progress |= self.give_notice();
                progress |= self.gather_pushes();
            } else {
                progress |= self.give_notice();
                progress |= self.gather_pushes();
                progress |= self.gather_replies(context);
            }
            progress |= self.handle_input(context, true);
            progress |= self.is_finished();
        } else if self.state.backlog && self.ending.is_none() {
            progress |= self.handle_input(context, false);
        }
        match self.write(context) {
            Ok(written) => progress |= written,
            Err(reason) => {
                if P::HEAR_OUT {
                    self.hear_out(context);
                }
                return Err(reason);
            }
        }
        let has_read = self.read(context)?;
        progress |= has_read;
        if progress && !has_read && room && self.is_quiet() {
            // Another turn would find nothing, and whatever comes now wakes the actor.
            return Ok(false);
        }
        // An end with nothing left to write is an end now.
        Ok(progress || self.ending.is_some() && self.is_written())
    }

    /// Whether all is done that can be done before something comes. Of what may be left in the input no frame is whole.
    fn is_quiet(&self) -> bool {
        let State { heard_out, backlog, owes_notice, .. } = self.state;
        let has_nothing = !backlog && !owes_notice && self.replies.is_empty() && self.parked.is_empty();
        let goes_on = !heard_out && self.leaving.is_none() && self.failed.is_none() && self.ending.is_none();
        has_nothing && goes_on && !self.codec.is_leaving() && !self.queues.outbox().is_ready() && self.is_written()
    }

    /// Whether replies must not be interrupted, and one is on its way.
    fn holds(&self) -> bool {
        P::HOLD_PUSHES && !self.replies.is_empty()
    }

    fn give_notice(&mut self) -> bool {
        if !self.state.owes_notice || self.holds() || self.ending.is_some() {
            return false;
        }
        self.state.owes_notice = false;
        if let Some(frame) = self.shared.protocol.on_shutdown(self.shared.grace(), &mut self.context) {
            self.send_whole(frame);
        }
        true
    }

    /// Nothing can be written any more. What has arrived is handled all the same.
    fn hear_out(&mut self, context: &mut Context<'_>) {
        while self.input.len() < self.shared.limits.read_ahead
            && matches!(self.poll_read(context), Poll::Ready(Ok(1..)))
        {}
        self.batch.clear();
        self.handle_input(context, true);
    }

    /// Whether there is nothing left to do: for a peer that has left, a server that shuts down, a codec that is done.
    fn is_finished(&mut self) -> bool {
        if self.ending.is_some() {
            return true;
        }
        let is_answered = self.replies.is_empty() && self.parked.is_empty() && self.unfinished.reply.is_none();
        if is_answered && let Some(reason) = self.failed.take() {
            self.end(*reason);
            self.codec.control(&mut self.batch, true);
            return true;
        }
        let peer_left = self.codec.is_leaving();
        if peer_left && is_answered {
            self.codec.control(&mut self.batch, true);
        }
        if self.codec.is_over() {
            self.end_silently(if peer_left { CloseReason::Peer } else { CloseReason::Handle });
            return true;
        }
        if self.leaving.is_none() && !self.state.heard_out {
            return false;
        }
        let is_handled = self.leaving == Some(Leaving::Handle) && self.unfinished.reply.is_none()
            || is_answered && !self.state.backlog;
        if !is_handled || self.queues.outbox().is_ready() {
            return false;
        }
        match (self.leaving, self.queues.outbox().take_last()) {
            (Some(Leaving::Handle), Some(last)) => {
                self.send_whole(last);
                self.end_silently(CloseReason::Handle);
            }
            (Some(Leaving::Handle), None) => self.end(CloseReason::Handle),
            (Some(Leaving::Shutdown), _) => self.end(CloseReason::Shutdown),
            (None, _) if self.state.heard_out => {
                // All that it sent has been handled; what is left is no whole frame.
                let reason = self.codec.finish(&self.input).map_or_else(CloseReason::Decode, |()| CloseReason::Peer);
                self.end(reason);
            }
            (None, _) => {}
        }
        self.ending.is_some()
    }

    /// How many bytes the kind that is served first may fill of a batch.
    fn share(&self, others_wait: bool) -> usize {
        let batch = self.shared.limits.batch;
        if others_wait { batch / 4 * 3 } else { batch }
    }

    /// Whether there was anything. A connection to which nobody pushes pays for a look at a flag.
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
        if self.ending.is_some() || self.holds() || !self.queues.outbox().take_ready() {
            return false;
        }
        let limit = self.share(!self.replies.is_empty() || !self.input.is_empty());
        let (frames, bytes) = self.queues.outbox().in_lanes();
        // So that it need not grow step by step. Larger frames are seldom copied.
        if frames > 1 && bytes / frames < Batch::SHARE_FROM {
            self.batch.reserve((bytes + frames * OVERHEAD).min(limit));
        }
        let mut progress = false;
        for _ in 0..FRAMES {
            if progress && self.batch.len() >= limit || self.ending.is_some() {
                break;
            }
            let Unfinished { high, low, .. } = &self.unfinished;
            let Some((priority, frame)) = self.queues.try_next(high.is_some(), low.is_some(), self.context.answered)
            else {
                return self.tell_drained() || progress;
            };
            match frame {
                Some(frame) => self.send(frame, Source::Push(priority)),
                None => self.send_next_part(Source::Push(priority)),
            }
            progress = true;
            if self.codec.is_over() {
                // It ended the conversation, and what is behind it cannot be sent.
                break;
            }
        }
        // There may be more, for which the flag has been lowered.
        self.queues.outbox().set_ready();
        progress
    }

    /// Nothing is left to take, unless it waits for a reply. Whoever is told may push, and then there is another turn.
    fn tell_drained(&mut self) -> bool {
        let is_drained = self.queues.outbox().take_drained();
        if is_drained {
            self.shared.protocol.on_drained(&mut self.context);
        }
        is_drained
    }

    fn gather_replies(&mut self, context: &mut Context<'_>) -> bool {
        let limit = self.share(P::ORDER == ServiceOrder::RepliesFirst && self.queues.outbox().is_ready());
        let mut progress = false;
        for _ in 0..FRAMES {
            if progress && self.batch.len() >= limit || self.ending.is_some() {
                break;
            }
            if self.unfinished.reply.is_some() {
                self.send_next_part(Source::Reply);
                progress = true;
                continue;
            }
            let Poll::Ready(Some(step)) = self.replies.poll_next(context, self.codec.is_leaving()) else { break };
            progress = true;
            match step {
                Step::Frame(frame) => self.send(frame, Source::Reply),
                Step::Decide(decide) => self.decide(decide),
                Step::End => self.command_end(),
                Step::Panicked => self.answer_panic(),
                Step::Close(None) => {
                    self.command_end();
                    self.end(CloseReason::Handler);
                }
                Step::Close(Some(frame)) => {
                    self.send_whole(frame);
                    self.command_end();
                    self.end_silently(CloseReason::Handler);
                }
                // What came before it is written.
                Step::Failed(error) => self.end(CloseReason::Protocol(error)),
            }
        }
        progress
    }

    /// Decodes the input. Handles the frames while the batch `has_room`; otherwise they wait, and nothing is added to the batch.
    fn handle_input(&mut self, context: &mut Context<'_>, has_room: bool) -> bool {
        let mut progress = false;
        self.state.backlog = !self.input.is_empty();
        if has_room {
            // For frames that were decoded while it had none.
            self.codec.control(&mut self.batch, false);
        }
        loop {
            if has_room && !self.parked.is_empty() {
                while self.may_handle(!progress)
                    && let Some(frame) = self.parked.pop()
                {
                    progress = true;
                    self.handle(frame, context);
                }
            }
            if !self.may_decode(!progress || !has_room) {
                break;
            }
            if let Some(limit) = self.context.input_limit {
                // The frame before this one may have changed it.
                self.codec.set_max_frame(limit.get());
            }
            let length = self.input.len();
            match self.codec.decode(&mut self.input) {
                Ok(None) => {
                    self.state.backlog = false;
                    if self.input.len() < length {
                        // It was a frame all the same, for the codec itself.
                        self.watch.frame = None;
                    }
                }
                Ok(Some(frame)) => {
                    progress = true;
                    self.context.counters.frames_in += 1;
                    self.watch.first_frame = false;
                    self.watch.frame = None;
                    if has_room && self.parked.is_empty() && self.may_handle(true) {
                        self.handle(frame, context);
                    } else if self.shared.protocol.on_waiting(&frame, &mut self.context) {
                        self.parked.note_consumed(frame.size());
                    } else {
                        self.parked.push(frame);
                    }
                }
                Err(error) => {
                    // What was asked before is answered.
                    progress = true;
                    self.failed = Some(Box::new(CloseReason::Decode(error)));
                }
            }
            if has_room {
                self.codec.control(&mut self.batch, false);
            }
            if self.codec.is_leaving() {
                progress = true;
            }
            if !self.state.backlog {
                break;
            }
        }
        self.state.backlog &= !self.input.is_empty();
        progress
    }

    /// Whether there may be a whole frame in the input, and it may be decoded: at once, or if the batch has room.
    fn may_decode(&self, at_once: bool) -> bool {
        let batch = self.shared.limits.batch;
        !self.input.is_empty()
            && self.ending.is_none()
            && self.failed.is_none()
            && self.leaving != Some(Leaving::Handle)
            && !self.codec.is_leaving()
            && self.parked.bytes() < self.read_ahead()
            && (at_once || self.batch.len() < batch)
    }

    /// Whether another request may be handled.
    fn may_handle(&self, is_first: bool) -> bool {
        let Limits { batch, in_flight, ready_bytes, .. } = self.shared.limits;
        self.ending.is_none()
            && self.leaving != Some(Leaving::Handle)
            && self.replies.len() < in_flight
            && self.replies.ready_bytes() <= ready_bytes
            && !self.replies.is_last()
            && (is_first || self.batch.len() < batch)
            // The pushes that are held have their turn before the next request.
            && !(self.holds() && self.queues.outbox().is_ready())
    }

    fn handle(&mut self, frame: P::Frame, context: &mut Context<'_>) {
        self.context.requests += 1;
        let Self { shared, context: own, .. } = self;
        match catch_unwind(AssertUnwindSafe(|| shared.protocol.on_frame(frame, own))) {
            Err(_) => self.replies.push_panicked(),
            Ok(Reply::None) if self.replies.is_empty() => self.command_end(),
            Ok(Reply::Frame(frame)) if self.replies.is_empty() => {
                self.send(frame, Source::Reply);
                if self.unfinished.reply.is_some() {
                    self.replies.push(Reply::None, context);
                } else {
                    self.command_end();
                }
            }
            Ok(reply) => self.replies.push(reply, context),
        }
        if self.replies.len() == 1 {
            // It may be there already, and then the next request goes into the same batch.
            self.gather_replies(context);
        }
    }

    /// All before it is answered. What came after it has not been handled, unless a future gave it.
    #[cold]
    fn decide(&mut self, decide: ReplyInTurn<P::Frame, P::ProtocolError>) {
        let requests = std::mem::replace(&mut self.context.requests, self.context.answered + 1);
        let own = &mut self.context;
        let decided = catch_unwind(AssertUnwindSafe(|| decide(own)));
        self.context.requests = requests;
        self.replies.decided(decided.ok());
    }

    fn answer_panic(&mut self) {
        self.shared.counts.panics.fetch_add(1, Relaxed);
        tracing::error!(connection = %self.context.id(), "the handler of a request panicked");
        match self.shared.protocol.on_panic(&mut self.context) {
            Some(frame) => self.send(frame, Source::Reply),
            None => self.end(CloseReason::Panic),
        }
    }

    fn command_end(&mut self) {
        self.context.answered += 1;
        self.queues.outbox().release(self.context.answered);
        self.shared.protocol.on_command_end(&mut self.context);
    }

    fn read(&mut self, context: &mut Context<'_>) -> Progress<P> {
        if !self.is_listening() {
            return Ok(false);
        }
        match self.poll_read(context) {
            Poll::Pending => Ok(false),
            Poll::Ready(Err(error)) => Err(CloseReason::Io(error)),
            Poll::Ready(Ok(length)) => {
                self.context.counters.bytes_in += length as u64;
                self.state.heard_out = length == 0;
                // Whether there is a whole frame in it is seen when there is room for its reply.
                self.state.backlog |= length > 0;
                if self.shared.timeouts.needs_hearing() {
                    self.watch.heard = Instant::now();
                }
                Ok(true)
            }
        }
    }

    /// Whether there is reason to read. What is read ahead of unfinished replies, of a peer that does not read, or of requests
    /// whose replies fill batch after batch, is limited. A frame that is not whole may be longer, as far as its codec allows.
    fn is_listening(&self) -> bool {
        let Limits { batch, in_flight, .. } = self.shared.limits;
        let waiting = self.state.backlog || self.replies.len() >= in_flight || self.batch.len() >= batch;
        let has_enough = waiting && self.input.len() + self.parked.bytes() >= self.read_ahead();
        let hears = !self.state.heard_out && self.failed.is_none() && !self.codec.is_leaving();
        hears && self.ending.is_none() && self.leaving.is_none() && !has_enough
    }

    /// How many bytes are read ahead of the requests that are being handled.
    fn read_ahead(&self) -> usize {
        let own = self.context.input_limit.map_or(usize::MAX, NonZeroUsize::get);
        self.shared.limits.read_ahead.min(own)
    }

    fn poll_read(&mut self, context: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let mut scratch = SCRATCH.take().unwrap_or_else(|| vec![0; READ].into_boxed_slice());
        let mut buffer = ReadBuf::new(&mut scratch);
        let polled = Pin::new(&mut self.socket).poll_read(context, &mut buffer);
        let length = buffer.filled().len();
        self.input.extend_from_slice(buffer.filled());
        SCRATCH.set(Some(scratch));
        polled.map_ok(|()| length)
    }
}

impl<P: Protocol, S> Actor<P, S> {
    /// Records in its account that it holds so much.
    fn record(&mut self, held: usize) {
        let steps = u32::try_from(held / STEP_BYTES).unwrap_or(u32::MAX);
        if steps != self.recorded_steps {
            let before = std::mem::replace(&mut self.recorded_steps, steps);
            let bytes = |steps: u32| (steps as usize * STEP_BYTES).cast_signed();
            self.context.change_account(bytes(steps) - bytes(before));
        }
    }

    /// Pushes that were written in part are lost.
    fn lose_unfinished(&mut self) {
        let Unfinished { high, low, .. } = &mut self.unfinished;
        for unfinished in [high.take(), low.take()].into_iter().flatten() {
            self.queues.outbox().lose(unfinished.0);
        }
    }

    fn tell_end(&mut self, reason: &CloseReason<P>) {
        let Self { shared, context, state, .. } = self;
        if !std::mem::take(&mut state.begun) {
            return;
        }
        shared.counts.ended(reason.label());
        context.settle(&shared.counts.traffic);
        tracing::debug!(connection = %context.id(), %reason, "a connection has ended");
        if catch_unwind(AssertUnwindSafe(|| shared.protocol.on_connection_closed(reason, context))).is_err() {
            tracing::error!(connection = %context.id(), "on_connection_closed panicked");
        }
    }
}

impl<P: Protocol, S> Drop for Actor<P, S> {
    /// Whoever ran the connection may stop, or be stopped.
    fn drop(&mut self) {
        self.queues.outbox().close();
        self.lose_unfinished();
        self.record(0);
        self.tell_end(&CloseReason::Dropped);
        // The waker is the whole task, and a handle may be kept for long.
        self.queues.mailbox.set_waker(None);
        if let Some(alarm) = self.alarm {
            self.shared.alarms.cancel(self.context.id(), alarm);
        }
    }
}
