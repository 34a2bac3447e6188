//! The protocol: the trait that an application implements for its connections.

use std::fmt;
use std::io;
use std::pin::Pin;
use std::time::Duration;

use futures_core::Stream;

use crate::codec::Codec;
use crate::{ConnectionContext, FrameLike, PushHandle, Timeout};

/// The server side of a framed protocol. One value serves all connections; the state of a connection is in its
/// [`ConnectionContext`].
///
/// The methods run on the task of the connection and must be quick: return slow work as [`Reply::Future`] or [`Reply::Stream`]. A
/// panic in a method ends that connection only; for requests, see [`on_panic`](Self::on_panic).
pub trait Protocol: Send + Sync + 'static {
    /// The unit that is read and written.
    type Frame: FrameLike;
    /// The codec between frames and bytes.
    type Codec: Codec<Frame = Self::Frame>;
    /// The error of a reply, which closes its connection.
    type ProtocolError: std::error::Error + Send + Sync + 'static;

    /// Whether pushes or replies are written first. Default: pushes, so that they overtake long replies.
    const ORDER: ServiceOrder = ServiceOrder::PushesFirst;

    /// Whether pushes are held while a request is in flight, and written between the last frame of its reply and the next request.
    /// For protocols whose replies must not be interrupted. If true, a reply must not wait for capacity to push to its own connection,
    /// because that capacity is not freed before the reply. Default: false.
    const HOLD_PUSHES: bool = false;

    /// Whether input that has already arrived is still handled after a write error. Clients need this, because the input may contain
    /// their replies. Default: false, because a server could not reply.
    const HANDLE_INPUT_AFTER_WRITE_ERROR: bool = false;

    /// Returns the codec of a new connection.
    fn codec(&self) -> Self::Codec;

    /// Called when a connection begins. Keep the handle to push later.
    fn on_connection_setup(&self, handle: PushHandle<Self::Frame>, context: &mut ConnectionContext<Self::Frame>) {
        let _ = (handle, context);
    }

    /// Returns the frames that are sent before anything is read.
    fn greeting(&self, context: &mut ConnectionContext<Self::Frame>) -> Vec<Self::Frame> {
        let _ = context;
        Vec::new()
    }

    /// Handles a frame. Frames of a connection are answered in order. They are handled one at a time, or concurrently up to
    /// [`max_in_flight`](crate::Builder::max_in_flight). Further input is read up to
    /// [`read_ahead_bytes`](crate::Builder::read_ahead_bytes).
    fn on_frame(
        &self,
        frame: Self::Frame,
        context: &mut ConnectionContext<Self::Frame>,
    ) -> Reply<Self::Frame, Self::ProtocolError>;

    /// Called for a frame that has to wait, because earlier requests are in flight or the peer has not read their replies. The place to
    /// handle a heartbeat. Returns true if the frame has been handled, and must not be passed to [`on_frame`](Self::on_frame).
    /// Default: false.
    ///
    /// Waiting frames are limited by [`read_ahead_bytes`](crate::Builder::read_ahead_bytes). Further frames are not read yet.
    fn on_waiting(&self, frame: &Self::Frame, context: &mut ConnectionContext<Self::Frame>) -> bool {
        let _ = (frame, context);
        false
    }

    /// Called before any frame is encoded: the place to set sequence numbers. For a broadcast it is called once per receiver, each time
    /// with a frame that has its own head and shares the body.
    fn before_send(&self, frame: &mut Self::Frame, context: &mut ConnectionContext<Self::Frame>) {
        let _ = (frame, context);
    }

    /// Called when the last frame of a reply has been encoded: the place to reset sequence numbers.
    fn on_command_end(&self, context: &mut ConnectionContext<Self::Frame>) {
        let _ = context;
    }

    /// Called when the outbox has become empty: all pushes have been encoded or removed, and none waits for a reply. The place to
    /// push frames that were held back. Never called for a connection without pushes.
    fn on_drained(&self, context: &mut ConnectionContext<Self::Frame>) {
        let _ = context;
    }

    /// Called after [`PushHandle::wake`], even while the peer does not read. The hook runs before replies and pushes are gathered, so
    /// its pushes to its own connection go into the same batch if they fit. Not called when the connection is ending.
    fn on_wake(&self, context: &mut ConnectionContext<Self::Frame>) {
        let _ = context;
    }

    /// Called when [`on_frame`](Self::on_frame), or the future, stream or closure that it returned, has panicked. Returns the reply to
    /// the request, or `None` to close the connection. Default: `None`, because the request would have no reply.
    fn on_panic(&self, context: &mut ConnectionContext<Self::Frame>) -> Option<Self::Frame> {
        let _ = context;
        None
    }

    /// Called when nothing has arrived for the time of a [heartbeat](crate::Timeouts::heartbeat), and again whenever that time has
    /// passed, if all output has been written. A returned frame, such as a ping, is written before any other.
    fn on_idle(&self, silent: Duration, context: &mut ConnectionContext<Self::Frame>) -> Option<Self::Frame> {
        let _ = (silent, context);
        None
    }

    /// Called at a [tick](crate::Timeouts::tick), even if the connection is never idle or the peer does not read. Returns the time to
    /// the next tick; [`ConnectionContext::tick_within`] can schedule an earlier one. Default: [`Tick::Stop`].
    fn on_tick(&self, context: &mut ConnectionContext<Self::Frame>) -> Tick<Self::Frame> {
        let _ = context;
        Tick::Stop
    }

    /// Called when the server begins to shut down. A returned frame is sent to the peer, which is served for the grace period.
    fn on_shutdown(&self, grace: Duration, context: &mut ConnectionContext<Self::Frame>) -> Option<Self::Frame> {
        let _ = (grace, context);
        None
    }

    /// Returns a last frame for a connection that is about to end. Not called if the peer has left, if the socket has failed, or if
    /// the connection was closed with a last frame.
    fn last_frame(
        &self,
        reason: &CloseReason<Self>,
        context: &mut ConnectionContext<Self::Frame>,
    ) -> Option<Self::Frame>
    where
        Self: Sized,
    {
        let _ = (reason, context);
        None
    }

    /// Called once when the connection has ended.
    fn on_connection_closed(&self, reason: &CloseReason<Self>, context: &mut ConnectionContext<Self::Frame>)
    where
        Self: Sized,
    {
        let _ = (reason, context);
    }
}

/// The order of pushes and replies. Control frames of the codec come first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ServiceOrder {
    /// Pushes by priority and fair share, then replies. While replies wait, they get a quarter of every batch.
    PushesFirst,
    /// Replies, then pushes by priority and fair share. While pushes wait, they get a quarter of every batch.
    RepliesFirst,
}

/// The result of [`Protocol::on_tick`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Tick<F> {
    /// The connection continues.
    Next {
        /// Written before any other frame; with [`HOLD_PUSHES`](Protocol::HOLD_PUSHES) after the reply in progress. Output that is
        /// already encoded comes first.
        frame: Option<F>,
        /// Time to the next tick, at least a millisecond.
        after: Duration,
    },
    /// The connection is closed, with this last frame or with [`Protocol::last_frame`]. Queued frames are not written, and output that
    /// the socket does not accept at once is dropped.
    Close(Option<F>),
    /// The connection continues without ticks, until [`ConnectionContext::tick_within`] is called.
    Stop,
}

/// The future of a reply: see [`Reply::Future`].
pub type ReplyFuture<F, E> = Pin<Box<dyn Future<Output = Result<Reply<F, E>, E>> + Send>>;

/// The stream of a reply: see [`Reply::Stream`].
pub type ReplyStream<F, E> = Pin<Box<dyn Stream<Item = Result<F, E>> + Send>>;

/// The closure of a reply: see [`Reply::InTurn`].
pub type ReplyInTurn<F, E> = Box<dyn FnOnce(&mut ConnectionContext<F>) -> Reply<F, E> + Send>;

/// The reply to a frame.
pub enum Reply<F: FrameLike, E> {
    /// No frame.
    None,
    /// One frame.
    Frame(F),
    /// Several frames.
    Frames(Vec<F>),
    /// A future of a reply. Other requests wait for it unless several may be in flight; pushes do not wait.
    Future(ReplyFuture<F, E>),
    /// A stream of frames. Pushes may overtake them. The stream is first polled when all requests before it have been answered.
    Stream(ReplyStream<F, E>),
    /// A closure that is called when all earlier requests have been answered: at once, if none is in flight. No later frame is
    /// handled before the call, so the closure sees the connection as if requests were handled one at a time. It must be quick, and
    /// may return any reply. If a future returns the closure, later frames may have been handled already.
    InTurn(ReplyInTurn<F, E>),
    /// Closes the connection, after this last frame if there is one.
    Close(Option<F>),
}

impl<F: FrameLike, E> Reply<F, E> {
    /// Replies with the frame of a future.
    pub fn future(future: impl Future<Output = Result<F, E>> + Send + 'static) -> Self {
        Self::later(async { future.await.map(Self::Frame) })
    }

    /// Replies with the [`Reply`] that a future returns, for example several frames or a close.
    pub fn later(future: impl Future<Output = Result<Self, E>> + Send + 'static) -> Self {
        Self::Future(Box::pin(future))
    }

    /// Replies with the frames of a stream.
    pub fn stream(stream: impl Stream<Item = Result<F, E>> + Send + 'static) -> Self {
        Self::Stream(Box::pin(stream))
    }

    /// Replies with the result of a closure, called when all earlier requests have been answered: see [`Reply::InTurn`].
    pub fn in_turn(closure: impl FnOnce(&mut ConnectionContext<F>) -> Self + Send + 'static) -> Self {
        Self::InTurn(Box::new(closure))
    }
}

impl<F: FrameLike, E> fmt::Debug for Reply<F, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "None",
            Self::Frame(_) => "Frame",
            Self::Frames(_) => "Frames",
            Self::Future(_) => "Future",
            Self::Stream(_) => "Stream",
            Self::InTurn(_) => "InTurn",
            Self::Close(_) => "Close",
        })
    }
}

/// The reason for the end of a connection.
#[non_exhaustive]
pub enum CloseReason<P: Protocol> {
    /// The peer closed the connection.
    Peer,
    /// A reply or a [tick](Protocol::on_tick) closed the connection.
    Handler,
    /// A [handle](PushHandle::close), or a frame such as a WebSocket close, closed the connection.
    Handle,
    /// The server shut down.
    Shutdown,
    /// The socket failed.
    Io(io::Error),
    /// The input was invalid, or ended within a frame.
    Decode(<P::Codec as Codec>::Error),
    /// A frame could not be encoded.
    Encode(<P::Codec as Codec>::Error),
    /// A reply failed.
    Protocol(P::ProtocolError),
    /// A method of the protocol, or a future, stream or closure of a reply, panicked.
    Panic,
    /// A timeout was reached.
    TimedOut(Timeout),
    /// The [memory limit](crate::MemoryLimit) was exceeded, and this connection held the most. Queued frames are dropped.
    /// [`Protocol::last_frame`] is called only if all output had been written; otherwise a frame may have been written in part.
    MemoryLimit,
    /// The task of the connection was aborted, or its runtime was shut down.
    Dropped,
}

impl<P: Protocol> CloseReason<P> {
    /// Returns the label of the reason in [`Stats::ended`](crate::Stats::ended).
    pub fn label(&self) -> &'static str {
        match self {
            Self::Peer => "peer",
            Self::Handler => "handler",
            Self::Handle => "handle",
            Self::Shutdown => "shutdown",
            Self::Io(_) => "io",
            Self::Decode(_) => "decode",
            Self::Encode(_) => "encode",
            Self::Protocol(_) => "protocol",
            Self::Panic => "panic",
            Self::TimedOut(timeout) => timeout.label(),
            Self::MemoryLimit => "memory_limit",
            Self::Dropped => "dropped",
        }
    }
}

impl<P: Protocol> fmt::Display for CloseReason<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Peer => f.write_str("the peer closed the connection"),
            Self::Handler => f.write_str("a handler closed the connection"),
            Self::Handle => f.write_str("a handle closed the connection"),
            Self::Shutdown => f.write_str("the server is shutting down"),
            Self::Io(error) => write!(f, "the socket failed: {error}"),
            Self::Decode(error) => write!(f, "invalid input: {error}"),
            Self::Encode(error) => write!(f, "a frame could not be encoded: {error}"),
            Self::Protocol(error) => write!(f, "a reply failed: {error}"),
            Self::Panic => f.write_str("the protocol panicked"),
            Self::TimedOut(timeout) => write!(f, "{timeout}"),
            Self::MemoryLimit => f.write_str("the memory limit was exceeded, and this connection held the most"),
            Self::Dropped => f.write_str("the task of the connection was dropped"),
        }
    }
}

impl<P: Protocol> fmt::Debug for CloseReason<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CloseReason({self})")
    }
}
