//! Submission: the budget, the overflow policy, and follow-up messages.
//!
//! A follow-up inherits the budget of the message that caused it. So a chain of messages makes progress however full the pool is,
//! and no worker waits for budget. A message that has passed its budget on and then fails is retried only if there is other
//! budget: the bound always holds.
#![expect(
    clippy::inline_always,
    reason = "a call that is not inlined copies the message: measured 1.2 to 1.8 times the CPU"
)]

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Poll, Wake, Waker};

use super::{Engine, Phase, count};
use crate::ask::{Asked, both};
use crate::budget::{Amount, Budget, Scope};
use crate::message::{Delivery, Envelope};
use crate::sync::{Ordering, lock, thread, thread_local};
use crate::{Event, Key, Merge, Message, Overflow, Placement, Reason, SubmitError, Submitted};

/// Who submits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Origin {
    Outside,
    /// A handler. Its message may be about to be replaced by the follow-up, and then no longer counts for its key.
    Handler {
        replaces: Option<(Key, usize)>,
    },
}

/// A message that is being submitted. It is passed by reference, because moving it in and out of results costs as much as queueing
/// it.
struct Offer<P> {
    key: Key,
    bytes: usize,
    /// Taken out when it is accepted.
    envelope: Option<Envelope<P>>,
}

/// Why a message was not accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Refusal {
    Full(Scope),
    TooLarge,
    Closed,
}

/// How often a thread that may block yields before it blocks: budget is returned in batches, and soon if handlers are quick.
const YIELDS: u32 = if cfg!(loom) { 0 } else { 16 };

impl<P: Send + 'static> Engine<P> {
    #[inline(always)]
    fn prepare(&self, message: Message<P>, asker: Option<Arc<dyn Asked>>) -> Offer<P> {
        let (key, bytes) = (message.key, (self.size)(&message.payload));
        let submitted = if self.timed { self.clock.nanos() } else { 0 };
        let envelope = Envelope::seal(Delivery { message, attempts: 0, asker }, bytes, submitted);
        Offer { key, bytes, envelope: Some(envelope) }
    }

    /// Accepts a message or not, without waiting.
    pub(crate) fn try_submit(
        &self,
        message: Message<P>,
        asker: Option<Arc<dyn Asked>>,
    ) -> Result<Submitted, SubmitError<P>> {
        let mut offer = self.prepare(message, asker);
        let ended = self.accept(&mut offer);
        self.counted(ended, offer)
    }

    /// As [`try_submit`](Self::try_submit), but waits for budget if that is the policy.
    pub(crate) async fn submit(
        &self,
        message: Message<P>,
        asker: Option<Arc<dyn Asked>>,
    ) -> Result<Submitted, SubmitError<P>> {
        let mut offer = self.prepare(message, asker);
        let mut ended = self.accept(&mut offer);
        if self.may_wait(ended) {
            ended = self.wait(&mut offer).await;
        }
        self.counted(ended, offer)
    }

    /// As [`submit`](Self::submit), on a thread that may block.
    #[inline]
    pub(crate) fn submit_blocking(&self, message: Message<P>) -> Result<Submitted, SubmitError<P>> {
        let mut offer = self.prepare(message, None);
        let mut ended = self.accept(&mut offer);
        if self.may_wait(ended) {
            ended = self.wait_blocking(&mut offer);
        }
        self.counted(ended, offer)
    }

    fn may_wait(&self, ended: Result<Submitted, Refusal>) -> bool {
        matches!((ended, &self.overflow), (Err(Refusal::Full(_)), Overflow::Wait))
    }

    async fn wait(&self, offer: &mut Offer<P>) -> Result<Submitted, Refusal> {
        let mut place = None;
        poll_fn(|context| {
            // Offered again after registering, because budget that was returned before that causes no wake-up.
            for registered in [false, true] {
                match self.accept(offer) {
                    Err(Refusal::Full(scope)) if !registered => {
                        Place::hold(&mut place, &self.budget, scope).register(context.waker());
                    }
                    Err(Refusal::Full(_)) => {}
                    ended => return Poll::Ready(ended),
                }
            }
            Poll::Pending
        })
        .await
    }

    #[cold]
    fn wait_blocking(&self, offer: &mut Offer<P>) -> Result<Submitted, Refusal> {
        for _ in 0..YIELDS {
            if self.budget.fits(Amount::new(1, offer.bytes)) {
                break;
            }
            thread::yield_now();
        }
        block_on(self.wait(offer))
    }

    /// Counts the end of a submission.
    #[inline(always)]
    fn counted(&self, ended: Result<Submitted, Refusal>, offer: Offer<P>) -> Result<Submitted, SubmitError<P>> {
        match ended {
            Ok(Submitted::Merged) => {
                count(&self.counters.merged);
                self.observe(Event::Merged);
                Ok(Submitted::Merged)
            }
            Ok(submitted) => {
                self.observe(Event::Submitted);
                Ok(submitted)
            }
            Err(refusal) => Err(self.refused(refusal, offer)),
        }
    }

    #[cold]
    fn refused(&self, refusal: Refusal, offer: Offer<P>) -> SubmitError<P> {
        count(&self.counters.rejected);
        self.observe(Event::Rejected);
        let message = offer.envelope.expect("only an accepted message is taken out").open().message;
        match refusal {
            Refusal::Full(_) => SubmitError::Full(message),
            Refusal::TooLarge => SubmitError::TooLarge(message),
            Refusal::Closed => SubmitError::Closed(message),
        }
    }

    /// Accepts a follow-up if there is budget for it: that of the message being handled, or unused budget.
    pub(crate) fn follow_up(
        &self,
        message: Message<P>,
        key: Key,
        own: &mut Option<Amount>,
        asker: Option<Arc<dyn Asked>>,
    ) -> Result<(), SubmitError<P>> {
        let mut offer = self.prepare(message, asker);
        let ended = self.accept_follow_up(&mut offer, key, own);
        self.counted(ended, offer).map(|_| ())
    }

    fn accept_follow_up(&self, offer: &mut Offer<P>, key: Key, own: &mut Option<Amount>) -> Result<Submitted, Refusal> {
        let bytes = offer.bytes;
        if bytes > self.largest() {
            return Err(Refusal::TooLarge);
        }
        // The budget of the message being handled first, enlarged if need be.
        let inherited = own.filter(|own| {
            let more = bytes.saturating_sub(own.bytes());
            more == 0 || self.budget.try_take(Amount::new(0, more))
        });
        if inherited.is_none() && !self.budget.try_take(Amount::new(1, bytes)) {
            return Err(if self.is_closed() { Refusal::Closed } else { Refusal::Full(Scope::Total) });
        }
        let replaces = inherited.map(|own| (key, own.bytes()));
        let placed = self.place(offer, Origin::Handler { replaces });
        let unused = match (placed, inherited) {
            (Ok(()), Some(inherited)) => {
                *own = None;
                Amount::new(0, inherited.bytes().saturating_sub(bytes))
            }
            (Ok(()), None) => Amount::default(),
            (Err(_), Some(inherited)) => Amount::new(0, bytes.saturating_sub(inherited.bytes())),
            (Err(_), None) => Amount::new(1, bytes),
        };
        if unused != Amount::default() {
            self.give_back(unused);
        }
        placed.map(|()| Submitted::Queued)
    }

    /// The size of the largest message that can be accepted.
    fn largest(&self) -> usize {
        self.key_limit.map_or(self.budget.limit().bytes(), |limit| limit.bytes)
    }

    #[inline(always)]
    fn accept(&self, offer: &mut Offer<P>) -> Result<Submitted, Refusal> {
        if offer.bytes > self.largest() {
            return Err(Refusal::TooLarge);
        }
        let wanted = Amount::new(1, offer.bytes);
        let refusal = if self.budget.try_take(wanted) {
            match self.place(offer, Origin::Outside) {
                Ok(()) => return Ok(Submitted::Queued),
                Err(refusal) => {
                    self.give_back(wanted);
                    refusal
                }
            }
        } else {
            Refusal::Full(Scope::Total)
        };
        self.overflow(offer, refusal)
    }

    #[cold]
    fn overflow(&self, offer: &mut Offer<P>, refusal: Refusal) -> Result<Submitted, Refusal> {
        // A waiting submission reads this after it has registered, and closing wakes all that have, so it notices the end.
        if self.phase() != Phase::Open {
            return Err(Refusal::Closed);
        }
        match (&self.overflow, refusal) {
            (Overflow::DropOldest, Refusal::Full(scope)) => self.displace(offer, scope),
            (Overflow::Coalesce(merge), Refusal::Full(scope)) => self.coalesce(offer, scope, &**merge),
            _ => Err(refusal),
        }
    }

    /// Queues a message whose budget is taken, unless its key is full or the pool has closed.
    #[inline(always)]
    fn place(&self, offer: &mut Offer<P>, origin: Origin) -> Result<(), Refusal> {
        let home = self.home(offer.key);
        let Some(limit) = self.key_limit else { return self.append(home, offer, origin) };

        let shard = &self.shards[home];
        let mut stripe = lock(&shard.stripe);
        shard.sort_in(&mut stripe);
        let (mut messages, mut bytes) = stripe.load(offer.key);
        if let Origin::Handler { replaces: Some((key, size)) } = origin
            && key == offer.key
        {
            (messages, bytes) = (messages - 1, bytes - size);
        }
        if messages + 1 > limit.messages || bytes + offer.bytes > limit.bytes {
            return Err(Refusal::Full(Scope::Key(offer.key)));
        }
        self.append(home, offer, origin)
    }

    #[inline(always)]
    fn append(&self, home: usize, offer: &mut Offer<P>, origin: Origin) -> Result<(), Refusal> {
        let shard = &self.shards[home];
        let mut intake = lock(&shard.intake);
        let last = if origin == Origin::Outside { Phase::Open } else { Phase::Draining };
        if intake.phase > last {
            return Err(Refusal::Closed);
        }
        if let Some(envelope) = offer.envelope.take() {
            intake.queue.push_back(envelope);
        }
        intake.accepted += 1;
        shard.pending.store(intake.queue.len(), Ordering::Relaxed);
        let wake = match self.placement {
            Placement::Moving => self.idle.lacks_searchers(),
            Placement::Pinned => self.idle.sleeps(home),
        };
        drop(intake);
        if wake {
            self.wake(home);
        }
        Ok(())
    }

    #[cold]
    fn wake(&self, home: usize) {
        match self.placement {
            Placement::Moving => self.idle.wake_any(home),
            Placement::Pinned => self.idle.wake(home),
        }
    }

    /// Drops older messages until there is budget.
    fn displace(&self, offer: &mut Offer<P>, mut scope: Scope) -> Result<Submitted, Refusal> {
        let wanted = Amount::new(1, offer.bytes);
        let mut dropped = 0;
        loop {
            let Some(victim) = self.victim(offer.key, scope) else { return Err(Refusal::Full(scope)) };
            dropped += 1;
            let budget = Amount::new(1, victim.bytes);
            count(&self.counters.displaced);
            self.observe(Event::Displaced);
            self.bury(victim.open(), Reason::Displaced);
            // Last, because a pool that drains is empty when all budget is back.
            self.give_back(budget);

            if !self.budget.try_take(wanted) {
                scope = Scope::Total;
                continue;
            }
            match self.place(offer, Origin::Outside) {
                Ok(()) => return Ok(Submitted::Displacing(dropped)),
                Err(refusal) => {
                    self.give_back(wanted);
                    let Refusal::Full(other) = refusal else { return Err(refusal) };
                    scope = other;
                }
            }
        }
    }

    /// The oldest queued message of the key or, if the whole pool is full, of the key that has waited longest: at the same
    /// home, or else at any.
    fn victim(&self, key: Key, scope: Scope) -> Option<Envelope<P>> {
        let home = self.home(key);
        let others = if scope == Scope::Total { self.shards.len() } else { 1 };
        (home..home + others).map(|number| number % self.shards.len()).find_map(|number| {
            let shard = &self.shards[number];
            let mut stripe = lock(&shard.stripe);
            shard.sort_in(&mut stripe);
            match scope {
                Scope::Total => stripe.pop_oldest(key).or_else(|| stripe.pop_oldest_of_any()),
                Scope::Key(_) => stripe.pop_oldest(key),
            }
        })
    }

    /// Merges a message into the newest of its key. The budget for the bytes of both is taken before they are merged.
    fn coalesce(&self, offer: &mut Offer<P>, scope: Scope, merge: &Merge<P>) -> Result<Submitted, Refusal> {
        let full = Err(Refusal::Full(scope));
        let (key, bytes) = (offer.key, offer.bytes);
        let Some(mut extra) = Extra::take(self, bytes) else { return full };
        let shard = &self.shards[self.home(key)];
        let mut stripe = lock(&shard.stripe);
        shard.sort_in(&mut stripe);
        let key_full = self.key_limit.is_some_and(|limit| stripe.load(key).1 + bytes > limit.bytes);
        let Some(queued) = stripe.newest(key).filter(|_| !key_full) else { return full };
        let Some(Delivery { message, asker, .. }) = offer.envelope.take().map(Envelope::open) else { return full };
        merge(&mut queued.payload, message.payload);
        if let Some(second) = asker {
            let asker = queued.asker();
            *asker = Some(match asker.take() {
                Some(first) => both(first, second),
                None => second,
            });
        }
        // If a function makes more of two payloads than they were, their sum counts.
        let before = queued.bytes;
        let after = (self.size)(&queued.payload).min(before + bytes);
        queued.bytes = after;
        stripe.resize(key, before, after);
        drop(stripe);
        extra.spend(before, after);
        Ok(Submitted::Merged)
    }
}

/// Budget for bytes. The unspent part is returned when dropped, also after a panic.
struct Extra<'a, P: Send + 'static> {
    engine: &'a Engine<P>,
    bytes: usize,
}

impl<'a, P: Send + 'static> Extra<'a, P> {
    fn take(engine: &'a Engine<P>, bytes: usize) -> Option<Self> {
        engine.budget.try_take(Amount::new(0, bytes)).then(|| Self { engine, bytes })
    }

    /// A message has changed its size, and has not grown by more than this.
    fn spend(&mut self, before: usize, after: usize) {
        self.bytes = self.bytes + before - after;
    }
}

impl<P: Send + 'static> Drop for Extra<'_, P> {
    fn drop(&mut self) {
        self.engine.give_back(Amount::new(0, self.bytes));
    }
}

/// A place in the queue of waiting submitters, given up when dropped.
struct Place<'a> {
    budget: &'a Budget,
    scope: Scope,
    ticket: u64,
}

impl<'a> Place<'a> {
    /// Keeps the place if it is in the queue of this bound, else takes one there.
    fn hold<'p>(place: &'p mut Option<Self>, budget: &'a Budget, scope: Scope) -> &'p Self {
        if place.as_ref().is_some_and(|place| place.scope != scope) {
            *place = None;
        }
        place.get_or_insert_with(|| Place { budget, scope, ticket: budget.ticket() })
    }

    fn register(&self, waker: &Waker) {
        self.budget.register(self.scope, self.ticket, waker);
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.budget.unregister(self.scope, self.ticket);
    }
}

/// Drives a future on this thread.
fn block_on<F: Future>(future: F) -> F::Output {
    // One per thread, so that waiting allocates nothing.
    thread_local! {
        static WAKER: Waker = Waker::from(Arc::new(Unpark(thread::current())));
    }
    let mut future = pin!(future);
    let waker = WAKER.with(Waker::clone);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut std::task::Context::from_waker(&waker)) {
            return output;
        }
        thread::park();
    }
}

struct Unpark(thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}
