//! The wire protocol over a WebSocket connection actor.
//!
//! Several writes of a connection may be in flight: they enter the store in request order and can share one fsync. Any other request waits
//! until all earlier requests are answered, so it sees their effect.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tidewire_conn::websocket::{Message, WebSocket, WebSocketOptions};
use tidewire_conn::{CloseReason, ConnectionContext, Protocol, PushHandle, Reply, ServiceOrder, Tick};
use tokio::time::Instant;

use crate::metrics::operations::RequestOutcome;
use crate::ops::HandlerReply;
use crate::ops::handler::handle;
use crate::ops::table::Effect;
use crate::protocol::disconnect::Disconnect;
use crate::protocol::request::{ClientMessage, Id, Request};
use crate::protocol::{notice, reply};
use crate::push::flow::ConsumerHealth;
use crate::push::pusher::{Pusher, SocketSink};
use crate::session::connection::Connection;
use crate::session::heartbeat::{Heartbeat, HeartbeatAction, Output};
use crate::session::in_flight::InFlight;
use crate::state::ServerState;
use crate::transport::admission::Admission;
use crate::work::MAX_INLINE_MESSAGE_BYTES;
use crate::{Backpressure, Code, RequestError};

/// Upper bound of the size of a pong. Longer messages are not inspected while they are queued.
const MAX_PONG_BYTES: usize = 256;

/// Lower bound of `max_in_flight_bytes`: the default limit of the size of a commit.
const MIN_IN_FLIGHT_BYTES: usize = 4 << 20;

/// The wire protocol over WebSocket.
#[derive(Debug, Clone)]
pub(crate) struct WebSocketProtocol {
    server: Arc<ServerState>,
    /// Requests are rejected while more bytes of pushes than this are queued.
    high_water_bytes: usize,
    /// Limit of the memory of the writes in flight of a connection.
    max_in_flight_bytes: usize,
}

/// The state of a connection actor.
#[derive(Debug)]
struct SocketState {
    connection: Arc<Connection>,
    pusher: Pusher,
    heartbeat: Heartbeat,
    /// Whether all requests in flight are writes, so that a further write need not wait for them.
    only_writes: bool,
    /// The memory of the requests in flight.
    in_flight: InFlight,
    /// The permits from the limits per address. Boxed, because most connections have none.
    admission: Option<Box<Admission>>,
}

impl SocketState {
    /// Returns whether the limits before login apply: a login is required, and the client has not logged in yet.
    fn is_before_login(&self) -> bool {
        self.admission.as_ref().is_some_and(|admission| admission.before_login.is_some())
    }

    /// Releases the permit for the time before login.
    fn release_before_login(&mut self) {
        if let Some(admission) = &mut self.admission {
            admission.before_login = None;
            self.admission.take_if(|admission| admission.is_empty());
        }
    }
}

/// Returns the state of a connection; `None` before its setup.
fn state(context: &mut ConnectionContext<Message>) -> Option<&mut SocketState> {
    context.data.as_mut()?.downcast_mut()
}

impl WebSocketProtocol {
    pub(crate) fn new(server: &Arc<ServerState>) -> Self {
        let Backpressure { max_buffered_bytes, high_water_mark, .. } = server.options.backpressure;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "a fraction of a number of bytes"
        )]
        let high_water_bytes = (max_buffered_bytes as f64 * high_water_mark.clamp(0.0, 1.0)) as usize;
        let max_in_flight_bytes = server.options.max_payload_bytes.saturating_mul(2).max(MIN_IN_FLIGHT_BYTES);
        Self { server: Arc::clone(server), high_water_bytes, max_in_flight_bytes }
    }

    /// Handles a message, now or after the requests in flight.
    fn receive(&self, message: Message, context: &mut ConnectionContext<Message>) -> Reply<Message, Infallible> {
        let text = match &message {
            Message::Text(text) => text.body(),
            Message::Binary(_) => return Reply::Close(Some(Disconnect::BINARY_NOT_SUPPORTED.frame())),
            // The codec answers ping and close frames.
            _ => return Reply::None,
        };
        if text.len() > MAX_INLINE_MESSAGE_BYTES {
            return self.serve_large(message, context);
        }
        let request = match ClientMessage::parse(text) {
            Ok(ClientMessage::Request(request)) => request,
            Ok(ClientMessage::Pong { timestamp }) => {
                handle_pong(timestamp, context);
                return Reply::None;
            }
            Err(error) => return Reply::Frame(self.reject_invalid(&error)),
        };
        let is_closing = context.is_closing();
        let is_above_high_water =
            state(context).is_some_and(|state| state.pusher.queued_bytes() > self.high_water_bytes);
        if let Some(rejected) = self.rejection(&request, is_closing, is_above_high_water) {
            return Reply::Frame(rejected);
        }
        if must_wait(&request, self.max_in_flight_bytes, context) {
            return self.in_turn(message, context);
        }
        self.serve(&request, context)
    }

    fn serve(&self, request: &Request<'_>, context: &mut ConnectionContext<Message>) -> Reply<Message, Infallible> {
        let (ticket, account) = (context.ticket(), context.account());
        let Some(SocketState { connection, pusher, in_flight, .. }) = state(context) else {
            return Reply::Close(None);
        };
        if request.operation.is_some_and(|operation| operation.causes_pushes()) {
            pusher.hold_until_reply(ticket);
        }
        self.run(request, connection, || in_flight.hold(request.memory(), &account))
    }

    /// Runs a request. If it does not complete immediately, `hold` charges its memory to the connection until it is done.
    fn run<H: Send + 'static>(
        &self,
        request: &Request<'_>,
        connection: &Arc<Connection>,
        hold: impl FnOnce() -> H,
    ) -> Reply<Message, Infallible> {
        let (id, with_details) = (request.id, self.server.options.expose_error_details);
        let message = move |outcome| match outcome {
            Ok(data) => reply::Data::into_message(data, id),
            Err(error) => reply::error(id, &error, with_details),
        };
        match handle(&self.server, connection, request) {
            Ok(HandlerReply::Ready(data)) => Reply::Frame(message(Ok(data))),
            Ok(HandlerReply::Pending(reply)) => {
                let held = hold();
                Reply::future(async move {
                    let outcome = reply.await;
                    drop(held);
                    Ok(message(outcome))
                })
            }
            Err(error) => Reply::Frame(message(Err(error))),
        }
    }

    /// Handles a large message on the pool, because parsing it takes long. Its operation is unknown until then, so it waits for the
    /// requests in flight, and later requests wait for it.
    fn serve_large(&self, message: Message, context: &mut ConnectionContext<Message>) -> Reply<Message, Infallible> {
        if context.in_flight() > 0 {
            return self.in_turn(message, context);
        }
        let (ticket, is_closing, account) = (context.ticket(), context.is_closing(), context.account());
        let Some(SocketState { connection, pusher, only_writes, .. }) = state(context) else {
            return Reply::Close(None);
        };
        *only_writes = false;
        pusher.hold_until_reply(ticket);
        let is_above_high_water = pusher.queued_bytes() > self.high_water_bytes;
        let (protocol, number, connection) = (self.clone(), connection.number, Arc::clone(connection));
        let (text, held) = (message.clone(), account.hold(size_of(&message)));
        let served = self.server.work.run(number, move |_| {
            let _runtime = protocol.server.runtime.enter();
            let request = match parse(&text) {
                Ok(ClientMessage::Request(request)) => request,
                // A valid pong is much shorter.
                Ok(ClientMessage::Pong { .. }) => return Reply::None,
                Err(error) => return Reply::Frame(protocol.reject_invalid(&error)),
            };
            match protocol.rejection(&request, is_closing, is_above_high_water) {
                Some(rejected) => Reply::Frame(rejected),
                None => protocol.run(&request, &connection, || account.hold(request.memory())),
            }
        });
        let protocol = self.clone();
        Reply::later(async move {
            let _held = held;
            Ok(served.await.unwrap_or_else(|error| {
                let id = match parse(&message) {
                    Ok(ClientMessage::Request(request)) => request.id,
                    _ => Id::NONE,
                };
                Reply::Frame(protocol.error(id, &error))
            }))
        })
    }

    /// Handles a message after all requests in flight are answered.
    fn in_turn(&self, message: Message, context: &mut ConnectionContext<Message>) -> Reply<Message, Infallible> {
        let (protocol, held) = (self.clone(), context.account().hold(size_of(&message)));
        Reply::in_turn(move |context| {
            drop(held);
            protocol.receive(message, context)
        })
    }

    /// Counts a message of a client that has not logged in. Returns an error reply if its address has sent too many. A pong counts but
    /// is not rejected, because it has no reply, and the heartbeat would disconnect the client.
    fn check_rate_before_login(&self, message: &Message, context: &mut ConnectionContext<Message>) -> Option<Message> {
        let Message::Text(_) = message else { return None };
        let SocketState { connection, .. } = state(context).filter(|state| state.is_before_login())?;
        let limits = self.server.before_login.as_ref()?;
        let error = limits.count_message(connection.address, self.server.store.now()).err()?;
        let id = match parse(message) {
            Ok(ClientMessage::Request(request)) => request.id,
            Ok(ClientMessage::Pong { .. }) => return None,
            Err(_) => Id::NONE,
        };
        self.server.counters.before_login_limited.fetch_add(1, Relaxed);
        Some(self.error(id, &error))
    }

    /// Applies the limits before login, if a login is required.
    fn apply_limits_before_login(&self, context: &mut ConnectionContext<Message>) {
        let Some(auth) = self.server.auth.as_ref().filter(|auth| auth.required) else { return };
        context.limit_input(auth.before_login.max_payload_bytes.min(self.server.options.max_payload_bytes));
        if let Some(timeout) = auth.login_timeout {
            context.tick_within(timeout);
        }
    }

    /// Removes the limits for clients before login, if the client has logged in. Called before the reply to the login is written, so the
    /// client can send large messages as soon as it has the reply.
    fn remove_limits_before_login(&self, context: &mut ConnectionContext<Message>) {
        if let Some(state) = state(context)
            && state.is_before_login()
            && state.connection.login().is_some()
        {
            state.release_before_login();
            context.limit_input(self.server.options.max_payload_bytes);
        }
    }

    /// Returns the deadline of the login; `None` if the client is logged in, or if there is no login timeout.
    fn login_deadline(&self, context: &mut ConnectionContext<Message>) -> Option<Instant> {
        let timeout = self.server.auth.as_ref()?.login_timeout?;
        let since = context.since();
        state(context).filter(|state| state.is_before_login()).and_then(|_| since.checked_add(timeout))
    }

    /// Returns an error reply if a request must not run: the connection is closing, or the client does not read its pushes.
    fn rejection(&self, request: &Request<'_>, is_closing: bool, is_above_high_water: bool) -> Option<Message> {
        if is_closing {
            let outcome = RequestOutcome::Failed(Code::ShuttingDown);
            self.server.operations.record(request.operation, outcome, Duration::ZERO);
            return Some(self.error(request.id, &RequestError::shutting_down()));
        }
        if is_above_high_water {
            self.server.counters.backpressure.fetch_add(1, Relaxed);
            let message = "too many unread pushes; the request was not run, read the pushes and try again";
            return Some(self.error(request.id, &RequestError::new(Code::Backpressure, message)));
        }
        None
    }

    /// Counts an invalid message. Returns its error reply.
    fn reject_invalid(&self, error: &RequestError) -> Message {
        self.server.counters.invalid.fetch_add(1, Relaxed);
        self.error(Id::NONE, error)
    }

    fn error(&self, id: Id, error: &RequestError) -> Message {
        reply::error(id, error, self.server.options.expose_error_details)
    }
}

fn size_of(message: &Message) -> usize {
    match message {
        Message::Text(text) => text.body().len(),
        _ => 0,
    }
}

fn parse(message: &Message) -> Result<ClientMessage<'_>, RequestError> {
    ClientMessage::parse(match message {
        Message::Text(text) => text.body(),
        _ => "",
    })
}

/// Returns whether a request must wait for the requests in flight. It need not if all of them, including this one, are writes and use
/// at most `max_bytes` of memory. If no request is in flight, updates [`SocketState::only_writes`].
fn must_wait(request: &Request<'_>, max_bytes: usize, context: &mut ConnectionContext<Message>) -> bool {
    let is_write = request.operation.is_some_and(|operation| operation.effect == Effect::Write);
    let is_first = context.in_flight() == 0;
    let Some(state) = state(context) else { return false };
    if is_first {
        state.only_writes = is_write;
        return false;
    }
    !(is_write && state.only_writes && state.in_flight.bytes().saturating_add(request.memory()) <= max_bytes)
}

fn handle_pong(timestamp: f64, context: &mut ConnectionContext<Message>) {
    if let Some(state) = state(context) {
        state.heartbeat.pong(timestamp);
    }
}

impl Protocol for WebSocketProtocol {
    type Frame = Message;
    type Codec = WebSocket;
    type ProtocolError = Infallible;

    const ORDER: ServiceOrder = ServiceOrder::RepliesFirst;

    fn codec(&self) -> WebSocket {
        let max = self.server.options.max_payload_bytes;
        WebSocket::server(WebSocketOptions::default().max_frame(max).max_message(max))
    }

    fn on_connection_setup(&self, handle: PushHandle<Message>, context: &mut ConnectionContext<Message>) {
        let sink = Arc::new(SocketSink::new(handle));
        let options = &self.server.options;
        let pusher = Pusher::new(Arc::clone(&sink), options.backpressure.max_buffered_bytes);
        let heartbeat = Heartbeat::new(&options.heartbeat, context.since());
        let (number, address) = (context.id().0, context.peer().ip().to_canonical());
        let connection = Arc::new(Connection::new(&self.server, number, address, sink));
        self.server.add_connection(&connection);
        let admission = context.data.take().and_then(|data| data.downcast::<Admission>().ok());
        let admission = admission.filter(|admission| !admission.is_empty());
        context.data = Some(Box::new(SocketState {
            connection,
            pusher,
            heartbeat,
            only_writes: false,
            in_flight: InFlight::default(),
            admission,
        }));
        self.apply_limits_before_login(context);
    }

    fn greeting(&self, _: &mut ConnectionContext<Message>) -> Vec<Message> {
        vec![notice::welcome(self.server.store.now(), self.server.requires_auth())]
    }

    fn on_frame(&self, message: Message, context: &mut ConnectionContext<Message>) -> Reply<Message, Infallible> {
        match self.check_rate_before_login(&message, context) {
            Some(rejected) => Reply::Frame(rejected),
            None => self.receive(message, context),
        }
    }

    /// Handles a pong even if it is queued behind a long request.
    fn on_waiting(&self, message: &Message, context: &mut ConnectionContext<Message>) -> bool {
        let Message::Text(text) = message else { return false };
        let text = text.body();
        if text.len() > MAX_PONG_BYTES || !text.contains("pong") {
            return false;
        }
        let Ok(ClientMessage::Pong { timestamp }) = ClientMessage::parse(text) else { return false };
        handle_pong(timestamp, context);
        true
    }

    fn on_command_end(&self, context: &mut ConnectionContext<Message>) {
        self.remove_limits_before_login(context);
        let cause = state(context).and_then(|state| state.pusher.cause());
        if cause.is_some_and(|ticket| context.is_answered(ticket))
            && let Some(state) = state(context)
        {
            state.pusher.release();
        }
    }

    /// Delivers the pushes of subscriptions that have become ready.
    fn on_wake(&self, context: &mut ConnectionContext<Message>) {
        let sent = context.counters().bytes_out;
        let Some(SocketState { connection, pusher, .. }) = state(context) else { return };
        let health = pusher.deliver(connection, sent);
        if let ConsumerHealth::CheckAfter(after) = health {
            context.tick_within(after);
        }
    }

    fn on_drained(&self, context: &mut ConnectionContext<Message>) {
        let sent = context.counters().bytes_out;
        if let Some(SocketState { connection, pusher, .. }) = state(context) {
            pusher.refresh(connection, sent);
        }
    }

    fn on_tick(&self, context: &mut ConnectionContext<Message>) -> Tick<Message> {
        let (now, sent) = (Instant::now(), context.counters().bytes_out);
        let output = Output { written: sent, unsent: context.unsent_bytes() as u64 };
        let until_login = self.login_deadline(context).map(|deadline| deadline.saturating_duration_since(now));
        if until_login == Some(Duration::ZERO) {
            self.server.counters.logins_timed_out.fetch_add(1, Relaxed);
            return Tick::Close(Some(Disconnect::LOGIN_TIMEOUT.frame()));
        }
        let Some(SocketState { connection, pusher, heartbeat, .. }) = state(context) else { return Tick::Stop };
        let frame = match heartbeat.next_action(&self.server.options.heartbeat, now, self.server.store.now(), output) {
            HeartbeatAction::Wait => None,
            HeartbeatAction::Ping(timestamp) => Some(notice::ping(timestamp)),
            HeartbeatAction::TimedOut => {
                self.server.counters.heartbeats_missed.fetch_add(1, Relaxed);
                return Tick::Close(Some(Disconnect::HEARTBEAT_TIMEOUT.frame()));
            }
        };
        let after = match pusher.check(connection, sent, now) {
            ConsumerHealth::CheckAfter(after) => after.min(heartbeat.time_until_next_action(now)),
            ConsumerHealth::Reading | ConsumerHealth::Stalled => heartbeat.time_until_next_action(now),
        };
        Tick::Next { frame, after: until_login.map_or(after, |rest| after.min(rest)) }
    }

    fn on_shutdown(&self, grace: Duration, _: &mut ConnectionContext<Message>) -> Option<Message> {
        let grace = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
        (grace > 0).then(|| notice::shutdown(grace))
    }

    fn last_frame(&self, reason: &CloseReason<Self>, _: &mut ConnectionContext<Message>) -> Option<Message> {
        match reason {
            CloseReason::Shutdown => Some(Disconnect::SERVER_SHUTDOWN.frame()),
            CloseReason::Handle => Some(Disconnect::NORMAL_CLOSURE.frame()),
            CloseReason::Panic => Some(Disconnect::INTERNAL_ERROR.frame()),
            CloseReason::MemoryLimit => Some(Disconnect::MEMORY_LIMIT.frame()),
            // The codec sends the close codes for invalid messages.
            _ => None,
        }
    }

    fn on_connection_closed(&self, reason: &CloseReason<Self>, context: &mut ConnectionContext<Message>) {
        if matches!(reason, CloseReason::Panic) {
            self.server.counters.panics.fetch_add(1, Relaxed);
            tracing::error!(connection = %context.id(), "connection closed by a panic");
        }
        if let Some(state) = state(context) {
            state.connection.close(Disconnect::NORMAL_CLOSURE);
            state.release_before_login();
            self.server.remove_connection(&state.connection);
        }
    }
}
