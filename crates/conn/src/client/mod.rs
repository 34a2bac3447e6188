//! Clients: the same actor, connecting out.
//!
//! A [`Client`] is a handle, a [`Connection`] drives it. All clones share one connection, and requests that wait at the same time
//! are sent in one batch.
//!
//! The [`request::Responder`] of a request travels with it: into the outbox, from there into the table of requests in flight, and
//! out of it with the reply. Wherever it is dropped, the request ends, so every request ends exactly once. A request is either
//! sent or given up, decided by one atomic step, so an error is never wrong about whether the server may have seen it. A request
//! is never sent twice.

mod connect;
mod drive;
mod request;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Semaphore, mpsc, watch};
use tokio::time::Instant;

pub use self::connect::{Connect, Connected, TcpConnector, WebSocketConnector};
pub use self::drive::Connection;
use self::drive::{Link, Outgoing, Side};
use self::request::Waiting;
pub use self::request::{Outcome, RequestError};
use crate::{Codec, FrameLike, PushHandle, Supervisor, Timeouts};

/// A framed protocol, as a client speaks it.
pub trait ClientProtocol: Send + Sync + 'static {
    /// What is read and written.
    type Frame: FrameLike;
    /// How frames become bytes.
    type Codec: Codec<Frame = Self::Frame>;

    /// The codec of a new connection.
    fn codec(&self) -> Self::Codec;

    /// What a frame from the server is.
    fn classify(&self, frame: &Self::Frame) -> Incoming;

    /// Gives a request the number by which its reply will be known: see [`Incoming::Reply`]. Not needed where replies come in
    /// the order of the requests.
    fn number(&self, request: &mut Self::Frame, number: u64) {
        let _ = (request, number);
    }

    /// The first words on every new connection: who we are, what we subscribe to. See [`is_answered`](Self::is_answered).
    fn greeting(&self) -> Vec<Self::Frame> {
        Vec::new()
    }

    /// Nothing has been heard for a [heartbeat](Timeouts::heartbeat): a ping.
    fn on_idle(&self, silent: Duration) -> Option<Self::Frame> {
        let _ = silent;
        None
    }

    /// Whether the server replies to a frame of the protocol's own, a [greeting](Self::greeting) or a [ping](Self::on_idle): then
    /// its reply is expected in its turn or by its number, and goes to nobody.
    fn is_answered(&self, frame: &Self::Frame) -> bool {
        let _ = frame;
        false
    }

    /// The last word, when the client leaves on its own account.
    fn farewell(&self) -> Option<Self::Frame> {
        None
    }
}

/// What a frame from the server is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Incoming {
    /// The reply to the oldest request without one.
    NextReply,
    /// The reply to the request with this [number](ClientProtocol::number).
    Reply(u64),
    /// Nobody asked for it: it goes to the [`Pushes`].
    Push,
    /// Nobody needs it, a pong for instance.
    Nothing,
}

/// Settings of a client, each with a default.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct ClientOptions {
    /// How long a request may take in all: to find room, to find a connection, to be sent and to be answered. Default: 10 s.
    pub request: Duration,
    /// How many requests may be unanswered; more wait. One that was given up counts until its reply comes. Default: 1024.
    pub max_in_flight: usize,
    /// How many pushes may wait to be received. When there are more, nothing is read until there is room: replies then wait
    /// behind the pushes before them, so receive pushes on a task of their own. Default: 1024.
    pub pushes: usize,
    /// How long connecting may take, handshakes included. Default: 10 s.
    pub connect: Duration,
    /// Whether a connection that broke, or could not be made, is made again. Default: yes.
    pub reconnect: bool,
    /// The pause before the second attempt to connect is up to this, and doubles with every failure. Pauses are random, from
    /// nothing to the limit, so that a thousand clients do not come back at once. Default: 100 ms.
    pub backoff: Duration,
    /// The longest pause. Default: 10 s.
    pub max_backoff: Duration,
    /// How long a connection waits for the server. Default: as for a server, but for the first frame, for which a client that
    /// has asked nothing does not wait.
    pub timeouts: Timeouts,
}

impl Default for ClientOptions {
    fn default() -> Self {
        Self {
            request: Duration::from_secs(10),
            max_in_flight: 1024,
            pushes: 1024,
            connect: Duration::from_secs(10),
            reconnect: true,
            backoff: Duration::from_millis(100),
            max_backoff: Duration::from_secs(10),
            timeouts: Timeouts { first_frame: None, ..Timeouts::default() },
        }
    }
}

/// Asks a server, over a connection that is made again when it breaks. Clones share it; when the last one is dropped, it is
/// closed.
///
/// ```
/// # use std::convert::Infallible;
/// # use tidewire_conn::{ConnectionContext, Frame, Protocol, Reply, Supervisor};
/// use bytes::Bytes;
/// use tidewire_conn::{Client, ClientOptions, ClientProtocol, Incoming, LengthDelimited, TcpConnector};
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
/// # tokio::spawn(async move { Supervisor::with_protocol(Echo).build().serve(listener).await });
/// let (client, _pushes, connection) = Client::new(Words, TcpConnector::new(addr), ClientOptions::default());
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
    shared: Arc<Shared<P>>,
    /// Its last clone tells the connection to close.
    alive: mpsc::Sender<()>,
}

struct Shared<P: ClientProtocol> {
    supervisor: Supervisor<Side<P>>,
    options: ClientOptions,
    in_flight: Arc<Semaphore>,
    link: watch::Receiver<Link<P::Frame>>,
}

impl<P: ClientProtocol> Client<P> {
    /// A client, what it is pushed, and the connection that is to be [run](Connection::run).
    pub fn new<C: Connect>(
        protocol: P,
        connector: C,
        options: ClientOptions,
    ) -> (Self, Pushes<P::Frame>, Connection<P, C>) {
        let (told, link) = watch::channel(Link::Down);
        let (push, pushes) = mpsc::channel(options.pushes.clamp(1, Semaphore::MAX_PERMITS));
        let (alive, closed) = mpsc::channel(1);
        let side = Side::new(protocol, push, told);
        let supervisor = Supervisor::with_protocol(side).timeouts(options.timeouts).build();
        let in_flight = Arc::new(Semaphore::new(options.max_in_flight.clamp(1, Semaphore::MAX_PERMITS)));
        let connection = Connection::new(supervisor.clone(), connector, options, closed);
        let shared = Arc::new(Shared { supervisor, options, in_flight, link });
        (Self { shared, alive }, Pushes { pushes }, connection)
    }

    /// Sends a request and waits for its reply, as long as [`ClientOptions::request`] says.
    pub async fn request(&self, request: P::Frame) -> Result<P::Frame, RequestError> {
        self.request_within(request, self.shared.options.request).await
    }

    /// Sends a request and waits for its reply, for so long in all. Dropping this gives it up: it is not sent if it has not
    /// been, and its reply concerns nobody else.
    pub async fn request_within(&self, request: P::Frame, limit: Duration) -> Result<P::Frame, RequestError> {
        let waiting = Waiting::default();
        let asking = async {
            let room = Arc::clone(&self.shared.in_flight).acquire_owned().await.map_err(|_| RequestError::Closed)?;
            let handle = self.handle().await?;
            let (outgoing, reply) = waiting.ask(request, room);
            // If the connection has gone meanwhile, the request is dropped, and ends thereby.
            let _ = handle.push_low_priority(outgoing).await;
            drop(handle);
            reply.await
        };
        // A limit so large that no clock has it is none.
        let asked = match Instant::now().checked_add(limit) {
            Some(deadline) => tokio::time::timeout_at(deadline, asking).await,
            None => Ok(asking.await),
        };
        asked.unwrap_or_else(|_| Err(RequestError::TimedOut { outcome: waiting.give_up() }))
    }

    /// Sends a frame that has no reply. Waits for a connection and for room, as long as [`ClientOptions::request`] says; that it
    /// returns does not mean that it has been sent.
    pub async fn send(&self, frame: P::Frame) -> Result<(), RequestError> {
        let sending = async {
            let handle = self.handle().await?;
            let pushed = handle.push_low_priority(Outgoing::without_reply(frame)).await;
            pushed.map_err(|_| RequestError::Lost { outcome: Outcome::NeverSent })
        };
        let sent = tokio::time::timeout(self.shared.options.request, sending).await;
        sent.unwrap_or(Err(RequestError::TimedOut { outcome: Outcome::NeverSent }))
    }

    /// Waits until there is a connection.
    pub async fn connected(&self) -> Result<(), RequestError> {
        self.handle().await.map(drop)
    }

    /// Whether there is a connection now.
    pub fn is_connected(&self) -> bool {
        matches!(*self.shared.link.borrow(), Link::Up(_))
    }

    /// What has happened on its connections so far.
    pub fn stats(&self) -> ClientStats {
        let stats = self.shared.supervisor.stats();
        ClientStats { unexpected_replies: self.shared.supervisor.protocol().unexpected_replies(), connections: stats }
    }

    async fn handle(&self) -> Result<PushHandle<Outgoing<P::Frame>>, RequestError> {
        let mut link = self.shared.link.clone();
        match link.wait_for(|link| !matches!(link, Link::Down)).await.as_deref() {
            Ok(Link::Up(handle)) => Ok(handle.clone()),
            _ => Err(RequestError::Closed),
        }
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

/// What has happened on the connections of a client.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClientStats {
    /// Replies that nobody waited for: their requests were given up, or there never was one.
    pub unexpected_replies: u64,
    /// Of each connection that was made, as a server counts them.
    pub connections: crate::Stats,
}

/// What a server pushes to a client, in order.
pub struct Pushes<F> {
    pushes: mpsc::Receiver<Pushed<F>>,
}

/// A frame that nobody asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pushed<F> {
    /// What was pushed.
    pub frame: F,
    /// Over which connection, counted from one. When it changes, something may have been missed.
    pub connection: u64,
}

impl<F> Pushes<F> {
    /// The next one; none when there will be no more connections.
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
