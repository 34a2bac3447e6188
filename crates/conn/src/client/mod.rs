//! Clients: the same connection actor, for connections to a server.
//!
//! A [`ClientProtocol`] distinguishes replies from pushes, and a [`Connect`] establishes connections. [`Client::builder`] combines
//! both into a [`Client`], which is a cloneable handle, and a [`Connection`], which drives it. All clones share one connection, and
//! concurrent requests are sent in one batch.
//!
//! A request is never sent twice, and ends exactly once: with its reply, or with a [`RequestError`] that says whether the server may
//! have executed it.

// The responder of a request moves with the request: into the outbox, then into the table of requests in flight, until the reply
// arrives. If the responder is dropped anywhere, the request ends with an error. A request is marked as sent or as cancelled by one
// atomic operation, so every error is right about whether the server may have executed the request.
mod connect;
mod drive;
mod request;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Semaphore, mpsc, watch};
use tokio::time::Instant;

pub use self::connect::{Connect, Connected, TcpConnector};
pub use self::drive::Connection;
use self::drive::{ClientAdapter, LinkState, Outgoing};
use self::request::PendingRequest;
pub use self::request::{Outcome, RequestError};
use crate::codec::Codec;
use crate::{FrameLike, PushError, PushHandle, PushPolicy, PushPriority, Supervisor, Timeouts};

/// The client side of a framed protocol.
pub trait ClientProtocol: Send + Sync + 'static {
    /// The unit that is read and written.
    type Frame: FrameLike;
    /// The codec between frames and bytes.
    type Codec: Codec<Frame = Self::Frame>;

    /// Returns the codec of a new connection.
    fn codec(&self) -> Self::Codec;

    /// Returns whether a frame from the server is a reply or a push.
    fn classify(&self, frame: &Self::Frame) -> Incoming;

    /// Writes the number of a request into its frame, so that its reply can be found: see [`Incoming::Reply`]. Not needed if
    /// replies come in the order of requests.
    fn number(&self, request: &mut Self::Frame, number: u64) {
        let _ = (request, number);
    }

    /// Returns the first frames of every new connection, such as a login. See [`expects_reply`](Self::expects_reply).
    fn greeting(&self) -> Vec<Self::Frame> {
        Vec::new()
    }

    /// Called when nothing has arrived for the time of a [heartbeat](Timeouts::heartbeat). A returned frame, such as a ping, is sent.
    fn on_idle(&self, silent: Duration) -> Option<Self::Frame> {
        let _ = silent;
        None
    }

    /// Whether the server replies to this frame, which is a [greeting](Self::greeting) or a [ping](Self::on_idle). The reply is
    /// matched in order or by number, like that of a request, and discarded. Default: false.
    fn expects_reply(&self, frame: &Self::Frame) -> bool {
        let _ = frame;
        false
    }

    /// Returns the last frame, when the client closes the connection.
    fn last_frame(&self) -> Option<Self::Frame> {
        None
    }
}

/// The kind of a frame from the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Incoming {
    /// The reply to the oldest request that has no reply yet.
    NextReply,
    /// The reply to the request with this [number](ClientProtocol::number).
    Reply(u64),
    /// A push, which goes to the [`Pushes`].
    Push,
    /// A frame that is discarded, such as a pong.
    Discard,
}

/// Options of a [`Client`].
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct ClientOptions {
    /// Timeout of a request, including the waits for capacity and for a connection. Default: 10 s, longer than a reconnect usually
    /// takes.
    pub request_timeout: Duration,
    /// Limit of the requests in flight; further requests wait. A cancelled request counts until its reply arrives.
    /// Default: 1024, more than a server answers in one round trip.
    pub max_in_flight: usize,
    /// Limit of the pushes that wait to be received. At the limit the client stops reading until one is received, which also delays
    /// replies: receive pushes on a separate task. Default: 1024, enough for a burst.
    pub push_capacity: usize,
    /// Timeout of an attempt to connect, including handshakes. Default: 10 s, longer than a handshake takes on a slow network.
    pub connect_timeout: Duration,
    /// Whether the client connects again when a connection breaks or an attempt to connect fails. Default: true, because servers
    /// restart.
    pub reconnect: bool,
    /// Upper bound of the pause before the second attempt to connect; it doubles with every failure. Pauses are random, from zero
    /// to the bound, so that a thousand clients do not reconnect at once. Default: 100 ms.
    pub backoff: Duration,
    /// Upper bound of all pauses. Default: 10 s, so that a client is back soon after an outage.
    pub max_backoff: Duration,
    /// Timeouts of the connection. Default: [`Timeouts::default`] without `first_frame`, because a server need not send anything
    /// before it is asked.
    pub timeouts: Timeouts,
}

impl ClientOptions {
    /// Sets [`request_timeout`](#structfield.request_timeout).
    #[must_use]
    pub fn request_timeout(mut self, request_timeout: Duration) -> Self {
        self.request_timeout = request_timeout;
        self
    }

    /// Sets [`max_in_flight`](#structfield.max_in_flight).
    #[must_use]
    pub fn max_in_flight(mut self, max_in_flight: usize) -> Self {
        self.max_in_flight = max_in_flight;
        self
    }

    /// Sets [`push_capacity`](#structfield.push_capacity).
    #[must_use]
    pub fn push_capacity(mut self, push_capacity: usize) -> Self {
        self.push_capacity = push_capacity;
        self
    }

    /// Sets [`connect_timeout`](#structfield.connect_timeout).
    #[must_use]
    pub fn connect_timeout(mut self, connect_timeout: Duration) -> Self {
        self.connect_timeout = connect_timeout;
        self
    }

    /// Sets [`reconnect`](#structfield.reconnect).
    #[must_use]
    pub fn reconnect(mut self, reconnect: bool) -> Self {
        self.reconnect = reconnect;
        self
    }

    /// Sets [`backoff`](#structfield.backoff).
    #[must_use]
    pub fn backoff(mut self, backoff: Duration) -> Self {
        self.backoff = backoff;
        self
    }

    /// Sets [`max_backoff`](#structfield.max_backoff).
    #[must_use]
    pub fn max_backoff(mut self, max_backoff: Duration) -> Self {
        self.max_backoff = max_backoff;
        self
    }

    /// Sets [`timeouts`](#structfield.timeouts).
    #[must_use]
    pub fn timeouts(mut self, timeouts: Timeouts) -> Self {
        self.timeouts = timeouts;
        self
    }
}

impl Default for ClientOptions {
    fn default() -> Self {
        Self {
            request_timeout: Duration::from_secs(10),
            max_in_flight: 1024,
            push_capacity: 1024,
            connect_timeout: Duration::from_secs(10),
            reconnect: true,
            backoff: Duration::from_millis(100),
            max_backoff: Duration::from_secs(10),
            timeouts: Timeouts::default().first_frame(None),
        }
    }
}

/// Options of one request, or of one frame without a reply: see [`Client::request_with`] and [`Client::send_with`].
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct RequestOptions {
    /// The queue of the frame. Default: [`Low`](PushPriority::Low), so that urgent frames can overtake.
    pub priority: PushPriority,
    /// What happens if the queue is full. Whatever the policy is, a frame waits for a connection, and a request also waits for
    /// [`max_in_flight`](ClientOptions::max_in_flight). Default: `None`, which means that the frame waits for capacity in the queue
    /// until the timeout.
    pub policy: Option<PushPolicy>,
    /// Timeout of the request, or of the wait for capacity if there is no reply. Default: `None`, which means
    /// [`ClientOptions::request_timeout`].
    pub timeout: Option<Duration>,
}

impl RequestOptions {
    /// Sets [`priority`](#structfield.priority).
    #[must_use]
    pub fn priority(mut self, priority: PushPriority) -> Self {
        self.priority = priority;
        self
    }

    /// Sets [`policy`](#structfield.policy).
    #[must_use]
    pub fn policy(mut self, policy: PushPolicy) -> Self {
        self.policy = Some(policy);
        self
    }

    /// Sets [`timeout`](#structfield.timeout).
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }
}

impl Default for RequestOptions {
    fn default() -> Self {
        Self { priority: PushPriority::Low, policy: None, timeout: None }
    }
}

/// A client of a server, over a connection that is re-established when it breaks. Clones share the connection, which is closed
/// when the last of them is dropped.
///
/// ```
/// # use std::convert::Infallible;
/// # use tidewire_conn::{ConnectionContext, Frame, Protocol, Reply, Supervisor};
/// use bytes::Bytes;
/// use tidewire_conn::client::{Client, ClientProtocol, Incoming, TcpConnector};
/// use tidewire_conn::codec::LengthDelimited;
///
/// struct Words;
///
/// impl ClientProtocol for Words {
///     type Frame = Frame;
///     type Codec = LengthDelimited;
///
///     fn codec(&self) -> LengthDelimited {
///         LengthDelimited::default()
///     }
///
///     fn classify(&self, _: &Frame) -> Incoming {
///         Incoming::NextReply
///     }
/// }
///
/// # struct Echo;
/// # impl Protocol for Echo {
/// #     type Frame = Frame;
/// #     type Codec = LengthDelimited;
/// #     type ProtocolError = Infallible;
/// #     fn codec(&self) -> LengthDelimited { LengthDelimited::default() }
/// #     fn on_frame(&self, frame: Frame, _: &mut ConnectionContext) -> Reply<Frame, Infallible> { Reply::Frame(frame) }
/// # }
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
/// # let addr = listener.local_addr()?.to_string();
/// # tokio::spawn(async move { Supervisor::builder(Echo).build().serve(listener).await });
/// let (client, _pushes, connection) = Client::builder(Words, TcpConnector::new(addr)).build();
/// let running = tokio::spawn(connection.run());
/// let reply = client.request(Frame::from(Bytes::from_static(b"hello"))).await?;
/// assert_eq!(reply.body(), "hello");
///
/// drop(client);
/// running.await?;
/// # Ok(())
/// # }
/// ```
pub struct Client<P: ClientProtocol> {
    shared: Arc<ClientShared<P>>,
    /// Dropped with the last clone, which closes the connection.
    alive: mpsc::Sender<()>,
}

struct ClientShared<P: ClientProtocol> {
    supervisor: Supervisor<ClientAdapter<P>>,
    options: ClientOptions,
    in_flight: Arc<Semaphore>,
    link: watch::Receiver<LinkState<P::Frame>>,
}

/// Builds a [`Client`]: see [`Client::builder`].
pub struct ClientBuilder<P: ClientProtocol, C> {
    protocol: P,
    connector: C,
    options: ClientOptions,
    dead_letters: Option<mpsc::Sender<P::Frame>>,
    keep_unsent: bool,
}

impl<P: ClientProtocol, C: Connect> ClientBuilder<P, C> {
    /// Sets the options. Default: [`ClientOptions::default`].
    #[must_use]
    pub fn options(self, options: ClientOptions) -> Self {
        Self { options, ..self }
    }

    /// Sets the channel that receives the frames dropped by a [policy](RequestOptions::policy). A frame that does not fit into it is
    /// counted and logged. Default: none, dropped frames are only counted.
    #[must_use]
    pub fn dead_letters(mut self, dead_letters: mpsc::Sender<P::Frame>) -> Self {
        self.dead_letters = Some(dead_letters);
        self
    }

    /// Sets whether frames that are queued when a connection ends are also sent to the [dead letters](Self::dead_letters). Default:
    /// false, because a caller of [`Client::request`] gets an error for its frame.
    #[must_use]
    pub fn keep_unsent(self, keep_unsent: bool) -> Self {
        Self { keep_unsent, ..self }
    }

    /// Returns the client, the receiver of pushes, and the connection, which makes progress while it is [run](Connection::run).
    pub fn build(self) -> (Client<P>, Pushes<P::Frame>, Connection<P, C>) {
        let Self { protocol, connector, options, dead_letters, keep_unsent } = self;
        let (link_sender, link) = watch::channel(LinkState::Down);
        let (push, pushes) = mpsc::channel(options.push_capacity.clamp(1, Semaphore::MAX_PERMITS));
        let (alive, closed) = mpsc::channel(1);
        let supervisor = Supervisor::builder(ClientAdapter::new(protocol, push, link_sender))
            .timeouts(options.timeouts)
            .keep_unsent(keep_unsent)
            .on_lost(move |outgoing, reason| {
                let frame = outgoing.into_lost_frame(reason);
                dead_letters.as_ref().is_none_or(|dead_letters| dead_letters.try_send(frame).is_ok())
            })
            .build();
        let in_flight = Arc::new(Semaphore::new(options.max_in_flight.clamp(1, Semaphore::MAX_PERMITS)));
        let connection = Connection::new(supervisor.clone(), connector, options, closed);
        let shared = Arc::new(ClientShared { supervisor, options, in_flight, link });
        (Client { shared, alive }, Pushes { pushes }, connection)
    }
}

impl<P: ClientProtocol, C> fmt::Debug for ClientBuilder<P, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientBuilder").field("options", &self.options).finish_non_exhaustive()
    }
}

impl<P: ClientProtocol> Client<P> {
    /// Returns a builder of a client that speaks this protocol and uses this connector. Every setting has a default.
    pub fn builder<C: Connect>(protocol: P, connector: C) -> ClientBuilder<P, C> {
        let options = ClientOptions::default();
        ClientBuilder { protocol, connector, options, dead_letters: None, keep_unsent: false }
    }

    /// Sends a request and waits for its reply, with the default [`RequestOptions`].
    ///
    /// Dropping the future cancels the request: if it has been sent, its reply is discarded, and otherwise it is not sent.
    pub async fn request(&self, request: P::Frame) -> Result<P::Frame, RequestError> {
        self.request_with(request, RequestOptions::default()).await
    }

    /// Sends a request with these options, and waits for its reply, as [`request`](Self::request) does.
    ///
    /// If the queue is full, every [policy](RequestOptions::policy) ends the request with [`RequestError::QueueFull`]. A policy that
    /// drops the frame also counts it, and passes it to the [dead letters](ClientBuilder::dead_letters).
    pub async fn request_with(&self, request: P::Frame, options: RequestOptions) -> Result<P::Frame, RequestError> {
        let pending = PendingRequest::default();
        let requesting = async {
            let permit = Arc::clone(&self.shared.in_flight).acquire_owned().await.map_err(|_| RequestError::Closed)?;
            let handle = self.handle().await?;
            let (outgoing, reply) = pending.begin(request, permit);
            // If the connection has ended, the request has been dropped, and `reply` resolves to `RequestError::Lost`.
            if push(&handle, outgoing, options).await == Err(PushError::QueueFull) {
                return Err(RequestError::QueueFull);
            }
            drop(handle);
            reply.await
        };
        let result = self.with_timeout(options, requesting).await;
        result.unwrap_or_else(|| Err(RequestError::TimedOut { outcome: pending.cancel() }))
    }

    /// Sends a frame that has no reply, with the default [`RequestOptions`].
    ///
    /// Returns when the frame is queued, which does not mean that it has been sent.
    pub async fn send(&self, frame: P::Frame) -> Result<(), RequestError> {
        self.send_with(frame, RequestOptions::default()).await
    }

    /// Sends a frame that has no reply with these options, as [`send`](Self::send) does.
    ///
    /// If the queue is full, a [policy](RequestOptions::policy) that drops the frame returns `Ok`, as
    /// [`PushHandle::try_push`] does.
    pub async fn send_with(&self, frame: P::Frame, options: RequestOptions) -> Result<(), RequestError> {
        let sending = async {
            let handle = self.handle().await?;
            push(&handle, Outgoing::without_reply(frame), options).await.map_err(|error| match error {
                PushError::QueueFull => RequestError::QueueFull,
                PushError::Closed => RequestError::Lost { outcome: Outcome::NeverSent },
            })
        };
        let sent = self.with_timeout(options, sending).await;
        sent.unwrap_or(Err(RequestError::TimedOut { outcome: Outcome::NeverSent }))
    }

    /// Runs `work` with the timeout of the request. Returns `None` if it timed out.
    async fn with_timeout<T>(&self, options: RequestOptions, work: impl Future<Output = T>) -> Option<T> {
        // A timeout beyond the range of the clock is never reached.
        match Instant::now().checked_add(options.timeout.unwrap_or(self.shared.options.request_timeout)) {
            Some(deadline) => tokio::time::timeout_at(deadline, work).await.ok(),
            None => Some(work.await),
        }
    }

    /// Waits until the client is connected.
    pub async fn connected(&self) -> Result<(), RequestError> {
        self.handle().await.map(drop)
    }

    /// Whether the client is connected.
    pub fn is_connected(&self) -> bool {
        matches!(*self.shared.link.borrow(), LinkState::Up(_))
    }

    /// Returns the counters of all connections of the client.
    pub fn stats(&self) -> ClientStats {
        let stats = self.shared.supervisor.stats();
        ClientStats { unexpected_replies: self.shared.supervisor.protocol().unexpected_replies(), connections: stats }
    }

    /// Waits until the client is connected, and returns the handle of the connection.
    async fn handle(&self) -> Result<PushHandle<Outgoing<P::Frame>>, RequestError> {
        let mut link = self.shared.link.clone();
        match link.wait_for(|link| !matches!(link, LinkState::Down)).await.as_deref() {
            Ok(LinkState::Up(handle)) => Ok(handle.clone()),
            _ => Err(RequestError::Closed),
        }
    }
}

async fn push<F: FrameLike>(
    handle: &PushHandle<Outgoing<F>>,
    outgoing: Outgoing<F>,
    options: RequestOptions,
) -> Result<(), PushError> {
    match (options.policy, options.priority) {
        (Some(policy), priority) => handle.try_push(outgoing, priority, policy),
        (None, PushPriority::High) => handle.push_high_priority(outgoing).await,
        (None, PushPriority::Low) => handle.push_low_priority(outgoing).await,
    }
}

impl<P: ClientProtocol> Clone for Client<P> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared), alive: self.alive.clone() }
    }
}

impl<P: ClientProtocol> fmt::Debug for Client<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("connected", &self.is_connected()).finish_non_exhaustive()
    }
}

/// Counters of the connections of a client.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClientStats {
    /// Replies that no caller waited for: the request was cancelled, or never existed.
    pub unexpected_replies: u64,
    /// Counters of all connections of the client.
    pub connections: crate::Stats,
}

/// The receiver of the pushes of a server, in order.
pub struct Pushes<F> {
    pushes: mpsc::Receiver<Pushed<F>>,
}

/// A frame that the server pushed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pushed<F> {
    /// The frame.
    pub frame: F,
    /// The number of the connection, counted from one. When it changes, pushes may have been lost in between.
    pub connection: u64,
}

impl<F> Pushes<F> {
    /// Returns the next push, or `None` after [`Connection::run`] has ended or the [`Connection`] was dropped.
    pub async fn recv(&mut self) -> Option<Pushed<F>> {
        self.pushes.recv().await
    }
}

impl<F> futures_core::Stream for Pushes<F> {
    type Item = Pushed<F>;

    fn poll_next(
        mut self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Self::Item>> {
        self.pushes.poll_recv(context)
    }
}

impl<F> fmt::Debug for Pushes<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pushes").field("waiting", &self.pushes.len()).finish()
    }
}
