//! The protocol: the trait that an application implements for its connections.

use std::fmt;
use std::io;
use std::pin::Pin;
use std::time::Duration;

use futures_core::Stream;

use crate::codec::Codec;
use crate::{ConnectionContext, FrameLike, PushHandle, Timeout};

/// A framed protocol, as a server speaks it. One value serves all connections; what belongs to one of them is in its
/// [`ConnectionContext`].
///
/// The methods run inside the actor and must be quick: what takes time is returned as [`Reply::Future`] or
/// [`Reply::Stream`]. A panic in one of them ends that connection and nothing else; for requests, see
/// [`on_panic`](Self::on_panic).
pub trait Protocol: Send + Sync + 'static {
    /// What is read and written.
    type Frame: FrameLike;
    /// How frames become bytes.
    type Codec: Codec<Frame = Self::Frame>;
    /// Why a handler gives up on its connection.
    type ProtocolError: std::error::Error + Send + Sync + 'static;

    /// What is written first when there is more than one kind. Default: pushes, so that they overtake long replies.
    const ORDER: ServiceOrder = ServiceOrder::PushesFirst;

    /// Whether pushes are held while a request is being answered, and written between the last frame of its reply and the
    /// next request: for protocols whose replies must not be interrupted. A reply must not wait for room to push to its own
    /// connection then. Default: no.
    const HOLD_PUSHES: bool = false;

    /// Whether what has arrived is still handled when nothing can be written any more: for those who wait for answers that may be
    /// among it. Default: no, since nobody would hear of what comes of it.
    const HEAR_OUT: bool = false;

    /// The codec of a new connection.
    fn codec(&self) -> Self::Codec;

    /// A connection begins: the place to keep the handle.
    fn on_connection_setup(&self, handle: PushHandle<Self::Frame>, context: &mut ConnectionContext<Self::Frame>) {
        let _ = (handle, context);
    }

    /// What is said first, before anything is read.
    fn greeting(&self, context: &mut ConnectionContext<Self::Frame>) -> Vec<Self::Frame> {
        let _ = context;
        Vec::new()
    }

    /// A frame has come. Frames of a connection are handled one at a time, or as many at once as
    /// [`max_in_flight`](crate::Builder::max_in_flight) says, and answered in order; meanwhile it is read on, as far as the
    /// read-ahead goes.
    fn on_frame(
        &self,
        frame: Self::Frame,
        context: &mut ConnectionContext<Self::Frame>,
    ) -> Reply<Self::Frame, Self::ProtocolError>;

    /// Called for a frame that has to wait: requests before it are in flight, or the peer has not read the replies before it. A
    /// heartbeat can be recorded now. Returns whether the frame needs no further handling; then it does not reach
    /// [`on_frame`](Self::on_frame). Default: no.
    ///
    /// Frames that wait are limited by [`read_ahead_bytes`](crate::Builder::read_ahead_bytes). Frames behind that limit have not
    /// been read.
    fn on_waiting(&self, frame: &Self::Frame, context: &mut ConnectionContext<Self::Frame>) -> bool {
        let _ = (frame, context);
        false
    }

    /// A frame, pushed or in reply, is about to be written: the place for sequence numbers. Every frame is encoded for its own
    /// connection, the head of its own and the body shared, so a broadcast passes here for each receiver.
    fn before_send(&self, frame: &mut Self::Frame, context: &mut ConnectionContext<Self::Frame>) {
        let _ = (frame, context);
    }

    /// The last frame of a reply has been handed to the codec.
    fn on_command_end(&self, context: &mut ConnectionContext<Self::Frame>) {
        let _ = context;
    }

    /// Everything that was pushed has been handed to the codec, or taken back, and nothing waits for a reply either: the place to push
    /// what was held back. Once each time that it comes to this, and never for a connection that nobody pushed to.
    fn on_drained(&self, context: &mut ConnectionContext<Self::Frame>) {
        let _ = context;
    }

    /// A [handle](PushHandle::wake) asked for it since it last ran. It runs also while the peer does not read, and before replies and
    /// pushes are gathered: what it pushes to its own connection goes into the same batch if there is room. It does not run any more
    /// once the connection is ending.
    fn on_wake(&self, context: &mut ConnectionContext<Self::Frame>) {
        let _ = context;
    }

    /// A handler, or the future, stream or decision that it returned, has panicked. With a frame, that request ends with it and the
    /// connection goes on; without, the connection ends. Default: it ends, since the request would stay without an answer.
    fn on_panic(&self, context: &mut ConnectionContext<Self::Frame>) -> Option<Self::Frame> {
        let _ = context;
        None
    }

    /// Nothing has been heard from the peer for a [heartbeat](crate::Timeouts::heartbeat), or for another one, and everything
    /// has been written. A frame is written before all else: a ping.
    fn on_idle(&self, silent: Duration, context: &mut ConnectionContext<Self::Frame>) -> Option<Self::Frame> {
        let _ = (silent, context);
        None
    }

    /// It is time for a [tick](crate::Timeouts::tick), whatever the connection does: also if it is never silent, and if the peer does
    /// not read. It returns when the next one comes; [`ConnectionContext::tick_within`] brings that forward. Default:
    /// [`Tick::Stop`].
    fn on_tick(&self, context: &mut ConnectionContext<Self::Frame>) -> Tick<Self::Frame> {
        let _ = context;
        Tick::Stop
    }

    /// The server is about to shut down: a frame tells the peer. It is served for the grace period, which may be zero.
    fn on_shutdown(&self, grace: Duration, context: &mut ConnectionContext<Self::Frame>) -> Option<Self::Frame> {
        let _ = (grace, context);
        None
    }

    /// The connection is about to end for this reason, and a last frame can still be written. Not asked when the peer has left or
    /// the socket failed, nor when whoever closed the connection gave a last frame of its own.
    fn last_word(&self, reason: &CloseReason<Self>, context: &mut ConnectionContext<Self::Frame>) -> Option<Self::Frame>
    where
        Self: Sized,
    {
        let _ = (reason, context);
        None
    }

    /// The connection has ended.
    fn on_connection_closed(&self, reason: &CloseReason<Self>, context: &mut ConnectionContext<Self::Frame>)
    where
        Self: Sized,
    {
        let _ = (reason, context);
    }
}

/// What is written first. Control frames of the codec come before either.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ServiceOrder {
    /// Urgent pushes, others in their fair share, replies. While a reply waits, it has a quarter of every batch.
    PushesFirst,
    /// Replies, urgent pushes, others in their fair share. While a push waits, it has a quarter of every batch.
    RepliesFirst,
}

/// What a protocol does when it is time for it; see [`Protocol::on_tick`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Tick<F> {
    /// The connection goes on.
    Next {
        /// Written before all else that waits; with [`HOLD_PUSHES`](Protocol::HOLD_PUSHES) when the request has been answered. If the
        /// peer does not read, it waits with what is already encoded, however much that is.
        frame: Option<F>,
        /// When the next tick comes, from now on, but not before a millisecond has passed.
        after: Duration,
    },
    /// The connection ends, with this last frame or with a [last word](Protocol::last_word). Nothing that is queued is written, nor
    /// is the peer waited for if it does not read: it is presumed to be dead, or not welcome.
    Close(Option<F>),
    /// The connection goes on, and there are no more ticks unless [asked for](ConnectionContext::tick_within).
    Stop,
}

/// A reply that comes later.
pub type ReplyFuture<F, E> = Pin<Box<dyn Future<Output = Result<Reply<F, E>, E>> + Send>>;

/// Frames that come later.
pub type ReplyStream<F, E> = Pin<Box<dyn Stream<Item = Result<F, E>> + Send>>;

/// A reply that is decided when all before it is answered.
pub type ReplyInTurn<F, E> = Box<dyn FnOnce(&mut ConnectionContext<F>) -> Reply<F, E> + Send>;

/// What a handler answers to a frame.
pub enum Reply<F: FrameLike, E> {
    /// Nothing.
    None,
    /// One frame.
    Frame(F),
    /// Several.
    Frames(Vec<F>),
    /// A reply that comes later. The next request waits for it, unless several may be in flight; pushes do not.
    Future(ReplyFuture<F, E>),
    /// Frames as they come. Pushes may overtake them. With several requests in flight, a stream is first asked when all before
    /// it is answered.
    Stream(ReplyStream<F, E>),
    /// A reply that is decided when all before it is answered: at once, if nothing is in flight. No frame after it is handled before
    /// that, so it sees the connection as if requests were handled one at a time. It must be quick, as a handler, and may give any
    /// reply. A future that gives one does so when its own turn has come; what came after it may have been handled by then.
    InTurn(ReplyInTurn<F, E>),
    /// A last frame or none, and the end of the connection.
    Close(Option<F>),
}

impl<F: FrameLike, E> Reply<F, E> {
    /// A frame that a future will give.
    pub fn future(future: impl Future<Output = Result<F, E>> + Send + 'static) -> Self {
        Self::later(async { future.await.map(Self::Frame) })
    }

    /// A reply that a future will give: nothing, several frames, a close.
    pub fn later(future: impl Future<Output = Result<Self, E>> + Send + 'static) -> Self {
        Self::Future(Box::pin(future))
    }

    /// Frames that a stream will give.
    pub fn stream(stream: impl Stream<Item = Result<F, E>> + Send + 'static) -> Self {
        Self::Stream(Box::pin(stream))
    }

    /// A reply that is decided when all before it is answered.
    pub fn in_turn(decide: impl FnOnce(&mut ConnectionContext<F>) -> Self + Send + 'static) -> Self {
        Self::InTurn(Box::new(decide))
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

/// Why a connection has ended.
#[non_exhaustive]
pub enum CloseReason<P: Protocol> {
    /// The peer closed it, in order.
    Peer,
    /// A handler or a [tick](Protocol::on_tick) closed it.
    Handler,
    /// A [handle](PushHandle::close) closed it, or a frame that was pushed or replied ended the conversation.
    Handle,
    /// The server shuts down.
    Shutdown,
    /// The socket failed.
    Io(io::Error),
    /// The peer sent what is no frame, or broke off in the middle of one.
    Decode(<P::Codec as Codec>::Error),
    /// A frame could not be encoded.
    Encode(<P::Codec as Codec>::Error),
    /// A reply failed.
    Protocol(P::ProtocolError),
    /// A handler, the future, stream or decision that it returned, or another method of the protocol panicked.
    Panic,
    /// The peer took too long.
    TimedOut(Timeout),
    /// The [memory limit](crate::MemoryLimit) was exceeded, and this connection held the most. What was queued is dropped.
    /// [`Protocol::last_word`] is asked only if all output had been written: otherwise a frame may have been written in part.
    MemoryLimit,
    /// The task that ran it was aborted, or its runtime ended.
    Dropped,
}

impl<P: Protocol> CloseReason<P> {
    /// A word for it, as [`Stats::ended`](crate::Stats::ended) counts it.
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
            Self::Shutdown => f.write_str("the server shuts down"),
            Self::Io(error) => write!(f, "the socket failed: {error}"),
            Self::Decode(error) => write!(f, "the peer sent no frame: {error}"),
            Self::Encode(error) => write!(f, "a frame could not be sent: {error}"),
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
