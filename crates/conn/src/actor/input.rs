//! Reading from the socket, decoding frames, and handling requests.

use std::cell::Cell;
use std::io;
use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll};

use bytes::BytesMut;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Instant;

use super::parked::Parked;
use super::sending::FrameKind;
use super::{Actor, Limits, Progress};
use crate::codec::Codec;
use crate::protocol::ReplyInTurn;
use crate::{CloseReason, FrameLike, Protocol, Reply};

/// The size of the read buffer. All connections of a thread share one, so an idle connection has none.
const READ_BUFFER_BYTES: usize = 16 * 1024;

thread_local! {
    /// `None` while it is in use. Reading a socket may run another connection, which then allocates its own buffer.
    static READ_BUFFER: Cell<Option<Box<[u8]>>> = const { Cell::new(None) };
}

/// Input that was read and not yet handled.
pub(super) struct Input<F> {
    /// Bytes that are not decoded.
    pub(super) bytes: BytesMut,
    /// Frames that wait until their requests may be handled.
    pub(super) parked: Parked<F>,
    /// The peer has closed its side.
    pub(super) has_ended: bool,
    /// The bytes may contain a complete frame. If false, decoding waits for more bytes.
    pub(super) may_have_frame: bool,
}

impl<F: FrameLike> Input<F> {
    pub(super) fn new(already_read: &[u8]) -> Self {
        let bytes = BytesMut::from(already_read);
        Self { bytes, parked: Parked::default(), has_ended: false, may_have_frame: false }
    }

    /// Reads from the socket, up to the size of the read buffer. Returns the number of bytes.
    pub(super) fn poll_read(
        &mut self,
        socket: &mut (impl AsyncRead + Unpin),
        context: &mut Context<'_>,
    ) -> Poll<io::Result<usize>> {
        let mut scratch = READ_BUFFER.take().unwrap_or_else(|| vec![0; READ_BUFFER_BYTES].into_boxed_slice());
        let mut buffer = ReadBuf::new(&mut scratch);
        let polled = Pin::new(socket).poll_read(context, &mut buffer);
        let length = buffer.filled().len();
        self.bytes.extend_from_slice(buffer.filled());
        READ_BUFFER.set(Some(scratch));
        polled.map_ok(|()| length)
    }

    /// Drops everything that is not handled.
    pub(super) fn clear(&mut self) {
        self.bytes = BytesMut::new();
        self.parked.clear();
    }
}

impl<P: Protocol, S: AsyncRead + AsyncWrite + Unpin> Actor<P, S> {
    pub(super) fn read(&mut self, context: &mut Context<'_>) -> Progress<P> {
        if !self.may_read_more() {
            return Ok(false);
        }
        match self.input.poll_read(&mut self.socket, context) {
            Poll::Pending => Ok(false),
            Poll::Ready(Err(error)) => Err(CloseReason::Io(error)),
            Poll::Ready(Ok(length)) => {
                self.context.counters.bytes_in += length as u64;
                self.input.has_ended = length == 0;
                self.input.may_have_frame |= length > 0;
                if self.shared.timeouts.needs_last_input() {
                    self.watch.last_input = Instant::now();
                }
                Ok(true)
            }
        }
    }

    /// Whether to read. The read-ahead limit applies while frames wait, because requests are in flight or the peer does not read. A
    /// single frame may be longer, up to the limit of its codec.
    pub(super) fn may_read_more(&self) -> bool {
        let Limits { batch_bytes, max_in_flight, .. } = self.shared.limits;
        let Input { bytes, parked, has_ended, may_have_frame } = &self.input;
        let is_waiting = *may_have_frame || self.replies.len() >= max_in_flight || self.batch.len() >= batch_bytes;
        let has_enough = is_waiting && bytes.len() + parked.bytes() >= self.read_ahead_limit();
        !has_ended && !has_enough && self.lifecycle.may_read() && !self.codec.is_closing()
    }

    /// Returns the limit of bytes that are read ahead of the requests that are being handled.
    fn read_ahead_limit(&self) -> usize {
        let own = self.context.input_limit.map_or(usize::MAX, NonZeroUsize::get);
        self.shared.limits.read_ahead_bytes.min(own)
    }

    /// Reads and handles the input that arrived before a write error.
    pub(super) fn handle_remaining_input(&mut self, context: &mut Context<'_>) {
        while self.input.bytes.len() < self.shared.limits.read_ahead_bytes
            && matches!(self.input.poll_read(&mut self.socket, context), Poll::Ready(Ok(1..)))
        {}
        self.batch.clear();
        self.handle_input(context, true);
    }

    /// Decodes the input, and handles the frames. If `has_capacity` is false, the batch is full: the frames wait, and nothing is added
    /// to the batch.
    pub(super) fn handle_input(&mut self, context: &mut Context<'_>, has_capacity: bool) -> bool {
        let mut progress = false;
        self.input.may_have_frame = !self.input.bytes.is_empty();
        if has_capacity {
            // The control frames for input that was decoded while the batch was full.
            self.codec.encode_control(&mut self.batch, false);
        }
        loop {
            if has_capacity && !self.input.parked.is_empty() {
                while self.may_handle(!progress)
                    && let Some(frame) = self.input.parked.pop()
                {
                    progress = true;
                    self.handle(frame, context);
                }
            }
            if !self.may_decode(!progress || !has_capacity) {
                break;
            }
            if let Some(limit) = self.context.input_limit {
                // The frame before this one may have changed it.
                self.codec.set_max_frame(limit.get());
            }
            let length = self.input.bytes.len();
            match self.codec.decode(&mut self.input.bytes) {
                Ok(None) => {
                    self.input.may_have_frame = false;
                    if self.input.bytes.len() < length {
                        // The codec has consumed a control frame.
                        self.watch.frame_since = None;
                    }
                }
                Ok(Some(frame)) => {
                    progress = true;
                    self.context.counters.frames_in += 1;
                    self.watch.awaits_first_frame = false;
                    self.watch.frame_since = None;
                    if has_capacity && self.input.parked.is_empty() && self.may_handle(true) {
                        self.handle(frame, context);
                    } else if self.shared.protocol.on_waiting(&frame, &mut self.context) {
                        self.input.parked.add_consumed(frame.size());
                    } else {
                        self.input.parked.push(frame);
                    }
                }
                Err(error) => {
                    progress = true;
                    self.lifecycle.stop_decoding(CloseReason::Decode(error));
                }
            }
            if has_capacity {
                self.codec.encode_control(&mut self.batch, false);
            }
            if self.codec.is_closing() {
                progress = true;
            }
            if !self.input.may_have_frame {
                break;
            }
        }
        self.input.may_have_frame &= !self.input.bytes.is_empty();
        progress
    }

    /// Whether a frame may be decoded. The batch must have capacity, unless `even_if_full` is true.
    fn may_decode(&self, even_if_full: bool) -> bool {
        !self.input.bytes.is_empty()
            && self.lifecycle.may_decode()
            && !self.codec.is_closing()
            && self.input.parked.bytes() < self.read_ahead_limit()
            && (even_if_full || self.batch.len() < self.shared.limits.batch_bytes)
    }

    /// Whether another request may be handled. The batch must have capacity, unless `even_if_full` is true.
    fn may_handle(&self, even_if_full: bool) -> bool {
        let Limits { batch_bytes, max_in_flight, ready_reply_bytes, .. } = self.shared.limits;
        self.lifecycle.may_handle()
            && self.replies.len() < max_in_flight
            && self.replies.ready_bytes() <= ready_reply_bytes
            && !self.replies.blocks_requests()
            && (even_if_full || self.batch.len() < batch_bytes)
            // Held pushes are written before the next request is handled.
            && !(self.holds_pushes() && self.queues.outbox().is_ready())
    }

    fn handle(&mut self, frame: P::Frame, context: &mut Context<'_>) {
        self.context.requests += 1;
        let Self { shared, context: connection, .. } = self;
        match catch_unwind(AssertUnwindSafe(|| shared.protocol.on_frame(frame, connection))) {
            Err(_) => self.replies.push_panicked(),
            Ok(Reply::None) if self.replies.is_empty() => self.end_request(),
            Ok(Reply::Frame(frame)) if self.replies.is_empty() => {
                self.send(frame, FrameKind::Reply);
                if self.unfinished.reply.is_some() {
                    self.replies.push(Reply::None, context);
                } else {
                    self.end_request();
                }
            }
            Ok(reply) => self.replies.push(reply, context),
        }
        if self.replies.len() == 1 {
            // If the reply is ready, the next request is handled in the same turn.
            self.gather_replies(context);
        }
    }

    /// Calls the closure of a [`Reply::InTurn`]. All earlier requests have been answered. No later request has been handled, except if a
    /// future returned the `InTurn`, because requests are handled while the future is pending.
    #[cold]
    pub(super) fn call_in_turn(&mut self, closure: ReplyInTurn<P::Frame, P::ProtocolError>) {
        // During the call, `ConnectionContext::ticket` is that of this request.
        let requests = std::mem::replace(&mut self.context.requests, self.context.answered + 1);
        let connection = &mut self.context;
        let result = catch_unwind(AssertUnwindSafe(|| closure(connection)));
        self.context.requests = requests;
        self.replies.resolve_in_turn(result.ok());
    }

    /// Counts a handler that panicked. Replies with [`Protocol::on_panic`], or closes the connection.
    pub(super) fn answer_panic(&mut self) {
        self.shared.counts.panics.fetch_add(1, Relaxed);
        tracing::error!(connection = %self.context.id(), "request handler panicked");
        match self.shared.protocol.on_panic(&mut self.context) {
            Some(frame) => self.send(frame, FrameKind::Reply),
            None => self.close(CloseReason::Panic),
        }
    }

    /// Completes a request after the last frame of its reply has been encoded.
    pub(super) fn end_request(&mut self) {
        self.context.answered += 1;
        self.queues.outbox().release_tied(self.context.answered);
        self.shared.protocol.on_command_end(&mut self.context);
    }
}
