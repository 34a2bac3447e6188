//! The connection of a client: made, run, and made again.

use std::collections::{HashMap, VecDeque};
use std::convert::Infallible;
use std::fmt;
use std::io;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::BytesMut;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use super::request::Responder;
use super::{ClientOptions, ClientProtocol, Connect, Connected, Incoming, Pushed};
use crate::{
    Batch, CloseReason, Codec, ConnectionContext, FrameLike, Part, Protocol, PushHandle, Reply, Shutdown, Supervisor,
};

/// A frame on its way to the server, with whoever waits for its reply.
pub(super) struct Outgoing<F> {
    frame: F,
    responder: Option<Responder<F>>,
    /// Nobody waits for it any more, and it is not sent.
    given_up: bool,
}

impl<F> Outgoing<F> {
    pub(super) fn with_reply(frame: F, responder: Responder<F>) -> Self {
        Self { frame, responder: Some(responder), given_up: false }
    }

    pub(super) fn without_reply(frame: F) -> Self {
        Self { frame, responder: None, given_up: false }
    }
}

impl<F: FrameLike> FrameLike for Outgoing<F> {
    fn size(&self) -> usize {
        self.frame.size()
    }
}

/// The way to the server.
pub(super) enum Link<F: FrameLike> {
    Down,
    Up(PushHandle<Outgoing<F>>),
    /// There will be none any more.
    Closed,
}

/// The codec of the protocol, which sends nothing that was given up.
pub(super) struct Carrier<C>(C);

impl<C: Codec> Codec for Carrier<C> {
    type Frame = Outgoing<C::Frame>;
    type Error = C::Error;

    fn decode(&mut self, input: &mut BytesMut) -> Result<Option<Self::Frame>, C::Error> {
        Ok(self.0.decode(input)?.map(Outgoing::without_reply))
    }

    fn finish(&mut self, input: &BytesMut) -> Result<(), C::Error> {
        self.0.finish(input)
    }

    fn encode(&mut self, outgoing: &Self::Frame, output: &mut Batch) -> Result<(), C::Error> {
        if outgoing.given_up { Ok(()) } else { self.0.encode(&outgoing.frame, output) }
    }

    fn encode_part(
        &mut self,
        outgoing: &Self::Frame,
        part: Part,
        output: &mut Batch,
    ) -> Result<Option<Part>, C::Error> {
        if outgoing.given_up { Ok(None) } else { self.0.encode_part(&outgoing.frame, part, output) }
    }

    fn assembling(&self) -> Option<u64> {
        self.0.assembling()
    }

    fn is_midway(&self, input: &BytesMut) -> bool {
        self.0.is_midway(input)
    }

    fn control(&mut self, output: &mut Batch) {
        self.0.control(output);
    }

    fn is_over(&self) -> bool {
        self.0.is_over()
    }
}

/// What the actor of a client's connection does with frames.
pub(super) struct Side<P: ClientProtocol> {
    protocol: P,
    /// None when there will be no more connections, so that whoever receives pushes learns of it.
    pushes: Mutex<Option<mpsc::Sender<Pushed<P::Frame>>>>,
    link: watch::Sender<Link<P::Frame>>,
    unexpected_replies: AtomicU64,
}

impl<P: ClientProtocol> Side<P> {
    pub(super) fn new(
        protocol: P,
        pushes: mpsc::Sender<Pushed<P::Frame>>,
        link: watch::Sender<Link<P::Frame>>,
    ) -> Self {
        Self { protocol, pushes: Mutex::new(Some(pushes)), link, unexpected_replies: AtomicU64::new(0) }
    }

    pub(super) fn unexpected_replies(&self) -> u64 {
        self.unexpected_replies.load(Relaxed)
    }

    fn pushes(&self) -> MutexGuard<'_, Option<mpsc::Sender<Pushed<P::Frame>>>> {
        self.pushes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn answer(&self, responder: Option<Responder<P::Frame>>, reply: P::Frame) {
        if !responder.is_some_and(|responder| responder.answer(reply)) {
            self.unexpected_replies.fetch_add(1, Relaxed);
        }
    }
}

/// Who waits for a reply on a connection, and who for pushes.
struct Table<F> {
    pushes: Option<mpsc::Sender<Pushed<F>>>,
    next_number: u64,
    by_number: HashMap<u64, Responder<F>>,
    /// Their numbers, in the order in which they were sent. Those that were answered by number are left in it until they are
    /// many.
    in_order: VecDeque<u64>,
}

impl<F> Table<F> {
    fn new(pushes: Option<mpsc::Sender<Pushed<F>>>) -> Self {
        Self { pushes, next_number: 1, by_number: HashMap::new(), in_order: VecDeque::new() }
    }

    fn insert(&mut self, responder: Responder<F>) -> u64 {
        let number = self.next_number;
        self.next_number += 1;
        if self.in_order.len() > 2 * self.by_number.len() + 64 {
            self.in_order.retain(|number| self.by_number.contains_key(number));
        }
        self.by_number.insert(number, responder);
        self.in_order.push_back(number);
        number
    }

    fn oldest(&mut self) -> Option<Responder<F>> {
        while let Some(number) = self.in_order.pop_front() {
            if let Some(responder) = self.by_number.remove(&number) {
                return Some(responder);
            }
        }
        None
    }
}

impl<P: ClientProtocol> Protocol for Side<P> {
    type Frame = Outgoing<P::Frame>;
    type Codec = Carrier<P::Codec>;
    type ProtocolError = Infallible;

    fn codec(&self) -> Self::Codec {
        Carrier(self.protocol.codec())
    }

    fn on_connection_setup(&self, handle: PushHandle<Self::Frame>, context: &mut ConnectionContext) {
        context.data = Some(Box::new(Table::<P::Frame>::new(self.pushes().clone())));
        self.link.send_replace(Link::Up(handle));
    }

    fn greeting(&self, _: &mut ConnectionContext) -> Vec<Self::Frame> {
        self.protocol.greeting().into_iter().map(Outgoing::without_reply).collect()
    }

    fn on_frame(&self, incoming: Self::Frame, context: &mut ConnectionContext) -> Reply<Self::Frame, Infallible> {
        let frame = incoming.frame;
        let connection = context.id().0;
        let Some(table) = table::<P::Frame>(context) else { return Reply::Close(None) };
        match self.protocol.classify(&frame) {
            Incoming::NextReply => {
                let responder = table.oldest();
                self.answer(responder, frame);
            }
            Incoming::Reply(number) => {
                let responder = table.by_number.remove(&number);
                self.answer(responder, frame);
            }
            Incoming::Push => return push(table, Pushed { frame, connection }),
            Incoming::Nothing => {}
        }
        Reply::None
    }

    fn before_send(&self, outgoing: &mut Self::Frame, context: &mut ConnectionContext) {
        let Some(responder) = outgoing.responder.take() else { return };
        if let Some(table) = table::<P::Frame>(context)
            && responder.begin()
        {
            let number = table.insert(responder);
            self.protocol.number(&mut outgoing.frame, number);
        } else {
            outgoing.given_up = true;
        }
    }

    fn on_idle(&self, silent: Duration, _: &mut ConnectionContext) -> Option<Self::Frame> {
        self.protocol.on_idle(silent).map(Outgoing::without_reply)
    }

    fn last_word(&self, reason: &CloseReason<Self>, _: &mut ConnectionContext) -> Option<Self::Frame> {
        match reason {
            CloseReason::Shutdown => self.protocol.farewell().map(Outgoing::without_reply),
            _ => None,
        }
    }

    fn on_connection_closed(&self, reason: &CloseReason<Self>, context: &mut ConnectionContext) {
        tracing::debug!(%reason, "the connection to the server has ended");
        self.link.send_replace(Link::Down);
        // Whoever waits is told now, and not when the socket has been closed.
        context.data = None;
    }
}

fn table<F: Send + 'static>(context: &mut ConnectionContext) -> Option<&mut Table<F>> {
    context.data.as_mut()?.downcast_mut()
}

fn push<F: FrameLike>(table: &Table<F>, pushed: Pushed<F>) -> Reply<Outgoing<F>, Infallible> {
    let Some(pushes) = &table.pushes else { return Reply::None };
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
    supervisor: Supervisor<Side<P>>,
    connector: C,
    options: ClientOptions,
    /// Ends when the last client is dropped.
    closed: mpsc::Receiver<()>,
}

impl<P: ClientProtocol, C: Connect> Connection<P, C> {
    pub(super) fn new(
        supervisor: Supervisor<Side<P>>,
        connector: C,
        options: ClientOptions,
        closed: mpsc::Receiver<()>,
    ) -> Self {
        Self { supervisor, connector, options, closed }
    }

    /// Runs until the last [`Client`](super::Client) is dropped, and what is queued then is sent; or, without
    /// [reconnecting](ClientOptions::reconnect), until the connection ends.
    pub async fn run(mut self) {
        let mut pauses = Pauses::new(&self.options);
        loop {
            let connected = tokio::select! {
                connected = connect(&self.connector, self.options.connect) => connected,
                _ = self.closed.recv() => return,
            };
            let began = Instant::now();
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
            let pause = pauses.next(began.elapsed());
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                _ = self.closed.recv() => return,
            }
        }
    }

    /// Runs a connection to its end, and tells whether it was the last.
    async fn run_one(&mut self, connected: Connected<C::Socket>) -> bool {
        let Connected { socket, peer, already_read } = connected;
        let permit = match self.supervisor.admit(peer) {
            Ok(permit) => permit,
            Err(refused) => {
                // It has not ended yet: it lingers.
                tracing::debug!(%refused, "there is a connection already");
                return false;
            }
        };
        let mut running = pin!(permit.run(socket, already_read));
        tokio::select! {
            () = &mut running => false,
            _ = self.closed.recv() => {
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
        let side = self.supervisor.protocol();
        side.link.send_replace(Link::Closed);
        side.pushes().take();
    }
}

impl<P: ClientProtocol, C> fmt::Debug for Connection<P, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").finish_non_exhaustive()
    }
}

/// How long to wait before the next attempt.
struct Pauses {
    first: Duration,
    max: Duration,
    /// The limit of the next one.
    limit: Duration,
}

impl Pauses {
    fn new(options: &ClientOptions) -> Self {
        let first = options.backoff.min(options.max_backoff);
        Self { first, max: options.max_backoff, limit: first }
    }

    /// After a connection that lasted so long, or an attempt that failed after it. One that outlasts the pause before it has
    /// been worth it, and the next pause is a short one.
    fn next(&mut self, lasted: Duration) -> Duration {
        if lasted > self.limit {
            self.limit = self.first;
        }
        let pause = self.limit.mul_f64(rand::random());
        self.limit = (self.limit * 2).min(self.max);
        pause
    }
}
