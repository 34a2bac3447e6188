//! A subscription of a connection: turns the events of a live query into pushes.
//!
//! A subscription has no task, so an idle one uses only a few hundred bytes. When the live thread or the thread of programmatic
//! queries wakes it, it wakes the sink of its connection, and the owner of the sink polls it. So a slow client costs the live
//! thread nothing, and only the owner of a connection adds to its queue.

use std::cell::RefCell;
use std::fmt;
use std::pin::Pin;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

use bytes::Bytes;
use serde_json::{Map, Value as Json};
use tidewire_conn::websocket::Text;
use tidewire_live::{Event, First, Mark, Mode, QueryResult, Subscription as LiveSubscription, SubscriptionEnd};
use tidewire_store::{Filter, Query};

use super::permit::SubscriptionPermit;
use super::programmatic::ComputedResult;
use super::sink::PushSink;
use crate::protocol::push::{self, PushLayout};
use crate::session::connection::Connection;
use crate::state::ServerState;
use crate::{Code, RequestError};

/// The query of a subscription.
#[derive(Debug)]
pub(crate) enum QuerySource {
    Named {
        name: Box<str>,
        /// The bucket that it reads.
        bucket: Box<str>,
        /// A slice, which uses less memory than a map. It is read only when the login of the connection changes.
        params: Box<[(String, Json)]>,
    },
    Inline(Box<Query>),
    /// A query implemented by the embedding program.
    Programmatic {
        name: Box<str>,
        params: Box<Map<String, Json>>,
    },
}

impl QuerySource {
    /// Returns the name of the query, if it has one.
    pub(crate) fn name(&self) -> Option<&str> {
        match self {
            Self::Named { name, .. } | Self::Programmatic { name, .. } => Some(name),
            Self::Inline(_) => None,
        }
    }
}

/// A subscription of a connection.
#[derive(Debug)]
pub(crate) struct Subscription {
    /// The number in its id.
    pub(crate) number: u64,
    pub(crate) source: QuerySource,
    pub(crate) mode: Mode,
    /// Whether the client opted in to positions and to a last push with the reason for the end.
    pub(crate) is_extended: bool,
    sink: Arc<dyn PushSink>,
    feed: Mutex<Feed>,
}

#[derive(Debug)]
struct Feed {
    events: EventSource,
    /// Released when the subscription ends, even if it is still referenced.
    permit: Option<SubscriptionPermit>,
    /// The filter of the rows that the subscriber may see; `None` for all rows.
    row_filter: Option<Box<Filter>>,
}

/// The source of the events of a subscription.
#[derive(Debug)]
enum EventSource {
    Live(LiveSubscription),
    /// The login of the connection has changed, and the query is being evaluated for the new one.
    Reopening(Reopening),
    Programmatic(Box<ProgrammaticResults>),
    /// Ended; the reason has not been delivered yet.
    Ending(Box<RequestError>),
    Ended,
}

/// The evaluation of a query for a new login: the live subscription, and the filter of the rows that the subscriber may see.
pub(crate) struct Reopening(Pin<Box<ReopeningFuture>>);

type ReopeningFuture = dyn Future<Output = Result<(LiveSubscription, Option<Filter>), RequestError>> + Send;

impl Reopening {
    pub(crate) fn new(
        events: impl Future<Output = Result<(LiveSubscription, Option<Filter>), RequestError>> + Send + 'static,
    ) -> Self {
        Self(Box::pin(events))
    }
}

impl fmt::Debug for Reopening {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Reopening")
    }
}

/// The results of a programmatic query.
#[derive(Debug)]
struct ProgrammaticResults {
    /// The generation of the current login. Results for other generations are ignored.
    login_generation: u64,
    /// The last result that was pushed or sent in the reply.
    last: Bytes,
    next: Option<ComputedResult>,
    is_paused: bool,
}

/// The parameters of a new subscription.
pub(crate) struct NewSubscription {
    pub(crate) number: u64,
    pub(crate) source: QuerySource,
    pub(crate) mode: Mode,
    pub(crate) is_extended: bool,
    pub(crate) row_filter: Option<Filter>,
    pub(crate) permit: SubscriptionPermit,
}

impl Subscription {
    pub(crate) fn live(
        new_subscription: NewSubscription,
        connection: &Connection,
        events: LiveSubscription,
    ) -> Arc<Self> {
        Self::new(new_subscription, connection, EventSource::Live(events))
    }

    /// Creates a subscription to a programmatic query. `last` is its first result.
    pub(crate) fn programmatic(new_subscription: NewSubscription, connection: &Connection, last: Bytes) -> Arc<Self> {
        let results = ProgrammaticResults { login_generation: 0, last, next: None, is_paused: false };
        Self::new(new_subscription, connection, EventSource::Programmatic(Box::new(results)))
    }

    fn new(new_subscription: NewSubscription, connection: &Connection, events: EventSource) -> Arc<Self> {
        let NewSubscription { number, source, mode, is_extended, row_filter, permit } = new_subscription;
        let feed = Feed { events, permit: Some(permit), row_filter: row_filter.map(Box::new) };
        let sink = Arc::clone(&connection.sink);
        Arc::new(Self { number, source, mode, is_extended, sink, feed: Mutex::new(feed) })
    }

    fn feed(&self) -> MutexGuard<'_, Feed> {
        self.feed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Polls for the body of the next push. An error is the reason for the end of the subscription. If it returns `Pending`, the sink
    /// of the connection is woken when a push is available.
    pub(crate) fn poll_push(self: &Arc<Self>, connection: &Connection) -> Poll<Result<Text, RequestError>> {
        let mut feed = self.feed();
        let waker = Waker::from(Arc::clone(self));
        let mut context = Context::from_waker(&waker);
        let polled = match &mut feed.events {
            EventSource::Live(events) => match events.poll_event(&mut context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Ok(event)) => self.encode(connection, &event),
                Poll::Ready(Err(SubscriptionEnd::ResultTooLarge)) => {
                    Err(RequestError::too_large(connection.server.options.max_result_bytes))
                }
                Poll::Ready(Err(end)) => Err(end.into()),
            },
            EventSource::Reopening(Reopening(events)) => match events.as_mut().poll(&mut context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Ok((mut events, row_filter))) => {
                    let (first, mark) = (events.take_first(), events.mark());
                    feed.row_filter = row_filter.map(Box::new);
                    feed.events = EventSource::Live(events);
                    match first {
                        First::Snapshot(result) => self.encode(connection, &Event::Snapshot { result, mark }),
                        // Unreachable: without a position the first result is a snapshot.
                        _ => Err(RequestError::new(Code::InternalError, "Internal server error")),
                    }
                }
                Poll::Ready(Err(error)) => Err(error),
            },
            EventSource::Programmatic(results) => match results.next.take() {
                None => return Poll::Pending,
                Some(computed) => self.encode_computed(connection, results, &computed),
            },
            EventSource::Ending(error) => Err((**error).clone()),
            EventSource::Ended => return Poll::Pending,
        };
        if polled.is_err() {
            let events = feed.close();
            drop(feed);
            drop(events);
            connection.server.counters.subscriptions_ended.fetch_add(1, Relaxed);
        }
        Poll::Ready(polled)
    }

    fn encode(&self, connection: &Connection, event: &Event) -> Result<Text, RequestError> {
        let (mark, layout, data) = match event {
            Event::Snapshot { result: QueryResult::Json(json), mark } => {
                let layout = if self.mode == Mode::Delta { PushLayout::Reset } else { PushLayout::Plain };
                (mark, layout, json.clone())
            }
            Event::Delta { delta, mark } => {
                let max = connection.server.options.max_result_bytes;
                let encoded = delta.encoded_within(max).ok_or_else(|| RequestError::too_large(max))?;
                (mark, PushLayout::Plain, encoded)
            }
            // An aggregate without a value.
            Event::Snapshot { mark, .. } => (mark, PushLayout::Plain, Bytes::new()),
            _ => return Err(RequestError::new(Code::InternalError, "Internal server error")),
        };
        check_sendable(connection, &data)?;
        Ok(shared_body(&data, layout, self.is_extended.then_some(*mark)))
    }

    fn encode_computed(
        &self,
        connection: &Connection,
        results: &mut ProgrammaticResults,
        computed: &ComputedResult,
    ) -> Result<Text, RequestError> {
        check_sendable(connection, &computed.json)?;
        results.last.clone_from(&computed.json);
        let position = self.is_extended.then(|| computed.position());
        Ok(push::body(&computed.json, PushLayout::Plain, position.as_deref()))
    }

    /// Drops pending events and stops delivery until the subscription is [refreshed](Self::refresh).
    pub(crate) fn pause(&self) {
        match &mut self.feed().events {
            EventSource::Live(events) => events.pause(),
            EventSource::Programmatic(results) => (results.next, results.is_paused) = (None, true),
            EventSource::Reopening(_) | EventSource::Ending(_) | EventSource::Ended => {}
        }
    }

    /// Requests a snapshot of the newest result and resumes delivery.
    pub(crate) fn refresh(&self, server: &Arc<ServerState>) {
        let mut feed = self.feed();
        match &mut feed.events {
            EventSource::Live(events) => events.refresh(),
            EventSource::Programmatic(results) => {
                // The next result is pushed even if it equals the last one, which the client may not have received.
                (results.last, results.is_paused) = (Bytes::new(), false);
                drop(feed);
                server.schedule_computation(self.number);
            }
            // A reopened subscription starts with a snapshot anyway.
            EventSource::Reopening(_) | EventSource::Ending(_) | EventSource::Ended => {}
        }
    }

    /// Accepts a result of a programmatic query for a login generation, unless it equals the last one.
    pub(crate) fn accept_result(
        self: &Arc<Self>,
        login_generation: u64,
        computed: Result<ComputedResult, RequestError>,
    ) {
        let mut feed = self.feed();
        let EventSource::Programmatic(results) = &mut feed.events else { return };
        if results.login_generation != login_generation {
            return;
        }
        match computed {
            Ok(computed) if computed.json == results.last => results.next = None,
            Ok(_) if results.is_paused => return,
            Ok(computed) => results.next = Some(computed),
            Err(error) => {
                drop(feed);
                return self.end(error);
            }
        }
        drop(feed);
        self.wake_by_ref();
    }

    /// Returns whether the subscription already has this row filter. False while it is being reopened, because that evaluation is for
    /// another caller.
    pub(crate) fn has_row_filter(&self, row_filter: Option<&Filter>) -> bool {
        let feed = self.feed();
        feed.row_filter.as_deref() == row_filter && !matches!(feed.events, EventSource::Reopening(_))
    }

    /// Replaces the source of events; the first new event is a snapshot. Over a socket, only the task that polls the subscription calls
    /// this, so [`discard_unsent`](PushSink::discard_unsent) drops no push of the new source.
    pub(crate) fn reopen(self: &Arc<Self>, reopening: Reopening, row_filter: Option<Filter>) {
        let mut feed = self.feed();
        if matches!(feed.events, EventSource::Ending(_) | EventSource::Ended) {
            return;
        }
        feed.row_filter = row_filter.map(Box::new);
        let previous = std::mem::replace(&mut feed.events, EventSource::Reopening(reopening));
        drop(feed);
        drop(previous);
        self.sink.discard_unsent(self.number);
        self.wake_by_ref();
    }

    /// Sets the login generation of a programmatic query, which must be computed again. Results for other generations are ignored.
    pub(crate) fn change_login(&self, login_generation: u64) {
        let mut feed = self.feed();
        let EventSource::Programmatic(results) = &mut feed.events else { return };
        (results.login_generation, results.next) = (login_generation, None);
        if self.sink.discard_unsent(self.number) {
            // The client has not received the last result, so the next one is pushed even if it is equal.
            results.last = Bytes::new();
        }
    }

    /// Ends the subscription with an error, which the next poll returns.
    pub(crate) fn end(self: &Arc<Self>, error: RequestError) {
        let mut feed = self.feed();
        if matches!(feed.events, EventSource::Ending(_) | EventSource::Ended) {
            return;
        }
        let events = feed.close();
        feed.events = EventSource::Ending(Box::new(error));
        drop(feed);
        drop(events);
        self.sink.discard_unsent(self.number);
        self.wake_by_ref();
    }

    /// Ends the subscription without a last push: the client has unsubscribed or disconnected.
    pub(crate) fn cancel(&self) {
        // The lock is released before the events are dropped.
        let events = self.feed().close();
        drop(events);
    }

    /// Returns whether the subscription has ended.
    pub(crate) fn has_ended(&self) -> bool {
        matches!(self.feed().events, EventSource::Ending(_) | EventSource::Ended)
    }
}

impl Feed {
    /// Ends the feed and releases the permit. Returns the events, to be dropped after the lock is released.
    fn close(&mut self) -> EventSource {
        self.permit = None;
        std::mem::replace(&mut self.events, EventSource::Ended)
    }
}

impl Wake for Subscription {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.sink.wake(self.number);
    }
}

/// Checks that a result may be sent: the session has not expired, and the result is not too large.
fn check_sendable(connection: &Connection, data: &Bytes) -> Result<(), RequestError> {
    let server = &connection.server;
    if connection.is_session_expired(|| server.store.now()) {
        return Err(RequestError::session_expired());
    }
    let max = server.options.max_result_bytes;
    if data.len() > max { Err(RequestError::too_large(max)) } else { Ok(()) }
}

/// Returns the body of a push. Subscribers of one query are polled one after another and share the body: each thread caches the last
/// one.
fn shared_body(data: &Bytes, layout: PushLayout, mark: Option<Mark>) -> Text {
    thread_local! {
        static LAST: RefCell<Option<CachedBody>> = const { RefCell::new(None) };
    }
    struct CachedBody {
        /// Kept alive, so that no other data can have the same address.
        data: Bytes,
        layout: PushLayout,
        mark: Option<Mark>,
        body: Text,
    }
    LAST.with_borrow_mut(|last| {
        if let Some(last) = last
            && (last.data.as_ptr(), last.data.len()) == (data.as_ptr(), data.len())
            && last.layout == layout
            && last.mark == mark
            && !data.is_empty()
        {
            return last.body.clone();
        }
        let position = mark.map(|mark| mark.to_string());
        let body = push::body(data, layout, position.as_deref());
        *last = Some(CachedBody { data: data.clone(), layout, mark, body: body.clone() });
        body
    })
}
