//! The connection of a client: connects, runs the actor, and reconnects.

use std::cell::Cell;
use std::collections::{HashMap, VecDeque};
use std::convert::Infallible;
use std::fmt;
use std::io;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::BytesMut;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use super::request::Responder;
use super::{ClientOptions, ClientProtocol, Connect, Connected, Incoming, Pushed, RequestError};
use crate::codec::{Batch, Codec, EncodePosition};
use crate::push::LossReason;
use crate::sync::lock;
use crate::{CloseReason, ConnectionContext, FrameLike, Protocol, PushHandle, Reply, Shutdown, Supervisor};

/// A frame that is sent to the server, with the receiver of its reply.
pub(super) struct Outgoing<F> {
    frame: F,
    /// The number of the request, by which its reply is found. Set immediately before the frame is sent.
    number: u64,
    /// Taken when the frame is encoded. In a cell, because a codec has only a shared reference to the frame.
    expected_reply: Cell<ExpectedReply<F>>,
}

/// Whether the server replies to a frame, and what happens with the reply.
#[derive(Default)]
enum ExpectedReply<F> {
    /// The server does not reply.
    #[default]
    None,
    /// The server replies, and the reply is discarded.
    Discarded,
    /// A caller waits for the reply.
    Caller(Responder<F>),
}

impl<F> Outgoing<F> {
    pub(super) fn with_reply(frame: F, responder: Responder<F>) -> Self {
        Self { frame, number: 0, expected_reply: Cell::new(ExpectedReply::Caller(responder)) }
    }

    pub(super) fn without_reply(frame: F) -> Self {
        Self { frame, number: 0, expected_reply: Cell::default() }
    }

    /// Returns the frame of a lost push. If the frame was dropped because the queue is full, its request ends with
    /// [`RequestError::QueueFull`].
    pub(super) fn into_lost_frame(self, reason: LossReason) -> F {
        if let (LossReason::Dropped { .. }, ExpectedReply::Caller(responder)) = (reason, self.expected_reply.take()) {
            responder.fail(RequestError::QueueFull);
        }
        self.frame
    }
}

impl<F: FrameLike> FrameLike for Outgoing<F> {
    fn size(&self) -> usize {
        self.frame.size()
    }
}

/// The state of the connection to the server.
pub(super) enum LinkState<F: FrameLike> {
    Down,
    Up(PushHandle<Outgoing<F>>),
    /// The client does not connect again.
    Closed,
}

/// A codec that wraps the codec of the protocol. It registers the receiver of the reply when a request is encoded, and skips cancelled
/// requests. If a request cannot be encoded, only its caller gets an error, and the connection continues.
pub(super) struct ClientCodec<C: Codec> {
    codec: C,
    table: SharedTable<C::Frame>,
}

impl<C: Codec> Codec for ClientCodec<C> {
    type Frame = Outgoing<C::Frame>;
    type Error = C::Error;

    fn decode(&mut self, input: &mut BytesMut) -> Result<Option<Self::Frame>, C::Error> {
        Ok(self.codec.decode(input)?.map(Outgoing::without_reply))
    }

    fn finish(&mut self, input: &BytesMut) -> Result<(), C::Error> {
        self.codec.finish(input)
    }

    /// Encodes all parts of a frame.
    fn encode(&mut self, outgoing: &Self::Frame, output: &mut Batch) -> Result<(), C::Error> {
        let mut position = Some(EncodePosition::default());
        while let Some(next) = position {
            position = self.encode_part(outgoing, next, output)?;
        }
        Ok(())
    }

    fn encode_part(
        &mut self,
        outgoing: &Self::Frame,
        position: EncodePosition,
        output: &mut Batch,
    ) -> Result<Option<EncodePosition>, C::Error> {
        if position != EncodePosition::default() {
            return self.codec.encode_part(&outgoing.frame, position, output);
        }
        let receiver = match outgoing.expected_reply.take() {
            ExpectedReply::None => return self.codec.encode_part(&outgoing.frame, position, output),
            ExpectedReply::Discarded => ReplyReceiver::Discard,
            ExpectedReply::Caller(responder) if !responder.mark_sent() => return Ok(None),
            ExpectedReply::Caller(responder) => ReplyReceiver::Caller(responder),
        };
        match (self.codec.encode_part(&outgoing.frame, position, output), receiver) {
            (Ok(next), receiver) => {
                lock(&self.table).insert(outgoing.number, receiver);
                Ok(next)
            }
            (Err(error), ReplyReceiver::Caller(responder)) => {
                tracing::debug!(%error, "request cannot be encoded");
                responder.fail(RequestError::Unsendable);
                Ok(None)
            }
            (Err(error), ReplyReceiver::Discard) => Err(error),
        }
    }

    fn partial_message(&self) -> Option<u64> {
        self.codec.partial_message()
    }

    fn has_partial_frame(&self, input: &BytesMut) -> bool {
        self.codec.has_partial_frame(input)
    }

    fn encode_control(&mut self, output: &mut Batch, is_last: bool) {
        self.codec.encode_control(output, is_last);
    }

    fn is_closing(&self) -> bool {
        self.codec.is_closing()
    }

    fn is_closed(&self) -> bool {
        self.codec.is_closed()
    }
}

/// Runs a [`ClientProtocol`] as the [`Protocol`] of a connection actor.
pub(super) struct ClientAdapter<P: ClientProtocol> {
    protocol: P,
    /// `None` when the client does not connect again, which ends the receiver of pushes.
    pushes: Mutex<Option<mpsc::Sender<Pushed<P::Frame>>>>,
    link: watch::Sender<LinkState<P::Frame>>,
    /// The table of the connection that is being set up. Its codec is created before `on_connection_setup` is called.
    table: Mutex<Option<SharedTable<P::Frame>>>,
    /// When the last connection ended, if a frame arrived on it.
    served_until: Mutex<Option<Instant>>,
    unexpected_replies: AtomicU64,
}

impl<P: ClientProtocol> ClientAdapter<P> {
    pub(super) fn new(
        protocol: P,
        pushes: mpsc::Sender<Pushed<P::Frame>>,
        link: watch::Sender<LinkState<P::Frame>>,
    ) -> Self {
        Self {
            protocol,
            pushes: Mutex::new(Some(pushes)),
            link,
            table: Mutex::default(),
            served_until: Mutex::default(),
            unexpected_replies: AtomicU64::new(0),
        }
    }

    pub(super) fn unexpected_replies(&self) -> u64 {
        self.unexpected_replies.load(Relaxed)
    }

    /// Passes a reply to its receiver. Counts it if it was not expected.
    fn deliver(&self, receiver: Option<ReplyReceiver<P::Frame>>, reply: P::Frame) {
        let is_expected = match receiver {
            None => false,
            Some(ReplyReceiver::Discard) => true,
            Some(ReplyReceiver::Caller(responder)) => responder.deliver(reply),
        };
        if !is_expected {
            self.unexpected_replies.fetch_add(1, Relaxed);
        }
    }

    /// Wraps a frame that the protocol itself sends: a greeting or a ping.
    fn protocol_frame(&self, frame: P::Frame) -> Outgoing<P::Frame> {
        let expects_reply = self.protocol.expects_reply(&frame);
        let outgoing = Outgoing::without_reply(frame);
        if expects_reply {
            outgoing.expected_reply.set(ExpectedReply::Discarded);
        }
        outgoing
    }
}

/// The state of one connection of a client.
struct ConnectionData<F> {
    table: SharedTable<F>,
    pushes: Option<mpsc::Sender<Pushed<F>>>,
    next_number: u64,
    /// A frame has arrived.
    has_input: bool,
}

type SharedTable<F> = Arc<Mutex<InFlightTable<F>>>;

/// The receiver of an expected reply.
enum ReplyReceiver<F> {
    /// The reply to a frame of the protocol itself, which is discarded.
    Discard,
    Caller(Responder<F>),
}

/// The replies that are expected on a connection.
struct InFlightTable<F> {
    by_number: HashMap<u64, ReplyReceiver<F>>,
    /// The numbers of the requests, in the order in which they were sent. The numbers of requests that were answered out of order are
    /// removed only when there are many of them.
    in_order: VecDeque<u64>,
}

impl<F> InFlightTable<F> {
    fn new() -> Self {
        Self { by_number: HashMap::new(), in_order: VecDeque::new() }
    }

    fn insert(&mut self, number: u64, receiver: ReplyReceiver<F>) {
        if self.in_order.len() > 2 * self.by_number.len() + 64 {
            self.in_order.retain(|number| self.by_number.contains_key(number));
        }
        self.by_number.insert(number, receiver);
        self.in_order.push_back(number);
    }

    /// Removes the oldest request, and returns the receiver of its reply.
    fn take_oldest(&mut self) -> Option<ReplyReceiver<F>> {
        while let Some(number) = self.in_order.pop_front() {
            if let Some(receiver) = self.by_number.remove(&number) {
                return Some(receiver);
            }
        }
        None
    }
}

impl<P: ClientProtocol> Protocol for ClientAdapter<P> {
    type Frame = Outgoing<P::Frame>;
    type Codec = ClientCodec<P::Codec>;
    type ProtocolError = Infallible;
    const HANDLE_INPUT_AFTER_WRITE_ERROR: bool = true;

    fn codec(&self) -> Self::Codec {
        let table = Arc::new(Mutex::new(InFlightTable::new()));
        *lock(&self.table) = Some(Arc::clone(&table));
        ClientCodec { codec: self.protocol.codec(), table }
    }

    fn on_connection_setup(&self, handle: PushHandle<Self::Frame>, context: &mut ConnectionContext<Self::Frame>) {
        let table = lock(&self.table).take().unwrap_or_else(|| Arc::new(Mutex::new(InFlightTable::new())));
        let pushes = lock(&self.pushes).clone();
        context.data = Some(Box::new(ConnectionData { table, pushes, next_number: 0, has_input: false }));
        self.link.send_replace(LinkState::Up(handle));
    }

    fn greeting(&self, _: &mut ConnectionContext<Self::Frame>) -> Vec<Self::Frame> {
        self.protocol.greeting().into_iter().map(|frame| self.protocol_frame(frame)).collect()
    }

    fn on_frame(
        &self,
        incoming: Self::Frame,
        context: &mut ConnectionContext<Self::Frame>,
    ) -> Reply<Self::Frame, Infallible> {
        let frame = incoming.frame;
        let connection = context.id().0;
        let Some(data) = connection_data::<P::Frame>(context) else { return Reply::Close(None) };
        data.has_input = true;
        match self.protocol.classify(&frame) {
            Incoming::NextReply => {
                let receiver = lock(&data.table).take_oldest();
                self.deliver(receiver, frame);
            }
            Incoming::Reply(number) => {
                let receiver = lock(&data.table).by_number.remove(&number);
                self.deliver(receiver, frame);
            }
            Incoming::Push => return deliver_push(data, Pushed { frame, connection }),
            Incoming::Discard => {}
        }
        Reply::None
    }

    fn before_send(&self, outgoing: &mut Self::Frame, context: &mut ConnectionContext<Self::Frame>) {
        let Some(data) = connection_data::<P::Frame>(context) else { return };
        if !matches!(outgoing.expected_reply.get_mut(), ExpectedReply::None) {
            data.next_number += 1;
            outgoing.number = data.next_number;
            self.protocol.number(&mut outgoing.frame, data.next_number);
        }
    }

    fn on_idle(&self, silent: Duration, _: &mut ConnectionContext<Self::Frame>) -> Option<Self::Frame> {
        self.protocol.on_idle(silent).map(|frame| self.protocol_frame(frame))
    }

    fn on_connection_closed(&self, reason: &CloseReason<Self>, context: &mut ConnectionContext<Self::Frame>) {
        tracing::debug!(%reason, "connection to the server ended");
        self.link.send_replace(LinkState::Down);
        if let Some(data) = connection_data::<P::Frame>(context) {
            *lock(&self.served_until) = data.has_input.then(Instant::now);
            // Drops the responders, so that callers get their errors before the connection lingers.
            *lock(&data.table) = InFlightTable::new();
        }
        context.data = None;
    }
}

fn connection_data<F: FrameLike>(context: &mut ConnectionContext<Outgoing<F>>) -> Option<&mut ConnectionData<F>> {
    context.data.as_mut()?.downcast_mut()
}

/// Passes a push to the receiver of pushes. If its channel is full, the returned reply waits for capacity, so that nothing more is read.
fn deliver_push<F: FrameLike>(data: &ConnectionData<F>, pushed: Pushed<F>) -> Reply<Outgoing<F>, Infallible> {
    let Some(pushes) = &data.pushes else { return Reply::None };
    match pushes.try_send(pushed) {
        // If the receiver of pushes has been dropped, pushes are discarded.
        Ok(()) | Err(mpsc::error::TrySendError::Closed(_)) => Reply::None,
        Err(mpsc::error::TrySendError::Full(pushed)) => {
            let pushes = pushes.clone();
            Reply::later(async move {
                // Fails if the receiver has been dropped.
                let _ = pushes.send(pushed).await;
                Ok(Reply::None)
            })
        }
    }
}

/// Connects a [`Client`](super::Client) to its server, runs the connection, and reconnects when it breaks.
pub struct Connection<P: ClientProtocol, C> {
    supervisor: Supervisor<ClientAdapter<P>>,
    connector: C,
    options: ClientOptions,
    /// Closed when the last client is dropped.
    closed: mpsc::Receiver<()>,
}

impl<P: ClientProtocol, C: Connect> Connection<P, C> {
    pub(super) fn new(
        supervisor: Supervisor<ClientAdapter<P>>,
        connector: C,
        options: ClientOptions,
        closed: mpsc::Receiver<()>,
    ) -> Self {
        Self { supervisor, connector, options, closed }
    }

    /// Runs until the last [`Client`](super::Client) is dropped and all queued frames are sent. If
    /// [`reconnect`](ClientOptions::reconnect) is false, runs until the connection ends.
    pub async fn run(mut self) {
        let mut backoff = Backoff::new(&self.options);
        loop {
            let connected = tokio::select! {
                connected = connect(&self.connector, self.options.connect_timeout) => connected,
                _ = self.closed.recv() => return,
            };
            let began = Instant::now();
            let adapter = self.supervisor.protocol();
            *lock(&adapter.served_until) = None;
            match connected {
                Ok(connected) => {
                    if self.run_one(connected).await {
                        return;
                    }
                }
                Err(error) => tracing::warn!(%error, "connect failed"),
            }
            if !self.options.reconnect {
                return;
            }
            let served_until = *lock(&self.supervisor.protocol().served_until);
            let pause = backoff.next(served_until.map_or(Duration::ZERO, |until| until.duration_since(began)));
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                _ = self.closed.recv() => return,
            }
        }
    }

    /// Runs a connection until it ends. Returns whether the client was closed.
    async fn run_one(&mut self, connected: Connected<C::Socket>) -> bool {
        let Connected { socket, peer, already_read } = connected;
        // There is one connection at a time, so the limit is not reached.
        let Ok(permit) = self.supervisor.admit(peer) else { return false };
        let mut running = pin!(permit.run(socket, already_read));
        tokio::select! {
            () = &mut running => false,
            _ = self.closed.recv() => {
                let adapter = self.supervisor.protocol();
                if let LinkState::Up(handle) = &*adapter.link.borrow() {
                    handle.close(adapter.protocol.last_frame().map(Outgoing::without_reply));
                }
                tokio::join!(running, self.supervisor.shutdown(Shutdown::default()));
                true
            }
        }
    }
}

async fn connect<C: Connect>(connector: &C, limit: Duration) -> io::Result<Connected<C::Socket>> {
    let connected = tokio::time::timeout(limit, connector.connect()).await;
    connected.unwrap_or_else(|_| Err(io::Error::new(io::ErrorKind::TimedOut, "connect timed out")))
}

impl<P: ClientProtocol, C> Drop for Connection<P, C> {
    /// Ends all waits for a connection or for a push, because the client does not connect again.
    fn drop(&mut self) {
        let adapter = self.supervisor.protocol();
        adapter.link.send_replace(LinkState::Closed);
        lock(&adapter.pushes).take();
    }
}

impl<P: ClientProtocol, C> fmt::Debug for Connection<P, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").finish_non_exhaustive()
    }
}

/// The pauses between attempts to connect: random, with an upper bound that grows exponentially.
struct Backoff {
    first: Duration,
    max: Duration,
    /// The upper bound of the next pause.
    limit: Duration,
}

impl Backoff {
    fn new(options: &ClientOptions) -> Self {
        let first = options.backoff.min(options.max_backoff);
        Self { first, max: options.max_backoff, limit: first }
    }

    /// Returns the next pause. `served` is the duration of the last connection, or zero if no frame arrived on it. If it is longer than
    /// the upper bound of the pause, the bound is reset.
    fn next(&mut self, served: Duration) -> Duration {
        if served > self.limit {
            self.limit = self.first;
        }
        let pause = self.limit.mul_f64(rand::random());
        self.limit = self.limit.saturating_mul(2).min(self.max);
        pause
    }
}
