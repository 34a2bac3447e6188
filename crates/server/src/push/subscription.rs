//! Subscriptions of a connection: what their queries have to tell is pushed to its outlet.
//!
//! There is no task for a subscription. Whoever wakes it, the thread of live queries as a rule, forwards what there is: a whole
//! result to the slot of the subscription, where the newest replaces what was not sent; deltas one after the other. While too much
//! waits for the connection, deltas stay where they are; when all has been sent, the connection asks for them. If they became too
//! many meanwhile, live queries give a whole result in their place.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Wake, Waker};

use bytes::Bytes;
use serde_json::{Map, Value as Json};
use tidewire_conn::{PushError, Text};
use tidewire_live::{End, Event, Mark, Mode, Subscription, Whole};
use tidewire_store::{Filter, Query};

use crate::protocol::reply::{self, Wrap};
use crate::push::outlet::Outlet;
use crate::push::programmatic::Answered;
use crate::session::connection::Connection;
use crate::state::Core;
use crate::{Code, RequestError};

/// What a subscription follows, whoever follows it. It is kept for as long, and takes little.
#[derive(Debug)]
pub(crate) enum Source {
    Named {
        name: Box<str>,
        /// No map: they are looked at again only when somebody else logs in.
        params: Box<[(String, Json)]>,
    },
    Inline(Box<Query>),
    /// Code of the host.
    Programmatic {
        name: Box<str>,
        params: Box<Map<String, Json>>,
    },
}

impl Source {
    /// What it is called, if it has a name.
    pub(crate) fn name(&self) -> Option<&str> {
        match self {
            Self::Named { name, .. } | Self::Programmatic { name, .. } => Some(name),
            Self::Inline(_) => None,
        }
    }
}

/// A place among the subscriptions that there may be, of a connection and of all together.
#[derive(Debug)]
pub(crate) struct Place {
    core: Arc<Core>,
    of_connection: Arc<AtomicUsize>,
}

impl Place {
    /// Takes a place, if there is one.
    pub(crate) fn take(core: &Arc<Core>, of_connection: &Arc<AtomicUsize>) -> Result<Self, RequestError> {
        let limits = core.options.connection_limits;
        let full = |max, whose| {
            let message = format!("{whose} has {max} subscriptions, and there may be no more: unsubscribe from some");
            RequestError::new(Code::RateLimited, message)
        };
        let take = |counter: &AtomicUsize, max| {
            counter.fetch_update(SeqCst, SeqCst, |count| (count < max).then_some(count + 1)).is_ok()
        };
        if !take(of_connection, limits.max_subscriptions_per_connection) {
            return Err(full(limits.max_subscriptions_per_connection, "this connection"));
        }
        if !take(&core.counters.subscriptions, limits.max_total_subscriptions) {
            of_connection.fetch_sub(1, SeqCst);
            return Err(full(limits.max_total_subscriptions, "the server"));
        }
        Ok(Self { core: Arc::clone(core), of_connection: Arc::clone(of_connection) })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.of_connection.fetch_sub(1, SeqCst);
        self.core.counters.subscriptions.fetch_sub(1, SeqCst);
    }
}

/// A subscription of a connection.
#[derive(Debug)]
pub(crate) struct Forward {
    /// The number in its name, and its slot.
    pub(crate) number: u64,
    pub(crate) source: Source,
    mode: Mode,
    /// Whether its client wants to know where it is, and when and why it ends.
    is_told: bool,
    outlet: Arc<Outlet>,
    connection: Weak<Connection>,
    core: Arc<Core>,
    feed: Mutex<Feed>,
    /// Something may wait until the connection has sent what it has.
    is_behind: AtomicBool,
}

/// Where a subscription hears of changes.
#[derive(Debug)]
struct Feed {
    heard: Heard,
    /// Given back when it ends, not when the last who knows of it has forgotten it.
    place: Option<Place>,
    /// Which rows it may see.
    rows: Option<Box<Filter>>,
    /// What there was no room for. Most have room for all.
    held: Option<Box<Text>>,
}

#[derive(Debug)]
enum Heard {
    Live(Subscription),
    /// The last answer of the host's code.
    Host(Bytes),
    /// It has ended.
    Nothing,
}

impl Feed {
    /// Nothing is heard any more, and the place is another's.
    fn leave(&mut self) -> Heard {
        (self.place, self.held) = (None, None);
        std::mem::replace(&mut self.heard, Heard::Nothing)
    }
}

/// What a subscription begins with.
pub(crate) struct Beginning {
    pub(crate) number: u64,
    pub(crate) source: Source,
    pub(crate) mode: Mode,
    pub(crate) is_told: bool,
    pub(crate) rows: Option<Filter>,
    pub(crate) place: Place,
}

impl Forward {
    /// A subscription to a live query, which is silent until it is first [asked](Self::deliver).
    pub(crate) fn live(beginning: Beginning, connection: &Arc<Connection>, subscription: Subscription) -> Arc<Self> {
        Self::new(beginning, connection, Heard::Live(subscription))
    }

    /// A subscription to code of the host, which has just answered this.
    pub(crate) fn host(beginning: Beginning, connection: &Arc<Connection>, answer: Bytes) -> Arc<Self> {
        Self::new(beginning, connection, Heard::Host(answer))
    }

    fn new(beginning: Beginning, connection: &Arc<Connection>, heard: Heard) -> Arc<Self> {
        let Beginning { number, source, mode, is_told, rows, place } = beginning;
        Arc::new(Self {
            number,
            source,
            mode,
            is_told,
            outlet: Arc::clone(&connection.outlet),
            connection: Arc::downgrade(connection),
            core: Arc::clone(&place.core),
            feed: Mutex::new(Feed { heard, place: Some(place), rows: rows.map(Box::new), held: None }),
            is_behind: AtomicBool::new(false),
        })
    }

    fn feed(&self) -> MutexGuard<'_, Feed> {
        self.feed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whoever may see other rows than before has another query from now on. Returns the number of the live query to be changed.
    pub(crate) fn see(&self, rows: Option<&Filter>) -> Option<u64> {
        let mut feed = self.feed();
        if feed.rows.as_deref() == rows {
            return None;
        }
        feed.rows = rows.cloned().map(Box::new);
        // What waits was for other eyes.
        feed.held = None;
        self.outlet.take_back(self.number);
        match &feed.heard {
            Heard::Live(subscription) => Some(subscription.id()),
            _ => None,
        }
    }

    /// Forwards all that there is, and is woken when there is more.
    pub(crate) fn deliver(self: &Arc<Self>) {
        let waker = Waker::from(Arc::clone(self));
        let mut context = Context::from_waker(&waker);
        let mut feed = self.feed();
        if let Err(error) = self.forward_all(&mut feed, &mut context) {
            return self.end(feed, &error);
        }
        let is_held = feed.held.is_some();
        drop(feed);
        // Others of the connection may have waited for the room that there is.
        if !is_held
            && self.outlet.release()
            && let Some(connection) = self.connection.upgrade()
        {
            connection.catch_up();
        }
    }

    fn forward_all(&self, feed: &mut Feed, context: &mut Context<'_>) -> Result<(), RequestError> {
        loop {
            let is_delta = self.mode == Mode::Delta;
            if is_delta && self.must_wait() {
                return Ok(());
            }
            // A delta that had no room comes before the next; a whole result that had none makes way for a newer one.
            if is_delta && let Some(body) = feed.held.take() {
                self.push(&mut feed.held, *body);
            }
            if is_delta && feed.held.is_some() {
                return Ok(());
            }
            let polled = match &mut feed.heard {
                Heard::Live(subscription) => subscription.poll_event(context),
                Heard::Host(_) => Poll::Pending,
                Heard::Nothing => return Ok(()),
            };
            match polled {
                Poll::Pending => {
                    if let Some(body) = feed.held.take() {
                        self.push(&mut feed.held, *body);
                    }
                    return Ok(());
                }
                Poll::Ready(Ok(event)) => self.forward(&mut feed.held, &event)?,
                Poll::Ready(Err(end)) => return Err(why(end)),
            }
        }
    }

    /// Whether deltas have to wait until the connection has sent what it has. It asks for them then: it has something to send, or
    /// the second look finds that it has not.
    fn must_wait(&self) -> bool {
        if !self.outlet.is_above_mark() {
            return false;
        }
        self.hold_back();
        self.outlet.is_above_mark() || !self.is_behind.swap(false, SeqCst)
    }

    /// Whether something may wait until the connection has sent what it has.
    pub(crate) fn is_behind(&self) -> bool {
        self.is_behind.load(SeqCst)
    }

    /// The connection has sent what it had.
    pub(crate) fn catch_up(self: &Arc<Self>) {
        if self.is_behind.swap(false, SeqCst) {
            self.deliver();
        }
    }

    fn forward(&self, held: &mut Option<Box<Text>>, event: &Event) -> Result<(), RequestError> {
        self.check_session()?;
        let (mark, wrap, data) = match event {
            Event::Whole { whole: Whole::Json(json), mark } => {
                let wrap = if self.mode == Mode::Delta { Wrap::Reset } else { Wrap::Plain };
                (mark, wrap, json.clone())
            }
            Event::Delta { delta, mark } => (mark, Wrap::Plain, delta.encoded()),
            Event::Whole { mark, .. } => (mark, Wrap::Plain, Bytes::new()),
            // There is no other kind.
            _ => return Ok(()),
        };
        self.check_length(&data)?;
        let body = shared_body(&data, wrap, self.is_told.then_some(*mark));
        self.push(held, body);
        Ok(())
    }

    fn check_length(&self, data: &Bytes) -> Result<(), RequestError> {
        let max = self.core.options.max_result_bytes;
        if data.len() > max { Err(RequestError::too_large(max)) } else { Ok(()) }
    }

    fn check_session(&self) -> Result<(), RequestError> {
        if self.outlet.is_expired(|| self.core.store.now()) {
            return Err(RequestError::new(Code::Unauthorized, "Session expired"));
        }
        Ok(())
    }

    /// Pushes something, or holds it until the connection has sent what it has.
    fn push(&self, held: &mut Option<Box<Text>>, body: Text) {
        *held = None;
        while let Err(PushError::QueueFull) = self.try_push(body.clone()) {
            self.hold_back();
            self.outlet.mind_the_reader(&self.core);
            // It asks for it when it has sent all; if it has already, it will not.
            if self.outlet.handle.queued_bytes() > 0 || !self.is_behind.swap(false, SeqCst) {
                *held = Some(Box::new(body));
                return;
            }
        }
    }

    fn try_push(&self, body: Text) -> Result<(), PushError> {
        let message = reply::push(self.number, body);
        if self.mode == Mode::Delta {
            self.outlet.push_next(message)
        } else {
            self.outlet.push_latest(self.number, message)
        }
    }

    fn hold_back(&self) {
        self.core.counters.held_back.fetch_add(1, Relaxed);
        self.is_behind.store(true, SeqCst);
        self.outlet.hold_back();
    }

    /// Whether there is nothing more to be told.
    pub(crate) fn has_ended(&self) -> bool {
        matches!(self.feed().heard, Heard::Nothing)
    }

    /// What code of the host has answered: pushed if it is another answer than before.
    pub(crate) fn answer(&self, answered: Result<Answered, RequestError>) {
        let mut feed = self.feed();
        let Feed { heard: Heard::Host(last), held, .. } = &mut *feed else { return };
        let may_tell = |answer: &Answered| self.check_session().and_then(|()| self.check_length(&answer.text));
        let is_same = answered.as_ref().is_ok_and(|answer| answer.text == *last);
        // What is not told needs no session that is still good, as with live queries.
        if is_same {
            return;
        }
        match answered.and_then(|answer| may_tell(&answer).map(|()| answer)) {
            Ok(answer) => {
                last.clone_from(&answer.text);
                let position = self.is_told.then(|| answer.mark());
                self.push(held, reply::push_body(Some(&answer.text), Wrap::Plain, position.as_deref()));
            }
            Err(error) => self.end(feed, &error),
        }
    }

    /// It is over, by another's doing.
    pub(crate) fn revoke(&self, error: &RequestError) {
        self.end(self.feed(), error);
    }

    fn end(&self, mut feed: MutexGuard<'_, Feed>, error: &RequestError) {
        let heard = feed.leave();
        drop(feed);
        if matches!(heard, Heard::Nothing) {
            return;
        }
        drop(heard);
        let core = &self.core;
        core.counters.subscriptions_ended.fetch_add(1, Relaxed);
        self.outlet.take_back(self.number);
        let is_lost =
            || self.try_push(reply::end_body(error, core.options.expose_error_details)) == Err(PushError::QueueFull);
        if self.is_told && is_lost() {
            self.outlet.give_up(&core.counters);
        }
        if let Some(connection) = self.connection.upgrade() {
            connection.forget(self.number);
        }
    }

    /// Nobody wants to hear of it any more.
    pub(crate) fn stop(&self) {
        // It is dropped when the lock has gone.
        let heard = self.feed().leave();
        drop(heard);
        self.outlet.take_back(self.number);
    }
}

impl Wake for Forward {
    fn wake(self: Arc<Self>) {
        self.deliver();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.deliver();
    }
}

fn why(end: End) -> RequestError {
    match end {
        End::BucketDropped => RequestError::new(Code::BucketNotDefined, "the bucket was dropped"),
        End::QueryUndefined => RequestError::new(Code::QueryNotDefined, "the query was undefined"),
        _ => RequestError::new(Code::ShuttingDown, "live queries have ended"),
    }
}

/// What many subscribers of a query are told of a change is put together once: they are told one after the other.
fn shared_body(data: &Bytes, wrap: Wrap, mark: Option<Mark>) -> Text {
    thread_local! {
        static LAST: RefCell<Option<Shared>> = const { RefCell::new(None) };
    }
    struct Shared {
        /// Kept, so that no other has its address.
        data: Bytes,
        wrap: Wrap,
        mark: Option<Mark>,
        body: Text,
    }
    LAST.with_borrow_mut(|last| {
        if let Some(last) = last
            && (last.data.as_ptr(), last.data.len()) == (data.as_ptr(), data.len())
            && last.wrap == wrap
            && last.mark == mark
            && !data.is_empty()
        {
            return last.body.clone();
        }
        let position = mark.map(|mark| mark.to_string());
        let body = reply::push_body(Some(data), wrap, position.as_deref());
        *last = Some(Shared { data: data.clone(), wrap, mark, body: body.clone() });
        body
    })
}
