//! The wire protocol, as the actors of connections speak it.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tidewire_conn::{
    CloseCode, CloseReason, ConnectionContext, Message, Protocol, PushHandle, Reply, ServiceOrder, Tick, WebSocket,
    WebSocketOptions,
};

use crate::ops::handler::Serving;
use crate::ops::table::Operation;
use crate::protocol::reply;
use crate::protocol::request::{Id, Incoming, Request};
use crate::push::outlet::Outlet;
use crate::session::connection::Connection;
use crate::state::Core;
use crate::{Code, RequestError};

/// Longer than any pong: what is longer is not looked at before its turn.
const LONGEST_PONG: usize = 256;

/// What a request is answered with.
pub(crate) type WireReply = Reply<Message, Infallible>;

/// The wire protocol.
#[derive(Debug, Clone)]
pub(crate) struct Wire {
    pub(crate) core: Arc<Core>,
}

/// What the actor of a connection keeps with it.
#[derive(Debug)]
struct Seat {
    connection: Arc<Connection>,
    /// Whether all that is in flight are writes, which may wait for the disk together.
    only_writes: bool,
    heartbeat: Heartbeat,
}

/// Where a connection is between two pings.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Heartbeat {
    /// Nothing is asked.
    Rest,
    /// It was asked for a sign of life then, and has not given it.
    Asked(u64),
    /// It has.
    Answered,
}

/// The seat of a connection, which it has from its beginning to its end.
fn seat(context: &mut ConnectionContext) -> Option<&mut Seat> {
    context.data.as_mut()?.downcast_mut()
}

/// What is in flight has to be done before this, unless they are writes all of them.
fn must_wait(request: &Request<'_>, context: &mut ConnectionContext) -> bool {
    let is_write = Operation::named(&request.name).is_some_and(Operation::is_write);
    let is_first = context.in_flight() == 0;
    let Some(seat) = seat(context) else { return false };
    if is_first {
        seat.only_writes = is_write;
    }
    !(is_first || is_write && seat.only_writes)
}

impl Wire {
    fn serve(&self, request: &Request<'_>, context: &mut ConnectionContext) -> WireReply {
        let Some(seat) = seat(context) else { return Reply::Close(None) };
        let connection = Arc::clone(&seat.connection);
        Serving::new(Arc::clone(&self.core), connection, request.id).serve(request, context)
    }

    /// What is not run, because its sender does not read.
    fn back_off(&self, id: Id) -> WireReply {
        self.core.counters.backpressure.fetch_add(1, Relaxed);
        let message = "too much waits to be read: read it, then ask again; the request was not run";
        self.fail(id, &RequestError::new(Code::Backpressure, message))
    }

    fn fail(&self, id: Id, error: &RequestError) -> WireReply {
        Reply::Frame(reply::error(id, error, self.core.options.expose_error_details))
    }
}

fn hear_pong(timestamp: f64, context: &mut ConnectionContext) {
    if let Some(seat) = seat(context)
        && let Heartbeat::Asked(at) = seat.heartbeat
    {
        #[expect(clippy::cast_precision_loss, reason = "milliseconds are far from where it would matter")]
        let is_answer = timestamp >= at as f64;
        if is_answer {
            seat.heartbeat = Heartbeat::Answered;
        }
    }
}

impl Protocol for Wire {
    type Frame = Message;
    type Codec = WebSocket;
    type ProtocolError = Infallible;

    const ORDER: ServiceOrder = ServiceOrder::RepliesFirst;

    fn codec(&self) -> WebSocket {
        let mut options = WebSocketOptions::default();
        let max = self.core.options.max_payload_bytes;
        (options.max_frame, options.max_message) = (max, max);
        WebSocket::server(options)
    }

    fn on_connection_setup(&self, handle: PushHandle<Message>, context: &mut ConnectionContext) {
        let outlet = Outlet::new(handle, self.core.options.backpressure);
        let (number, address) = (context.id().0, context.peer().ip().to_canonical());
        let connection = Arc::new(Connection::new(number, address, self.core.store.now(), outlet));
        self.core.connected(&connection);
        context.data = Some(Box::new(Seat { connection, only_writes: false, heartbeat: Heartbeat::Rest }));
    }

    fn greeting(&self, _: &mut ConnectionContext) -> Vec<Message> {
        vec![reply::welcome(self.core.store.now(), self.core.requires_auth())]
    }

    fn on_frame(&self, message: Message, context: &mut ConnectionContext) -> WireReply {
        let text = match &message {
            Message::Text(text) => text.body(),
            Message::Binary(_) => {
                return Reply::Close(Some(Message::close(CloseCode::UNSUPPORTED, "binary_not_supported")));
            }
            // The codec answers pings and closes.
            _ => return Reply::None,
        };
        let request = match Incoming::parse(text) {
            Ok(Incoming::Request(request)) => request,
            Ok(Incoming::Pong { timestamp }) => {
                hear_pong(timestamp, context);
                return Reply::None;
            }
            Err(error) => {
                self.core.counters.unreadable.fetch_add(1, Relaxed);
                return self.fail(Id::NONE, &error);
            }
        };
        if seat(context).is_some_and(|seat| seat.connection.outlet.is_above_mark()) {
            return self.back_off(request.id);
        }
        if !must_wait(&request, context) {
            return self.serve(&request, context);
        }
        let wire = self.clone();
        Reply::in_turn(move |context| wire.on_frame(message, context))
    }

    /// A pong is one also behind a request that takes its time.
    fn on_waiting(&self, message: &Message, context: &mut ConnectionContext) -> bool {
        let Message::Text(text) = message else { return false };
        let text = text.body();
        if text.len() > LONGEST_PONG || !text.contains("pong") {
            return false;
        }
        let Ok(Incoming::Pong { timestamp }) = Incoming::parse(text) else { return false };
        hear_pong(timestamp, context);
        true
    }

    fn on_command_end(&self, context: &mut ConnectionContext) {
        if let Some(connection) = seat(context).map(|seat| Arc::clone(&seat.connection)) {
            connection.outlet.untie(|ticket| context.is_answered(ticket));
        }
    }

    fn on_drained(&self, context: &mut ConnectionContext) {
        if let Some(seat) = seat(context) {
            let outlet = &seat.connection.outlet;
            outlet.note_drained();
            if outlet.release() {
                seat.connection.catch_up();
            }
        }
    }

    fn on_tick(&self, context: &mut ConnectionContext) -> Tick<Message> {
        let crate::Heartbeat { interval, timeout } = self.core.options.heartbeat;
        let patience = timeout.min(interval);
        let now = self.core.store.now();
        let Some(seat) = seat(context) else { return Tick::Stop };
        match seat.heartbeat {
            Heartbeat::Asked(_) => {
                self.core.counters.heartbeats_missed.fetch_add(1, Relaxed);
                Tick::Close(Some(Message::close(CloseCode::new(4001), "heartbeat_timeout")))
            }
            Heartbeat::Answered if patience < interval => {
                seat.heartbeat = Heartbeat::Rest;
                Tick::Next { frame: None, after: interval.saturating_sub(patience) }
            }
            Heartbeat::Answered | Heartbeat::Rest => {
                seat.heartbeat = Heartbeat::Asked(now);
                Tick::Next { frame: Some(reply::ping(now)), after: patience }
            }
        }
    }

    fn on_shutdown(&self, grace: Duration, _: &mut ConnectionContext) -> Option<Message> {
        let grace = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
        (grace > 0).then(|| reply::shutdown(grace))
    }

    fn last_word(&self, reason: &CloseReason<Self>, _: &mut ConnectionContext) -> Option<Message> {
        match reason {
            CloseReason::Shutdown => Some(Message::close(CloseCode::NORMAL, "server_shutdown")),
            CloseReason::Handle => Some(Message::close(CloseCode::NORMAL, "normal_closure")),
            CloseReason::Panic => Some(Message::close(CloseCode::INTERNAL, "internal_error")),
            // What is wrong with a message, the codec says itself.
            _ => None,
        }
    }

    fn on_connection_closed(&self, reason: &CloseReason<Self>, context: &mut ConnectionContext) {
        if matches!(reason, CloseReason::Panic) {
            self.core.counters.panics.fetch_add(1, Relaxed);
            tracing::error!(connection = %context.id(), "a connection panicked, and has ended");
        }
        if let Some(seat) = seat(context) {
            seat.connection.close();
            self.core.disconnected(&seat.connection);
        }
    }
}
