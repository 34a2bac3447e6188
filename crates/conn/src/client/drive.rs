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
use crate::push::Lost;
use crate::sync::lock;
use crate::{CloseReason, ConnectionContext, FrameLike, Protocol, PushHandle, Reply, Shutdown, Supervisor};

/// A frame on its way to the server, with whoever waits for its reply.
pub(super) struct Outgoing<F> {
    frame: F,
    /// Under which its reply is expected; set right before it is sent.
    number: u64,
    /// Taken when it is encoded, which does not change a frame.
    expected_reply: Cell<ExpectedReply<F>>,
}

/// Who waits for a reply.
#[derive(Default)]
enum ExpectedReply<F> {
    /// There will be none.
    #[default]
    None,
    /// Nobody, but there will be one.
    Discarded,
    Caller(Responder<F>),
}

impl<F> Outgoing<F> {
    pub(super) fn with_reply(frame: F, responder: Responder<F>) -> Self {
        Self { frame, number: 0, expected_reply: Cell::new(ExpectedReply::Caller(responder)) }
    }

    pub(super) fn without_reply(frame: F) -> Self {
        Self { frame, number: 0, expected_reply: Cell::default() }
    }

    /// Returns the frame, which is lost. If it was dropped from a full queue, its request ends with that error.
    pub(super) fn into_lost(self, lost: Lost) -> F {
        if let (Lost::Dropped { .. }, ExpectedReply::Caller(responder)) = (lost, self.expected_reply.take()) {
            responder.refuse(RequestError::QueueFull);
        }
        self.frame
    }
}

impl<F: FrameLike> FrameLike for Outgoing<F> {
    fn size(&self) -> usize {
        self.frame.size()
    }
}

/// The way to the server.
pub(super) enum LinkState<F: FrameLike> {
    Down,
    Up(PushHandle<Outgoing<F>>),
    /// There will be none any more.
    Closed,
}

/// The codec of the protocol, which notes who waits for a reply to what it sends. It sends nothing that was given up, and tells
/// whoever sends what cannot be sent, without harm to the others.
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

    /// All parts of it.
    fn encode(&mut self, outgoing: &Self::Frame, output: &mut Batch) -> Result<(), C::Error> {
        let mut part = Some(EncodePosition::default());
        while let Some(next) = part {
            part = self.encode_part(outgoing, next, output)?;
        }
        Ok(())
    }

    fn encode_part(
        &mut self,
        outgoing: &Self::Frame,
        part: EncodePosition,
        output: &mut Batch,
    ) -> Result<Option<EncodePosition>, C::Error> {
        if part != EncodePosition::default() {
            return self.codec.encode_part(&outgoing.frame, part, output);
        }
        let receiver = match outgoing.expected_reply.take() {
            ExpectedReply::None => return self.codec.encode_part(&outgoing.frame, part, output),
            ExpectedReply::Discarded => ReplyReceiver::Discard,
            ExpectedReply::Caller(responder) if !responder.begin() => return Ok(None),
            ExpectedReply::Caller(responder) => ReplyReceiver::Caller(responder),
        };
        match (self.codec.encode_part(&outgoing.frame, part, output), receiver) {
            (Ok(next), receiver) => {
                lock(&self.table).insert(outgoing.number, receiver);
                Ok(next)
            }
            (Err(error), ReplyReceiver::Caller(responder)) => {
                tracing::debug!(%error, "a request cannot be sent");
                responder.refuse(RequestError::Unsendable);
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

/// What the actor of a client's connection does with frames.
pub(super) struct ClientAdapter<P: ClientProtocol> {
    protocol: P,
    /// None when there will be no more connections, so that whoever receives pushes learns of it.
    pushes: Mutex<Option<mpsc::Sender<Pushed<P::Frame>>>>,
    link: watch::Sender<LinkState<P::Frame>>,
    /// That of the connection which is being set up: its codec is made first.
    table: Mutex<Option<SharedTable<P::Frame>>>,
    /// When the last connection ended on which something was heard.
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

    fn answer(&self, receiver: Option<ReplyReceiver<P::Frame>>, reply: P::Frame) {
        let is_expected = match receiver {
            None => false,
            Some(ReplyReceiver::Discard) => true,
            Some(ReplyReceiver::Caller(responder)) => responder.answer(reply),
        };
        if !is_expected {
            self.unexpected_replies.fetch_add(1, Relaxed);
        }
    }

    /// A frame of the protocol's own.
    fn protocol_frame(&self, frame: P::Frame) -> Outgoing<P::Frame> {
        let is_answered = self.protocol.is_answered(&frame);
        let outgoing = Outgoing::without_reply(frame);
        if is_answered {
            outgoing.expected_reply.set(ExpectedReply::Discarded);
        }
        outgoing
    }
}

/// What belongs to one connection of a client.
struct ConnectionData<F> {
    table: SharedTable<F>,
    pushes: Option<mpsc::Sender<Pushed<F>>>,
    next_number: u64,
    heard: bool,
}

type SharedTable<F> = Arc<Mutex<InFlightTable<F>>>;

/// ReplyReceiver an expected reply is.
enum ReplyReceiver<F> {
    /// A frame of the protocol's own is answered.
    Discard,
    Caller(Responder<F>),
}

/// The replies that are expected on a connection.
struct InFlightTable<F> {
    by_number: HashMap<u64, ReplyReceiver<F>>,
    /// Their numbers, in the order in which they were sent. Those that were answered by number are left in it until they are
    /// many.
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

    fn oldest(&mut self) -> Option<ReplyReceiver<F>> {
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
        context.data = Some(Box::new(ConnectionData { table, pushes, next_number: 0, heard: false }));
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
        data.heard = true;
        match self.protocol.classify(&frame) {
            Incoming::NextReply => {
                let receiver = lock(&data.table).oldest();
                self.answer(receiver, frame);
            }
            Incoming::Reply(number) => {
                let receiver = lock(&data.table).by_number.remove(&number);
                self.answer(receiver, frame);
            }
            Incoming::Push => return push(data, Pushed { frame, connection }),
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
        tracing::debug!(%reason, "the connection to the server has ended");
        self.link.send_replace(LinkState::Down);
        if let Some(data) = connection_data::<P::Frame>(context) {
            *lock(&self.served_until) = data.heard.then(Instant::now);
            // Whoever waits is told now, and not when the socket has been closed.
            *lock(&data.table) = InFlightTable::new();
        }
        context.data = None;
    }
}

fn connection_data<F: FrameLike>(context: &mut ConnectionContext<Outgoing<F>>) -> Option<&mut ConnectionData<F>> {
    context.data.as_mut()?.downcast_mut()
}

fn push<F: FrameLike>(data: &ConnectionData<F>, pushed: Pushed<F>) -> Reply<Outgoing<F>, Infallible> {
    let Some(pushes) = &data.pushes else { return Reply::None };
    match pushes.try_send(pushed) {
        // If nobody receives pushes, they are wanted by nobody.
        Ok(()) | Err(mpsc::error::TrySendError::Closed(_)) => Reply::None,
        Err(mpsc::error::TrySendError::Full(pushed)) => {
            let pushes = pushes.clone();
            Reply::later(async move {
                // As above, if it fails.
                let _ = pushes.send(pushed).await;
                Ok(Reply::None)
            })
        }
    }
}

/// Makes the connection of a [`Client`](super::Client), runs it, and makes it again when it breaks.
pub struct Connection<P: ClientProtocol, C> {
    supervisor: Supervisor<ClientAdapter<P>>,
    connector: C,
    options: ClientOptions,
    /// Ends when the last client is dropped.
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

    /// Runs until the last [`Client`](super::Client) is dropped, and what is queued then is sent; or, without
    /// [reconnecting](ClientOptions::reconnect), until the connection ends.
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
                Err(error) => tracing::warn!(%error, "the server cannot be reached"),
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

    /// Runs a connection to its end, and tells whether it was the last.
    async fn run_one(&mut self, connected: Connected<C::Socket>) -> bool {
        let Connected { socket, peer, already_read } = connected;
        // There is one connection at a time, so there is room for it.
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
    connected.unwrap_or_else(|_| Err(io::Error::new(io::ErrorKind::TimedOut, "connecting took too long")))
}

impl<P: ClientProtocol, C> Drop for Connection<P, C> {
    /// Nobody drives it any more, and nobody need wait for that.
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

/// How long to wait before the next attempt.
struct Backoff {
    first: Duration,
    max: Duration,
    /// The limit of the next one.
    limit: Duration,
}

impl Backoff {
    fn new(options: &ClientOptions) -> Self {
        let first = options.backoff.min(options.max_backoff);
        Self { first, max: options.max_backoff, limit: first }
    }

    /// After a connection that served so long, not at all if nothing was heard on it. One that served for longer than the next
    /// pause may be was worth it, and the pause is a short one.
    fn next(&mut self, served: Duration) -> Duration {
        if served > self.limit {
            self.limit = self.first;
        }
        let pause = self.limit.mul_f64(rand::random());
        self.limit = self.limit.saturating_mul(2).min(self.max);
        pause
    }
}
