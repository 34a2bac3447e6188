//! The actor of one connection: it owns the socket for life, and reads and writes it in one task.
//!
//! Each turn it gathers what is ready into one batch, writes that, and reads. Order of service: shutdown, urgent pushes, other
//! pushes in their fair share, replies, input. Everything has a bounded share of a turn: pushes fill at most three quarters of
//! a batch while a reply waits, a batch is limited, and input is handled only while there is room for its replies. So an
//! urgent push waits for one batch at most, and a flood of pushes never stops the connection from being read.
//!
//! A peer that does not read fills the batch; then nothing is taken from the outbox, whose pushers wait, and nothing is read.

use std::cell::RefCell;
use std::io::{self, IoSlice};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::BytesMut;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::batch::Batch;
use crate::protocol::{ReplyFuture, ReplyStream};
use crate::push::PushQueues;
use crate::supervisor::{Phase, SharedPhase};
use crate::{CloseReason, Codec, ConnectionContext, Protocol, Reply};

/// How much is read at a time, into a buffer that all connections of a thread share: an idle connection holds none.
const READ: usize = 16 * 1024;
/// How often is read what nobody will handle, when a connection ends: a megabyte's worth.
const PARTING_READS: usize = 64;
/// How many slices one write takes at most.
const SLICES: usize = 32;
/// After so many turns other tasks have theirs.
const TURNS: usize = 16;

thread_local! {
    static SCRATCH: RefCell<Box<[u8]>> = RefCell::new(vec![0; READ].into_boxed_slice());
}

/// What bounds an actor.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// How many bytes are gathered before they are written.
    pub(crate) batch: usize,
    /// How many bytes are read ahead of the request that is being handled.
    pub(crate) read_ahead: usize,
}

#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own, and all combinations occur")]
pub(crate) struct Actor<P: Protocol, S> {
    socket: S,
    protocol: Arc<P>,
    codec: P::Codec,
    context: ConnectionContext,
    queues: PushQueues<P::Frame>,
    phase: Arc<SharedPhase>,
    limits: Limits,
    input: BytesMut,
    batch: Batch,
    reply: Option<Pending<P>>,
    /// The peer sends nothing more.
    heard_out: bool,
    /// Nothing more is read or handled, and when all is written the connection ends for this reason.
    ending: Option<CloseReason<P>>,
    unflushed: bool,
    /// Whole frames may be left in the input.
    backlog: bool,
    /// The protocol knows of the connection, and not yet of its end.
    begun: bool,
}

/// A reply that is not complete.
enum Pending<P: Protocol> {
    Future(ReplyFuture<P::Frame, P::ProtocolError>),
    Stream(ReplyStream<P::Frame, P::ProtocolError>),
}

/// Whether a step got anywhere.
type Progress<P> = Result<bool, CloseReason<P>>;

impl<P: Protocol, S: AsyncRead + AsyncWrite + Unpin> Actor<P, S> {
    pub(crate) fn new(
        socket: S,
        already_read: &[u8],
        protocol: Arc<P>,
        context: ConnectionContext,
        queues: PushQueues<P::Frame>,
        phase: Arc<SharedPhase>,
        limits: Limits,
    ) -> Self {
        let codec = protocol.codec();
        Self {
            socket,
            protocol,
            codec,
            context,
            queues,
            phase,
            limits,
            input: BytesMut::from(already_read),
            batch: Batch::default(),
            reply: None,
            heard_out: false,
            ending: None,
            unflushed: false,
            backlog: false,
            begun: false,
        }
    }

    /// Runs the connection to its end. The protocol is told exactly once, however it ends.
    pub(crate) async fn run(mut self) {
        self.begun = true;
        let setup = catch_unwind(AssertUnwindSafe(|| {
            let handle = self.queues.handle();
            self.protocol.on_connection_setup(handle, &mut self.context);
        }));
        let reason = match setup {
            Ok(()) => {
                std::future::poll_fn(|context| {
                    catch_unwind(AssertUnwindSafe(|| self.poll(context))).unwrap_or(Poll::Ready(CloseReason::Panic))
                })
                .await
            }
            Err(_) => CloseReason::Panic,
        };
        self.tell_end(&reason);
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<CloseReason<P>> {
        self.queues.outbox.register(context.waker());
        for _ in 0..TURNS {
            match self.phase.get() {
                Phase::Open => {}
                Phase::Closing if self.ending.is_some() => {}
                Phase::Closing => {
                    self.reply = None;
                    self.ending = Some(CloseReason::Shutdown);
                }
                Phase::Aborted => return Poll::Ready(CloseReason::Shutdown),
            }
            match self.turn(context) {
                Err(reason) => return Poll::Ready(reason),
                Ok(true) => {}
                Ok(false) => {
                    self.input_at_rest();
                    return Poll::Pending;
                }
            }
            if self.batch.is_empty()
                && !self.unflushed
                && self.reply.is_none()
                && let Some(reason) = self.ending.take()
            {
                self.part(context);
                return Poll::Ready(reason);
            }
        }
        context.waker().wake_by_ref();
        Poll::Pending
    }

    /// Ends the stream in order. A socket that is closed with unread bytes resets, and the peer may lose our last words; so
    /// what has arrived is thrown away, up to a limit, and without waiting for more.
    fn part(&mut self, context: &mut Context<'_>) {
        // Whether it fails or would have to wait, there is nothing more to be done.
        let _ = Pin::new(&mut self.socket).poll_shutdown(context);
        for _ in 0..PARTING_READS {
            self.input.clear();
            if !matches!(self.poll_read(context), Poll::Ready(Ok(1..))) {
                return;
            }
        }
    }

    fn turn(&mut self, context: &mut Context<'_>) -> Progress<P> {
        let mut progress = self.gather_pushes()?;
        progress |= self.gather_reply(context)?;
        progress |= self.handle_input()?;
        if self.heard_out && self.reply.is_none() && self.ending.is_none() && self.batch.len() < self.limits.batch {
            // All that it sent has been handled; what is left is no whole frame.
            self.ending = Some(match self.codec.finish(&self.input) {
                Ok(()) => CloseReason::Peer,
                Err(error) => CloseReason::Decode(error),
            });
            progress = true;
        }
        progress |= self.write(context)?;
        progress |= self.read(context)?;
        // An end with nothing left to write is an end now.
        Ok(progress || self.ending.is_some() && self.batch.is_empty() && !self.unflushed && self.reply.is_none())
    }

    fn gather_pushes(&mut self) -> Progress<P> {
        if self.ending.is_some() {
            return Ok(false);
        }
        let limit = if self.reply.is_some() { (self.limits.batch / 4 * 3).max(1) } else { self.limits.batch };
        if self.batch.len() >= limit {
            return Ok(false);
        }
        if !self.queues.outbox.is_ready() {
            return Ok(false);
        }
        let mut progress = false;
        while self.batch.len() < limit {
            let Some((_, frame)) = self.queues.try_recv() else { return Ok(progress) };
            self.send(frame)?;
            progress = true;
        }
        // There may be more, for which the flag has been lowered.
        self.queues.outbox.remain_ready();
        Ok(progress)
    }

    fn gather_reply(&mut self, context: &mut Context<'_>) -> Progress<P> {
        let mut progress = false;
        while self.batch.len() < self.limits.batch {
            let next = match &mut self.reply {
                None => return Ok(progress),
                Some(Pending::Future(future)) => future.as_mut().poll(context).map(Some),
                Some(Pending::Stream(stream)) => stream.as_mut().poll_next(context),
            };
            let Poll::Ready(next) = next else { return Ok(progress) };
            progress = true;
            let is_last = next.is_none() || matches!(self.reply, Some(Pending::Future(_)));
            match next {
                Some(Ok(frame)) => self.send(frame)?,
                Some(Err(error)) => {
                    // What came before it is written.
                    self.reply = None;
                    self.ending = Some(CloseReason::Protocol(error));
                    return Ok(progress);
                }
                None => {}
            }
            if is_last {
                self.reply = None;
                self.protocol.on_command_end(&mut self.context);
            }
        }
        Ok(progress)
    }

    fn handle_input(&mut self) -> Progress<P> {
        let mut progress = false;
        self.backlog = true;
        while self.reply.is_none()
            && self.ending.is_none()
            && self.batch.len() < self.limits.batch
            && !self.input.is_empty()
        {
            match self.codec.decode(&mut self.input) {
                Ok(None) => {
                    self.backlog = false;
                    break;
                }
                Ok(Some(frame)) => {
                    progress = true;
                    self.context.frames_in += 1;
                    let reply = self.protocol.on_frame(frame, &mut self.context);
                    self.answer(reply)?;
                }
                Err(error) => {
                    if let Some(frame) = self.protocol.on_decode_error(&error, &mut self.context) {
                        self.send(frame)?;
                    }
                    self.ending = Some(CloseReason::Decode(error));
                    progress = true;
                }
            }
            self.codec.control(&mut self.batch);
        }
        self.backlog &= !self.input.is_empty();
        Ok(progress)
    }

    fn answer(&mut self, reply: Reply<P::Frame, P::ProtocolError>) -> Result<(), CloseReason<P>> {
        match reply {
            Reply::None => {}
            Reply::Frame(frame) => self.send(frame)?,
            Reply::Frames(frames) => {
                for frame in frames {
                    self.send(frame)?;
                }
            }
            Reply::Future(future) => {
                self.reply = Some(Pending::Future(future));
                return Ok(());
            }
            Reply::Stream(stream) => {
                self.reply = Some(Pending::Stream(stream));
                return Ok(());
            }
            Reply::Close(frame) => {
                if let Some(frame) = frame {
                    self.send(frame)?;
                }
                self.ending = Some(CloseReason::Handler);
            }
        }
        self.protocol.on_command_end(&mut self.context);
        Ok(())
    }

    fn send(&mut self, mut frame: P::Frame) -> Result<(), CloseReason<P>> {
        self.protocol.before_send(&mut frame, &mut self.context);
        self.codec.encode(&frame, &mut self.batch).map_err(CloseReason::Encode)?;
        self.context.frames_out += 1;
        Ok(())
    }

    /// Writes the batch, as far as the socket takes it, and flushes once when all is written.
    fn write(&mut self, context: &mut Context<'_>) -> Progress<P> {
        let mut progress = false;
        while !self.batch.is_empty() {
            let mut slices = [IoSlice::new(&[]); SLICES];
            let count = self.batch.slices(&mut slices);
            let socket = Pin::new(&mut self.socket);
            let written = match &slices[..count] {
                [only] => socket.poll_write(context, only),
                slices => socket.poll_write_vectored(context, slices),
            };
            match written {
                Poll::Pending => return Ok(progress),
                Poll::Ready(Err(error)) => return Err(CloseReason::Io(error)),
                Poll::Ready(Ok(0)) => return Err(CloseReason::Io(io::ErrorKind::WriteZero.into())),
                Poll::Ready(Ok(written)) => {
                    self.batch.advance(written);
                    self.unflushed = true;
                    progress = true;
                }
            }
        }
        if self.unflushed {
            match Pin::new(&mut self.socket).poll_flush(context) {
                Poll::Pending => {}
                Poll::Ready(Err(error)) => return Err(CloseReason::Io(error)),
                Poll::Ready(Ok(())) => {
                    self.unflushed = false;
                    progress = true;
                }
            }
        }
        Ok(progress)
    }

    fn read(&mut self, context: &mut Context<'_>) -> Progress<P> {
        // What is read ahead of an unfinished reply, of a peer that does not read, or of requests whose replies fill batch
        // after batch, is limited. A frame that is not whole may be longer, as far as its codec allows.
        let waiting = self.backlog || self.reply.is_some() || self.batch.len() >= self.limits.batch;
        let enough = waiting && self.input.len() >= self.limits.read_ahead;
        if self.heard_out || self.ending.is_some() || enough {
            return Ok(false);
        }
        match self.poll_read(context) {
            Poll::Pending => Ok(false),
            Poll::Ready(Err(error)) => Err(CloseReason::Io(error)),
            Poll::Ready(Ok(length)) => {
                self.heard_out = length == 0;
                Ok(true)
            }
        }
    }

    fn poll_read(&mut self, context: &mut Context<'_>) -> Poll<io::Result<usize>> {
        SCRATCH.with_borrow_mut(|scratch| {
            let mut buffer = ReadBuf::new(scratch);
            ready!(Pin::new(&mut self.socket).poll_read(context, &mut buffer))?;
            self.input.extend_from_slice(buffer.filled());
            Poll::Ready(Ok(buffer.filled().len()))
        })
    }

    /// An idle connection holds no buffers.
    fn input_at_rest(&mut self) {
        if self.input.is_empty() {
            self.input = BytesMut::new();
        }
        if self.batch.is_empty() {
            self.batch.shrink();
        }
    }
}

impl<P: Protocol, S> Actor<P, S> {
    fn tell_end(&mut self, reason: &CloseReason<P>) {
        let Self { protocol, context, begun, .. } = self;
        if !std::mem::take(begun) {
            return;
        }
        tracing::debug!(connection = %context.id, %reason, "a connection has ended");
        if catch_unwind(AssertUnwindSafe(|| protocol.on_connection_closed(reason, context))).is_err() {
            tracing::error!(connection = %context.id, "on_connection_closed panicked");
        }
    }
}

impl<P: Protocol, S> Drop for Actor<P, S> {
    /// Whoever ran the connection may stop, or be stopped.
    fn drop(&mut self) {
        self.tell_end(&CloseReason::Dropped);
    }
}
