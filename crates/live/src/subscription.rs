//! The handle of a subscription, and the inbox for its events.
//!
//! The driver delivers events without blocking. In mode `Snapshot` the inbox holds only the newest result. In mode `Delta` it holds
//! a bounded queue.
//!
//! **Catching up.** When the queue of deltas is full, it is cleared, and delivery stops until the next snapshot. A pause also clears the
//! queue and stops delivery, until the subscriber ends it. In both cases delivery continues with a snapshot that the subscriber
//! requests from the driver, with at most one request in flight. The driver delivers the snapshot together with the deltas after it,
//! and drops the queued events before it, so no delta is missing or delivered twice.

use std::pin::Pin;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};

use futures_core::Stream;

use crate::event_queue::EventQueue;
use crate::lock::lock;
use crate::shared::{Counters, LiveShared};
use crate::wake::catch_panic;
use crate::{Delta, Mark, QueryResult};

/// How a subscriber receives changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Mode {
    /// As snapshots of the result.
    #[default]
    Snapshot,
    /// As deltas. Aggregates have no deltas, so their changes are delivered as snapshots.
    Delta,
}

/// An event of a subscription.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Event {
    /// A snapshot of the result, which replaces the earlier one.
    Snapshot {
        /// The result.
        result: QueryResult,
        /// The position of the result.
        mark: Mark,
    },
    /// A change to the result.
    Delta {
        /// The change.
        delta: Delta,
        /// The position of the result after the change.
        mark: Mark,
    },
}

/// Why a subscription ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SubscriptionEnd {
    /// The bucket was dropped.
    #[error("the bucket was dropped")]
    BucketDropped,
    /// The named query was undefined.
    #[error("the query was undefined")]
    QueryUndefined,
    /// The result became larger than [`LiveOptions::max_result_bytes`](crate::LiveOptions::max_result_bytes).
    #[error("the result became larger than the limit")]
    ResultTooLarge,
    /// The owner exceeded [`LiveOptions::max_owner_work`](crate::LiveOptions::max_owner_work), and this was its costliest subscription.
    /// Or the query alone exceeded it in one commit.
    #[error("the subscription exceeds the work limit for commits")]
    TooCostly,
    /// The matching rows exceeded [`LiveOptions::max_owner_bytes`](crate::LiveOptions::max_owner_bytes) or
    /// [`LiveOptions::max_bytes`](crate::LiveOptions::max_bytes), and this was the largest subscription.
    #[error("the matching records exceed the memory limit")]
    TooLarge,
    /// The query could not be evaluated again after the live thread missed commits.
    #[error("the query could not be evaluated again")]
    NotEvaluated,
    /// The [`Live`](crate::Live) handle was dropped, or the store was closed.
    #[error("live queries are closed")]
    Closed,
}

/// The start of a subscription.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum First {
    /// A snapshot of the result.
    Snapshot(QueryResult),
    /// The change since the mark from which the subscription resumes. `None` if the result has not changed.
    Resumed(Option<Delta>),
}

/// The value of [`Subscription::first`] after it has been taken.
const TAKEN: First = First::Resumed(None);

/// A subscription to a live query. Dropping it ends the subscription.
#[derive(Debug)]
pub struct Subscription {
    pub(crate) id: u64,
    /// `None` after it has been taken.
    pub(crate) first: Option<Box<First>>,
    pub(crate) mark: Mark,
    pub(crate) inbox: Arc<Inbox>,
    pub(crate) shared: Arc<LiveShared>,
}

impl Subscription {
    /// Returns the first result, or the change since the mark from which the subscription resumed.
    pub fn first(&self) -> &First {
        self.first.as_deref().unwrap_or(&TAKEN)
    }

    /// Returns the [first](Self::first) result and removes it from the subscription, which frees its memory.
    pub fn take_first(&mut self) -> First {
        self.first.take().map_or(TAKEN, |first| *first)
    }

    /// Returns the position of the first result.
    pub fn mark(&self) -> Mark {
        self.mark
    }

    /// Waits for the next event. Fails when the subscription has ended and all earlier events have been received. Cancel safe: no
    /// event is lost if the future is dropped.
    pub async fn next(&mut self) -> Result<Event, SubscriptionEnd> {
        std::future::poll_fn(|context| self.poll_event(context)).await
    }

    /// Returns the next event, if there is one.
    pub fn try_next(&mut self) -> Result<Option<Event>, SubscriptionEnd> {
        let mut context = Context::from_waker(Waker::noop());
        match self.poll_event(&mut context) {
            Poll::Ready(event) => event.map(Some),
            Poll::Pending => Ok(None),
        }
    }

    /// Polls for the next event. A paused subscription is pending until it ends.
    ///
    /// The waker is called by a thread that also delivers to other subscribers, so it must return quickly. It may poll immediately.
    pub fn poll_event(&mut self, context: &mut Context<'_>) -> Poll<Result<Event, SubscriptionEnd>> {
        let mut state = self.inbox.state();
        if let Some(event) = state.events.pop() {
            return Poll::Ready(Ok(event));
        }
        if let Some(end) = state.end {
            return Poll::Ready(Err(end));
        }
        let is_registered = state.waker.as_ref().is_some_and(|waker| waker.will_wake(context.waker()));
        let before = if is_registered { None } else { state.waker.replace(context.waker().clone()) };
        let must_request = state.start_request();
        drop(state);
        // Dropped after the lock is released, because a waker may run arbitrary code.
        drop(before);
        if must_request {
            self.shared.refresh(self.id);
        }
        Poll::Pending
    }

    /// Stops delivery and drops the queued events. A paused subscription uses no memory for events. The end of the subscription is
    /// still delivered. If events were dropped, they count as one [conflation](crate::LiveStats::conflated).
    pub fn pause(&mut self) {
        if self.inbox.pause() {
            self.shared.counters.conflated.fetch_add(1, Relaxed);
        }
    }

    /// Requests a snapshot, and ends a pause. The snapshot is delivered as the next [`Event::Snapshot`], even if the result has not
    /// changed, and the events after it continue from this result. Without a pause, events that are already queued may precede it.
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
        // The waker is dropped here, and not by the driver on its thread.
        let waker = self.inbox.state().waker.take();
        drop(waker);
        self.shared.unsubscribe(self.id);
    }
}

/// The queue of events of a subscriber.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    state: Mutex<InboxState>,
}

#[derive(Debug, Default)]
struct InboxState {
    /// Empty while the subscription is paused.
    events: EventQueue,
    delivery: Delivery,
    /// Whether a request for a snapshot is in flight. It stays set during a pause, so that there is never more than one.
    is_snapshot_requested: bool,
    end: Option<SubscriptionEnd>,
    waker: Option<Waker>,
}

/// Whether events are delivered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Delivery {
    #[default]
    On,
    /// Stopped until the next snapshot.
    AwaitsSnapshot,
    /// Stopped until the subscriber requests a snapshot.
    Paused,
}

impl InboxState {
    /// Returns whether the caller must send a request for a snapshot, and marks it as sent.
    fn start_request(&mut self) -> bool {
        self.delivery == Delivery::AwaitsSnapshot && !std::mem::replace(&mut self.is_snapshot_requested, true)
    }
}

/// The deltas after a snapshot.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Following<'a> {
    /// All deltas.
    Deltas(&'a [Event]),
    /// Too many deltas: the subscriber must request another snapshot.
    Missing,
}

/// The outcome of delivering a delta.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pushed {
    /// The delta is queued.
    Queued,
    /// The queue was full. It was cleared, and the subscriber needs a snapshot.
    FellBehind,
    /// The delta was dropped, because the subscriber is paused or awaits a snapshot.
    Skipped,
}

impl Inbox {
    fn state(&self) -> MutexGuard<'_, InboxState> {
        lock(&self.state)
    }

    /// Delivers a delta. If `max` deltas are queued, all are dropped.
    pub(crate) fn push(&self, event: Event, max: usize) -> Pushed {
        let mut state = self.state();
        if state.delivery != Delivery::On {
            return Pushed::Skipped;
        }
        let mut dropped = EventQueue::Empty;
        let pushed = if state.events.len() < max.max(1) {
            state.events.push(event);
            Pushed::Queued
        } else {
            dropped = std::mem::take(&mut state.events);
            state.delivery = Delivery::AwaitsSnapshot;
            Pushed::FellBehind
        };
        wake(state);
        drop(dropped);
        pushed
    }

    /// Creates an inbox that drops events until the first result is delivered.
    pub(crate) fn awaiting_first() -> Self {
        let state =
            InboxState { delivery: Delivery::AwaitsSnapshot, is_snapshot_requested: true, ..InboxState::default() };
        Self { state: Mutex::new(state) }
    }

    /// Begins delivery after the first result, with the deltas that follow it.
    pub(crate) fn begin(&self, following: Following<'_>, max_deltas: usize, counters: &Counters) {
        let mut state = self.state();
        state.is_snapshot_requested = false;
        if let Following::Deltas(deltas) = following {
            state.delivery = Delivery::On;
            drop(state);
            self.push_all(deltas, max_deltas, counters);
        }
    }

    /// Replaces all queued events by a snapshot and the deltas after it. The events are counted before the subscriber can receive them.
    /// Does nothing but clear the request if the subscription is paused.
    pub(crate) fn replace(&self, event: Event, following: Following<'_>, max_deltas: usize, counters: &Counters) {
        let mut state = self.state();
        state.is_snapshot_requested = false;
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
            counters.events.fetch_add(u64::from(pushed == Pushed::Queued), Relaxed);
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

    /// Ends a pause. Returns whether a snapshot must be requested from the driver.
    fn refresh(&self) -> bool {
        let mut state = self.state();
        state.delivery = Delivery::AwaitsSnapshot;
        state.start_request()
    }

    /// Handles a request for a snapshot. Returns whether the subscriber still needs one: it may have received one meanwhile, or may be
    /// paused.
    pub(crate) fn needs_snapshot(&self) -> bool {
        let mut state = self.state();
        state.is_snapshot_requested = state.delivery == Delivery::AwaitsSnapshot;
        state.is_snapshot_requested
    }

    /// Ends the subscription. The subscriber receives the queued events first.
    pub(crate) fn end(&self, end: SubscriptionEnd) {
        let mut state = self.state();
        state.end.get_or_insert(end);
        wake(state);
    }
}

/// Releases the lock and wakes the subscriber, which may poll immediately.
fn wake(mut state: MutexGuard<'_, InboxState>) {
    let waker = state.waker.take();
    drop(state);
    if let Some(waker) = waker {
        catch_panic(|| waker.wake());
    }
}
