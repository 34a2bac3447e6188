//! The handle of a subscriber, and the inbox for its events.
//!
//! The driver puts events in and never waits. In mode `Snapshot` the inbox holds the newest result only. In mode `Delta` it holds a
//! bounded list.
//!
//! **Catching up.** When the list of deltas is full, it is emptied, and delivery stops until the whole result has come. A pause
//! stops delivery in the same way, for as long as the subscriber wants. In both cases the driver is asked for the whole result,
//! at most once at a time. The driver delivers it together with the deltas after it, and events that were delivered before it
//! are dropped, so no delta is missing and none comes twice.

use std::pin::Pin;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};

use futures_core::Stream;

use crate::event_queue::EventQueue;
use crate::lock::lock;
use crate::shared::{Counters, LiveShared};
use crate::wake::shielded;
use crate::{Delta, Mark, QueryResult};

/// How a subscriber receives changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Mode {
    /// As whole results.
    #[default]
    Snapshot,
    /// As deltas. The result of an aggregate has no parts, so it comes whole.
    Delta,
}

/// What a subscriber receives.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Event {
    /// The whole result. It replaces what the subscriber had.
    Snapshot {
        /// The result.
        result: QueryResult,
        /// The position that the result is current to.
        mark: Mark,
    },
    /// A change to the result.
    Delta {
        /// The change.
        delta: Delta,
        /// The position that the result is current to once it is applied.
        mark: Mark,
    },
}

/// Why a subscription has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SubscriptionEnd {
    /// Its bucket was dropped.
    #[error("the bucket was dropped")]
    BucketDropped,
    /// Its named query was undefined.
    #[error("the query was undefined")]
    QueryUndefined,
    /// Its whole result became larger than [`LiveOptions::max_result_bytes`](crate::LiveOptions::max_result_bytes).
    #[error("the result became larger than the limit")]
    ResultTooLarge,
    /// Its owner has used more than [`LiveOptions::max_owner_work`](crate::LiveOptions::max_owner_work), and this was its costliest
    /// subscription.
    #[error("the subscription takes too much work at commits")]
    TooCostly,
    /// The matching rows have grown beyond [`LiveOptions::max_owner_bytes`](crate::LiveOptions::max_owner_bytes) or
    /// [`LiveOptions::max_bytes`](crate::LiveOptions::max_bytes), and this was the largest subscription.
    #[error("the matching records take too much memory")]
    TooLarge,
    /// Its query could not be evaluated again after it was replaced, or after commits were missed.
    #[error("the query could not be evaluated again")]
    NotEvaluated,
    /// The live queries or the store have ended.
    #[error("live queries have ended")]
    Closed,
}

/// How a subscription begins.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum First {
    /// The whole result.
    Snapshot(QueryResult),
    /// What has changed since the mark it resumes from; `None` if nothing has.
    Resumed(Option<Delta>),
}

/// What [`Subscription::first`] returns once it has been taken.
const NOTHING: First = First::Resumed(None);

/// A subscription to a live query. Dropping it ends it.
#[derive(Debug)]
pub struct Subscription {
    pub(crate) id: u64,
    /// `None` when it has been taken.
    pub(crate) first: Option<Box<First>>,
    pub(crate) mark: Mark,
    pub(crate) inbox: Arc<Inbox>,
    pub(crate) shared: Arc<LiveShared>,
}

impl Subscription {
    /// Returns the result at its beginning, or what had changed until then.
    pub fn first(&self) -> &First {
        self.first.as_deref().unwrap_or(&NOTHING)
    }

    /// Takes the [first](Self::first) result out, so that the subscription does not keep it in memory.
    pub fn take_first(&mut self) -> First {
        self.first.take().map_or(NOTHING, |first| *first)
    }

    /// Returns the position that the first result is current to.
    pub fn mark(&self) -> Mark {
        self.mark
    }

    /// Waits for the next event. Fails when the subscription has ended, after all events that were delivered before. Cancellation
    /// safe.
    pub async fn next(&mut self) -> Result<Event, SubscriptionEnd> {
        std::future::poll_fn(|context| self.poll_event(context)).await
    }

    /// Returns the next event if it has come.
    pub fn try_next(&mut self) -> Result<Option<Event>, SubscriptionEnd> {
        let mut context = Context::from_waker(Waker::noop());
        match self.poll_event(&mut context) {
            Poll::Ready(event) => event.map(Some),
            Poll::Pending => Ok(None),
        }
    }

    /// Polls for the next event. While the subscription is paused it is pending, until the subscription ends.
    ///
    /// The waker is called by a thread that delivers to other subscribers too, so it must be quick. It may poll at once.
    pub fn poll_event(&mut self, context: &mut Context<'_>) -> Poll<Result<Event, SubscriptionEnd>> {
        let mut state = self.inbox.state();
        if let Some(event) = state.events.pop() {
            return Poll::Ready(Ok(event));
        }
        if let Some(end) = state.end {
            return Poll::Ready(Err(end));
        }
        let is_known = state.waker.as_ref().is_some_and(|waker| waker.will_wake(context.waker()));
        let before = if is_known { None } else { state.waker.replace(context.waker().clone()) };
        let must_ask = state.must_ask();
        drop(state);
        // Not under the lock: a waker may own anything.
        drop(before);
        if must_ask {
            self.shared.refresh(self.id);
        }
        Poll::Pending
    }

    /// Stops delivery and drops the events that wait. Nothing is kept while it is paused, however many commits there are. The end of
    /// the subscription is still delivered. Events that were dropped count as
    /// [conflated](crate::LiveStats::conflated), once.
    pub fn pause(&mut self) {
        if self.inbox.pause() {
            self.shared.counters.conflated.fetch_add(1, Relaxed);
        }
    }

    /// Asks for the whole result, and ends a pause. The result comes as the next [`Event::Snapshot`], also if nothing has changed, and
    /// later events go on from there. Events that already wait may come before it, unless there was a pause.
    pub fn refresh(&mut self) {
        if self.inbox.refresh() {
            self.shared.refresh(self.id);
        }
    }
}

impl Stream for Subscription {
    type Item = Event;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Event>> {
        self.poll_event(context).map(Result::ok)
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        // The driver would otherwise drop the waker, on its own thread.
        let waker = self.inbox.state().waker.take();
        drop(waker);
        self.shared.unsubscribe(self.id);
    }
}

/// Where events wait for a subscriber.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    state: Mutex<InboxState>,
}

#[derive(Debug, Default)]
struct InboxState {
    /// Empty while the subscription is paused.
    events: EventQueue,
    delivery: Delivery,
    /// The driver has a request for the whole result that it has not yet answered. It survives a pause, so that there is never
    /// more than one request of a subscriber.
    has_asked: bool,
    end: Option<SubscriptionEnd>,
    waker: Option<Waker>,
}

/// Whether events are delivered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Delivery {
    #[default]
    On,
    /// Not before the whole result, which the subscriber needs.
    AwaitsSnapshot,
    /// Not before the subscriber asks for the whole result.
    Paused,
}

impl InboxState {
    /// Whether the driver has to be asked for the whole result. Returns true once until the driver has answered.
    fn must_ask(&mut self) -> bool {
        self.delivery == Delivery::AwaitsSnapshot && !std::mem::replace(&mut self.has_asked, true)
    }
}

/// The deltas after a whole result.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Following<'a> {
    /// All of them.
    Deltas(&'a [Event]),
    /// They are too many: the subscriber has to ask for the whole result again.
    Missing,
}

/// The outcome of delivering a delta.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pushed {
    /// The subscriber has it.
    Given,
    /// It was dropped with those that waited, since there were too many: the subscriber needs the whole result.
    FellBehind,
    /// It was dropped, since the subscriber is paused or needs the whole result.
    Skipped,
}

impl Inbox {
    fn state(&self) -> MutexGuard<'_, InboxState> {
        lock(&self.state)
    }

    /// Delivers a delta. With more than `max` of them, all are dropped.
    pub(crate) fn push(&self, event: Event, max: usize) -> Pushed {
        let mut state = self.state();
        if state.delivery != Delivery::On {
            return Pushed::Skipped;
        }
        let mut dropped = EventQueue::Empty;
        let pushed = if state.events.len() < max.max(1) {
            state.events.push(event);
            Pushed::Given
        } else {
            dropped = std::mem::take(&mut state.events);
            state.delivery = Delivery::AwaitsSnapshot;
            Pushed::FellBehind
        };
        wake(state);
        drop(dropped);
        pushed
    }

    /// An inbox that takes no events before the first result.
    pub(crate) fn awaiting_first() -> Self {
        let state = InboxState { delivery: Delivery::AwaitsSnapshot, has_asked: true, ..InboxState::default() };
        Self { state: Mutex::new(state) }
    }

    /// Begins delivery after the first result, with the deltas that follow it.
    pub(crate) fn begin(&self, following: Following<'_>, max_deltas: usize, counters: &Counters) {
        let mut state = self.state();
        state.has_asked = false;
        if let Following::Deltas(deltas) = following {
            state.delivery = Delivery::On;
            drop(state);
            self.push_all(deltas, max_deltas, counters);
        }
    }

    /// Delivers the whole result and the deltas that follow it, in place of all events that wait. They are counted before the
    /// subscriber can see them. A paused subscription does not take them.
    pub(crate) fn replace(&self, event: Event, following: Following<'_>, max_deltas: usize, counters: &Counters) {
        let mut state = self.state();
        state.has_asked = false;
        if state.delivery == Delivery::Paused {
            return;
        }
        let replaced = std::mem::replace(&mut state.events, EventQueue::One(event));
        state.delivery = match following {
            Following::Deltas(_) => Delivery::On,
            Following::Missing => Delivery::AwaitsSnapshot,
        };
        counters.events.fetch_add(1, Relaxed);
        counters.conflated.fetch_add(u64::from(replaced.len() > 0), Relaxed);
        wake(state);
        if let Following::Deltas(deltas) = following {
            self.push_all(deltas, max_deltas, counters);
        }
    }

    fn push_all(&self, deltas: &[Event], max_deltas: usize, counters: &Counters) {
        for delta in deltas {
            let pushed = self.push(delta.clone(), max_deltas);
            counters.events.fetch_add(u64::from(pushed == Pushed::Given), Relaxed);
            counters.conflated.fetch_add(u64::from(pushed == Pushed::FellBehind), Relaxed);
        }
    }

    /// Stops delivery. Returns whether events were dropped.
    fn pause(&self) -> bool {
        let mut state = self.state();
        state.delivery = Delivery::Paused;
        let dropped = std::mem::take(&mut state.events);
        drop(state);
        dropped.len() > 0
    }

    /// Ends a pause. Returns whether the driver has to be asked for the whole result.
    fn refresh(&self) -> bool {
        let mut state = self.state();
        state.delivery = Delivery::AwaitsSnapshot;
        state.must_ask()
    }

    /// Whether the subscriber still needs the whole result: it may have been given one, or may have paused.
    pub(crate) fn needs_snapshot(&self) -> bool {
        let mut state = self.state();
        state.has_asked = state.delivery == Delivery::AwaitsSnapshot;
        state.has_asked
    }

    /// Ends the subscription, after the events that wait.
    pub(crate) fn end(&self, end: SubscriptionEnd) {
        let mut state = self.state();
        state.end.get_or_insert(end);
        wake(state);
    }
}

/// Wakes the subscriber, without the lock: it may poll at once.
fn wake(mut state: MutexGuard<'_, InboxState>) {
    let waker = state.waker.take();
    drop(state);
    if let Some(waker) = waker {
        shielded(|| waker.wake());
    }
}
