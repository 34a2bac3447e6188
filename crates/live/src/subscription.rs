//! What a subscriber holds, and what waits for it there.
//!
//! The driver puts events in, and never waits. Whoever takes results whole has the newest of them, and no other. Whoever takes
//! deltas has a bounded list of them; when it is full it is emptied, and the subscriber gets the whole result when it comes to look.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use futures_core::Stream;

use crate::driver::Shared;
use crate::waiting::Waiting;
use crate::{Delta, Mark, Whole};

/// In which form a subscriber hears of changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Mode {
    /// As whole results.
    #[default]
    Whole,
    /// As what has changed. What was computed has no parts, and comes whole.
    Delta,
}

/// What a subscriber hears.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Event {
    /// This is the result now, whatever it was.
    Whole {
        /// The result.
        whole: Whole,
        /// What it is current to.
        mark: Mark,
    },
    /// This has changed in the result.
    Delta {
        /// What has changed.
        delta: Delta,
        /// What the result is current to then.
        mark: Mark,
    },
}

/// Why a subscription has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum End {
    /// Its bucket was dropped.
    #[error("the bucket was dropped")]
    BucketDropped,
    /// Its named query was undefined.
    #[error("the query was undefined")]
    QueryUndefined,
    /// Somebody ended it.
    #[error("the permission is gone")]
    Forbidden,
    /// The live queries or the store have ended.
    #[error("live queries have ended")]
    Closed,
}

/// The first thing that a subscriber is told.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum First {
    /// The whole result.
    Whole(Whole),
    /// What has changed since it was there last; none if nothing has.
    Resumed(Option<Delta>),
}

/// What is left when the first thing has been taken.
const NOTHING: First = First::Resumed(None);

/// A query that is followed. Dropping it ends that.
#[derive(Debug)]
pub struct Subscription {
    pub(crate) id: u64,
    /// None when it has been taken.
    pub(crate) first: Option<Box<First>>,
    pub(crate) mark: Mark,
    pub(crate) inbox: Arc<Inbox>,
    pub(crate) shared: Arc<Shared>,
}

impl Subscription {
    /// The number by which others can speak of it.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The result at its beginning, or what had changed until then.
    pub fn first(&self) -> &First {
        self.first.as_deref().unwrap_or(&NOTHING)
    }

    /// The same, given away: whoever has it need not keep it here for as long as the subscription lasts.
    pub fn take_first(&mut self) -> First {
        self.first.take().map_or(NOTHING, |first| *first)
    }

    /// What the first result is current to.
    pub fn mark(&self) -> Mark {
        self.mark
    }

    /// The next event, when there is one; why there is none any more.
    pub async fn next(&mut self) -> Result<Event, End> {
        std::future::poll_fn(|context| self.poll_event(context)).await
    }

    /// The next event, if there is one.
    pub fn try_next(&mut self) -> Result<Option<Event>, End> {
        let mut context = Context::from_waker(Waker::noop());
        match self.poll_event(&mut context) {
            Poll::Ready(event) => event.map(Some),
            Poll::Pending => Ok(None),
        }
    }

    /// The next event, if there is one; else the waker is woken when there is. It may look at once, whoever wakes it.
    pub fn poll_event(&mut self, context: &mut Context<'_>) -> Poll<Result<Event, End>> {
        let mut state = self.inbox.state();
        if let Some(event) = state.events.pop() {
            return Poll::Ready(Ok(event));
        }
        if let Some(end) = state.end {
            return Poll::Ready(Err(end));
        }
        state.waker = Some(context.waker().clone());
        let asks = state.is_stale && !std::mem::replace(&mut state.has_asked, true);
        drop(state);
        if asks {
            self.shared.refresh(self.id);
        }
        Poll::Pending
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
        self.shared.leave(self.id);
    }
}

/// Where events wait for a subscriber.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    events: Waiting,
    /// Deltas were dropped: it waits for the whole result.
    is_stale: bool,
    /// It has asked for it.
    has_asked: bool,
    end: Option<End>,
    waker: Option<Waker>,
}

/// What became of a delta.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pushed {
    /// The subscriber has it.
    Given,
    /// There is no room for it, nor for those before it.
    FallsBehind,
    /// The subscriber waits for the whole result.
    IsBehind,
}

impl Inbox {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A delta, unless the subscriber is behind; then, or if there are so many already, it is for the whole result to tell.
    pub(crate) fn push(&self, event: Event, max: usize) -> Pushed {
        let mut state = self.state();
        if state.is_stale {
            return Pushed::IsBehind;
        }
        let pushed = if state.events.len() < max.max(1) {
            state.events.push(event);
            Pushed::Given
        } else {
            state.events = Waiting::Nothing;
            state.is_stale = true;
            Pushed::FallsBehind
        };
        wake(state);
        pushed
    }

    /// The whole result, in place of whatever waits. Returns whether something did.
    pub(crate) fn replace(&self, event: Event) -> bool {
        let mut state = self.state();
        let is_replaced = state.events.len() > 0;
        state.events = Waiting::One(event);
        (state.is_stale, state.has_asked) = (false, false);
        wake(state);
        is_replaced
    }

    /// There will be no more.
    pub(crate) fn end(&self, end: End) {
        let mut state = self.state();
        state.end.get_or_insert(end);
        wake(state);
    }
}

/// Wakes the subscriber, which may look at once: so the lock is given back before.
fn wake(mut state: MutexGuard<'_, State>) {
    let waker = state.waker.take();
    drop(state);
    if let Some(waker) = waker {
        waker.wake();
    }
}
