//! Submission: the budget, the overflow policy, and follow-up messages.
//!
//! The first follow-up takes over the budget of the message being handled. So a chain of messages makes progress even if the pool is
//! full, and no worker waits for budget. If the message then fails, it is retried only if there is unused budget, so the bound always
//! holds.
#![expect(
    clippy::inline_always,
    reason = "a call that is not inlined copies the message: measured 1.2 to 1.8 times the CPU"
)]

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Poll, Wake, Waker};

use super::{Engine, PoolPhase, count};
use crate::ask::{AskHandle, merge_asks};
use crate::budget::{Amount, Bound, Budget};
use crate::message::{Delivery, Envelope};
use crate::sync::{Ordering, lock, thread, thread_local};
use crate::{DeadLetterReason, Event, Key, Merge, Message, Overflow, Placement, SubmitError, Submitted};

/// The source of a submission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Origin {
    /// A caller of the pool.
    Outside,
    /// A handler. If the follow-up takes over the budget of the message being handled, `replaces` is the key and the size of that
    /// message, which then no longer counts for its key.
    Handler { replaces: Option<(Key, usize)> },
}

/// A message that is being submitted. It is passed by reference, because moving it through results costs as much as queueing it.
struct Submission<P> {
    key: Key,
    bytes: usize,
    /// `None` after the message has been accepted.
    envelope: Option<Envelope<P>>,
}

/// Why a message was not accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rejection {
    Full(Bound),
    TooLarge,
    Closed,
}

/// How often a submitter yields before it blocks. If handlers are quick, budget is returned in that time.
const MAX_YIELDS: u32 = if cfg!(loom) { 0 } else { 16 };

impl<P: Send + 'static> Engine<P> {
    #[inline(always)]
    fn prepare(&self, message: Message<P>, ask: Option<Arc<dyn AskHandle>>) -> Submission<P> {
        let (key, bytes) = (message.key, (self.size)(&message.payload));
        let submitted = if self.timed { self.clock.nanos() } else { 0 };
        let envelope = Envelope::new(Delivery { message, attempts: 0, ask }, bytes, submitted);
        Submission { key, bytes, envelope: Some(envelope) }
    }

    /// Submits a message without waiting.
    pub(crate) fn try_submit(
        &self,
        message: Message<P>,
        ask: Option<Arc<dyn AskHandle>>,
    ) -> Result<Submitted, SubmitError<P>> {
        let mut submission = self.prepare(message, ask);
        let outcome = self.accept(&mut submission);
        self.finish(outcome, submission)
    }

    /// As [`try_submit`](Self::try_submit), but waits for budget if that is the policy.
    pub(crate) async fn submit(
        &self,
        message: Message<P>,
        ask: Option<Arc<dyn AskHandle>>,
    ) -> Result<Submitted, SubmitError<P>> {
        let mut submission = self.prepare(message, ask);
        let mut outcome = self.accept(&mut submission);
        if self.may_wait(outcome) {
            outcome = self.wait(&mut submission).await;
        }
        self.finish(outcome, submission)
    }

    /// As [`submit`](Self::submit), on a thread that may block.
    #[inline]
    pub(crate) fn submit_blocking(&self, message: Message<P>) -> Result<Submitted, SubmitError<P>> {
        let mut submission = self.prepare(message, None);
        let mut outcome = self.accept(&mut submission);
        if self.may_wait(outcome) {
            outcome = self.wait_blocking(&mut submission);
        }
        self.finish(outcome, submission)
    }

    fn may_wait(&self, outcome: Result<Submitted, Rejection>) -> bool {
        matches!((outcome, &self.overflow), (Err(Rejection::Full(_)), Overflow::Wait))
    }

    async fn wait(&self, submission: &mut Submission<P>) -> Result<Submitted, Rejection> {
        let mut ticket = None;
        poll_fn(|context| {
            // Tries again after registering, because budget that was returned earlier causes no wake-up.
            for registered in [false, true] {
                match self.accept(submission) {
                    Err(Rejection::Full(bound)) if !registered => {
                        WaitTicket::for_bound(&mut ticket, &self.budget, bound).register(context.waker());
                    }
                    Err(Rejection::Full(_)) => {}
                    outcome => return Poll::Ready(outcome),
                }
            }
            Poll::Pending
        })
        .await
    }

    #[cold]
    fn wait_blocking(&self, submission: &mut Submission<P>) -> Result<Submitted, Rejection> {
        for _ in 0..MAX_YIELDS {
            if self.budget.can_acquire(Amount::new(1, submission.bytes)) {
                break;
            }
            thread::yield_now();
        }
        block_on(self.wait(submission))
    }

    /// Counts a submission and converts its result.
    #[inline(always)]
    fn finish(
        &self,
        outcome: Result<Submitted, Rejection>,
        submission: Submission<P>,
    ) -> Result<Submitted, SubmitError<P>> {
        match outcome {
            Ok(Submitted::Merged) => {
                count(&self.counters.merged);
                self.observe(Event::Merged);
                Ok(Submitted::Merged)
            }
            Ok(submitted) => {
                self.observe(Event::Submitted);
                Ok(submitted)
            }
            Err(rejection) => Err(self.reject(rejection, submission)),
        }
    }

    #[cold]
    fn reject(&self, rejection: Rejection, submission: Submission<P>) -> SubmitError<P> {
        count(&self.counters.rejected);
        self.observe(Event::Rejected);
        let message =
            submission.envelope.expect("a rejected message is still in its submission").into_delivery().message;
        match rejection {
            Rejection::Full(_) => SubmitError::Full(message),
            Rejection::TooLarge => SubmitError::TooLarge(message),
            Rejection::Closed => SubmitError::Closed(message),
        }
    }

    /// Submits a follow-up, with the budget of the message being handled or with unused budget.
    pub(crate) fn follow_up(
        &self,
        message: Message<P>,
        parent_key: Key,
        parent_budget: &mut Option<Amount>,
        ask: Option<Arc<dyn AskHandle>>,
    ) -> Result<(), SubmitError<P>> {
        let mut submission = self.prepare(message, ask);
        let outcome = self.accept_follow_up(&mut submission, parent_key, parent_budget);
        self.finish(outcome, submission).map(|_| ())
    }

    fn accept_follow_up(
        &self,
        submission: &mut Submission<P>,
        parent_key: Key,
        parent_budget: &mut Option<Amount>,
    ) -> Result<Submitted, Rejection> {
        let bytes = submission.bytes;
        if bytes > self.max_message_bytes() {
            return Err(Rejection::TooLarge);
        }
        // Uses the budget of the message being handled first, with additional bytes if necessary.
        let inherited = parent_budget.filter(|parent| {
            let more = bytes.saturating_sub(parent.bytes());
            more == 0 || self.budget.try_acquire(Amount::new(0, more))
        });
        if inherited.is_none() && !self.budget.try_acquire(Amount::new(1, bytes)) {
            return Err(if self.is_closed() { Rejection::Closed } else { Rejection::Full(Bound::Total) });
        }
        let replaces = inherited.map(|parent| (parent_key, parent.bytes()));
        let enqueued = self.enqueue(submission, Origin::Handler { replaces });
        let unused = match (enqueued, inherited) {
            (Ok(()), Some(inherited)) => {
                *parent_budget = None;
                Amount::new(0, inherited.bytes().saturating_sub(bytes))
            }
            (Ok(()), None) => Amount::default(),
            (Err(_), Some(inherited)) => Amount::new(0, bytes.saturating_sub(inherited.bytes())),
            (Err(_), None) => Amount::new(1, bytes),
        };
        if unused != Amount::default() {
            self.release_budget(unused);
        }
        enqueued.map(|()| Submitted::Queued)
    }

    /// Returns the size of the largest message that can be accepted.
    fn max_message_bytes(&self) -> usize {
        self.key_limit.map_or(self.budget.limit().bytes(), |limit| limit.bytes)
    }

    #[inline(always)]
    fn accept(&self, submission: &mut Submission<P>) -> Result<Submitted, Rejection> {
        if submission.bytes > self.max_message_bytes() {
            return Err(Rejection::TooLarge);
        }
        let amount = Amount::new(1, submission.bytes);
        let rejection = if self.budget.try_acquire(amount) {
            match self.enqueue(submission, Origin::Outside) {
                Ok(()) => return Ok(Submitted::Queued),
                Err(rejection) => {
                    self.release_budget(amount);
                    rejection
                }
            }
        } else {
            Rejection::Full(Bound::Total)
        };
        self.overflow(submission, rejection)
    }

    #[cold]
    fn overflow(&self, submission: &mut Submission<P>, rejection: Rejection) -> Result<Submitted, Rejection> {
        // A waiting submission reads the phase after it has registered, and closing wakes all registered submissions, so each of them
        // observes a shutdown.
        if self.phase() != PoolPhase::Open {
            return Err(Rejection::Closed);
        }
        match (&self.overflow, rejection) {
            (Overflow::DropOldest, Rejection::Full(bound)) => self.displace(submission, bound),
            (Overflow::Coalesce(merge), Rejection::Full(bound)) => self.coalesce(submission, bound, &**merge),
            _ => Err(rejection),
        }
    }

    /// Appends a message to the intake, unless its key is full or the pool is closed. Its budget has been acquired.
    #[inline(always)]
    fn enqueue(&self, submission: &mut Submission<P>, origin: Origin) -> Result<(), Rejection> {
        let home = self.home(submission.key);
        let Some(limit) = self.key_limit else { return self.append(home, submission, origin) };

        let shard = &self.shards[home];
        let mut stripe = lock(&shard.stripe);
        shard.queue_arrivals(&mut stripe);
        let (mut messages, mut bytes) = stripe.load(submission.key);
        if let Origin::Handler { replaces: Some((key, size)) } = origin
            && key == submission.key
        {
            (messages, bytes) = (messages - 1, bytes - size);
        }
        if messages + 1 > limit.messages || bytes + submission.bytes > limit.bytes {
            return Err(Rejection::Full(Bound::Key(submission.key)));
        }
        self.append(home, submission, origin)
    }

    #[inline(always)]
    fn append(&self, home: usize, submission: &mut Submission<P>, origin: Origin) -> Result<(), Rejection> {
        let shard = &self.shards[home];
        let mut intake = lock(&shard.intake);
        let last = if origin == Origin::Outside { PoolPhase::Open } else { PoolPhase::Draining };
        if intake.phase > last {
            return Err(Rejection::Closed);
        }
        if let Some(envelope) = submission.envelope.take() {
            intake.queue.push_back(envelope);
        }
        intake.accepted += 1;
        shard.pending.store(intake.queue.len(), Ordering::Relaxed);
        let wake = match self.placement {
            Placement::Moving => self.idle.must_wake_worker(),
            Placement::Pinned => self.idle.is_asleep(home),
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

    /// Drops older messages until there is enough budget.
    fn displace(&self, submission: &mut Submission<P>, mut bound: Bound) -> Result<Submitted, Rejection> {
        let amount = Amount::new(1, submission.bytes);
        let mut dropped = 0;
        loop {
            let Some(oldest) = self.take_oldest(submission.key, bound) else { return Err(Rejection::Full(bound)) };
            dropped += 1;
            let budget = Amount::new(1, oldest.bytes);
            count(&self.counters.displaced);
            self.observe(Event::Displaced);
            self.dead_letter(oldest.into_delivery(), DeadLetterReason::Displaced);
            // After the dead letter is stored, because `drain` considers the pool empty when all budget has been returned.
            self.release_budget(budget);

            if !self.budget.try_acquire(amount) {
                bound = Bound::Total;
                continue;
            }
            match self.enqueue(submission, Origin::Outside) {
                Ok(()) => return Ok(Submitted::Displacing(dropped)),
                Err(rejection) => {
                    self.release_budget(amount);
                    let Rejection::Full(other) = rejection else { return Err(rejection) };
                    bound = other;
                }
            }
        }
    }

    /// Removes the oldest queued message of the key. If the key has none and the whole pool is full, removes the oldest message of the
    /// key that has been ready longest, first in the same shard and then in the others.
    fn take_oldest(&self, key: Key, bound: Bound) -> Option<Envelope<P>> {
        let home = self.home(key);
        let others = if bound == Bound::Total { self.shards.len() } else { 1 };
        (home..home + others).map(|number| number % self.shards.len()).find_map(|number| {
            let shard = &self.shards[number];
            let mut stripe = lock(&shard.stripe);
            shard.queue_arrivals(&mut stripe);
            match bound {
                Bound::Total => stripe.pop_oldest(key).or_else(|| stripe.pop_oldest_of_any()),
                Bound::Key(_) => stripe.pop_oldest(key),
            }
        })
    }

    /// Merges a message into the newest queued message of its key. The budget for its bytes is acquired before the merge.
    fn coalesce(&self, submission: &mut Submission<P>, bound: Bound, merge: &Merge<P>) -> Result<Submitted, Rejection> {
        let full = Err(Rejection::Full(bound));
        let (key, bytes) = (submission.key, submission.bytes);
        let Some(mut reserved) = ByteReservation::acquire(self, bytes) else { return full };
        let shard = &self.shards[self.home(key)];
        let mut stripe = lock(&shard.stripe);
        shard.queue_arrivals(&mut stripe);
        let key_full = self.key_limit.is_some_and(|limit| stripe.load(key).1 + bytes > limit.bytes);
        let Some(queued) = stripe.newest(key).filter(|_| !key_full) else { return full };
        let Some(Delivery { message, ask, .. }) = submission.envelope.take().map(Envelope::into_delivery) else {
            return full;
        };
        merge(&mut queued.payload, message.payload);
        if let Some(second) = ask {
            let ask = queued.ask();
            *ask = Some(match ask.take() {
                Some(first) => merge_asks(first, second),
                None => second,
            });
        }
        // If the merged payload is larger than both together, only the sum of both is counted.
        let before = queued.bytes;
        let after = (self.size)(&queued.payload).min(before + bytes);
        queued.bytes = after;
        stripe.resize(key, before, after);
        drop(stripe);
        reserved.spend(before, after);
        Ok(Submitted::Merged)
    }
}

/// Reserved budget for bytes. The unused part is returned when dropped, even after a panic.
struct ByteReservation<'a, P: Send + 'static> {
    engine: &'a Engine<P>,
    bytes: usize,
}

impl<'a, P: Send + 'static> ByteReservation<'a, P> {
    fn acquire(engine: &'a Engine<P>, bytes: usize) -> Option<Self> {
        engine.budget.try_acquire(Amount::new(0, bytes)).then(|| Self { engine, bytes })
    }

    /// Uses reserved budget for a message whose size has changed. It must not have grown by more than the reservation.
    fn spend(&mut self, before: usize, after: usize) {
        self.bytes = self.bytes + before - after;
    }
}

impl<P: Send + 'static> Drop for ByteReservation<'_, P> {
    fn drop(&mut self) {
        self.engine.release_budget(Amount::new(0, self.bytes));
    }
}

/// The registration of a waiting submitter, removed when dropped.
struct WaitTicket<'a> {
    budget: &'a Budget,
    bound: Bound,
    ticket: u64,
}

impl<'a> WaitTicket<'a> {
    /// Returns the ticket for a bound, after replacing a ticket for another bound.
    fn for_bound<'p>(current: &'p mut Option<Self>, budget: &'a Budget, bound: Bound) -> &'p Self {
        if current.as_ref().is_some_and(|ticket| ticket.bound != bound) {
            *current = None;
        }
        current.get_or_insert_with(|| WaitTicket { budget, bound, ticket: budget.ticket() })
    }

    fn register(&self, waker: &Waker) {
        self.budget.register(self.bound, self.ticket, waker);
    }
}

impl Drop for WaitTicket<'_> {
    fn drop(&mut self) {
        self.budget.unregister(self.bound, self.ticket);
    }
}

/// Runs a future on this thread.
fn block_on<F: Future>(future: F) -> F::Output {
    // One waker per thread, so that waiting does not allocate.
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
