//! Submission: the budget, the overflow policy, and follow-up messages.
//!
//! A follow-up inherits the budget of the message that caused it. So a chain of messages makes progress even if the pool is full, and
//! no worker waits for budget. A message that has passed its budget on and then fails is retried only if there is unused budget, so
//! that the bound always holds.
#![expect(
    clippy::inline_always,
    reason = "a call that is not inlined copies the message: measured 1.2 to 1.8 times the CPU"
)]

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Poll, Wake, Waker};

use super::{Engine, PoolPhase, count};
use crate::ask::{AskHandle, merge_questions};
use crate::budget::{Amount, Budget, Scope};
use crate::message::{Delivery, Envelope};
use crate::sync::{Ordering, lock, thread, thread_local};
use crate::{DeadLetterReason, Event, Key, Merge, Message, Overflow, Placement, SubmitError, Submitted};

/// The source of a submission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Origin {
    Outside,
    /// A handler. `replaces` is the key and size of its message if the follow-up takes over its budget: it then no longer counts for its
    /// key.
    Handler {
        replaces: Option<(Key, usize)>,
    },
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
    Full(Scope),
    TooLarge,
    Closed,
}

/// How often a submitter yields before it blocks. Budget is returned in batches, and soon if handlers are quick.
const YIELDS: u32 = if cfg!(loom) { 0 } else { 16 };

impl<P: Send + 'static> Engine<P> {
    #[inline(always)]
    fn prepare(&self, message: Message<P>, asker: Option<Arc<dyn AskHandle>>) -> Submission<P> {
        let (key, bytes) = (message.key, (self.size)(&message.payload));
        let submitted = if self.timed { self.clock.nanos() } else { 0 };
        let envelope = Envelope::seal(Delivery { message, attempts: 0, asker }, bytes, submitted);
        Submission { key, bytes, envelope: Some(envelope) }
    }

    /// Submits a message without waiting.
    pub(crate) fn try_submit(
        &self,
        message: Message<P>,
        asker: Option<Arc<dyn AskHandle>>,
    ) -> Result<Submitted, SubmitError<P>> {
        let mut submission = self.prepare(message, asker);
        let ended = self.accept(&mut submission);
        self.finish(ended, submission)
    }

    /// As [`try_submit`](Self::try_submit), but waits for budget if that is the policy.
    pub(crate) async fn submit(
        &self,
        message: Message<P>,
        asker: Option<Arc<dyn AskHandle>>,
    ) -> Result<Submitted, SubmitError<P>> {
        let mut submission = self.prepare(message, asker);
        let mut ended = self.accept(&mut submission);
        if self.may_wait(ended) {
            ended = self.wait(&mut submission).await;
        }
        self.finish(ended, submission)
    }

    /// As [`submit`](Self::submit), on a thread that may block.
    #[inline]
    pub(crate) fn submit_blocking(&self, message: Message<P>) -> Result<Submitted, SubmitError<P>> {
        let mut submission = self.prepare(message, None);
        let mut ended = self.accept(&mut submission);
        if self.may_wait(ended) {
            ended = self.wait_blocking(&mut submission);
        }
        self.finish(ended, submission)
    }

    fn may_wait(&self, ended: Result<Submitted, Rejection>) -> bool {
        matches!((ended, &self.overflow), (Err(Rejection::Full(_)), Overflow::Wait))
    }

    async fn wait(&self, submission: &mut Submission<P>) -> Result<Submitted, Rejection> {
        let mut ticket = None;
        poll_fn(|context| {
            // Try again after registering, because budget that was returned before causes no wake-up.
            for registered in [false, true] {
                match self.accept(submission) {
                    Err(Rejection::Full(scope)) if !registered => {
                        WaitTicket::hold(&mut ticket, &self.budget, scope).register(context.waker());
                    }
                    Err(Rejection::Full(_)) => {}
                    ended => return Poll::Ready(ended),
                }
            }
            Poll::Pending
        })
        .await
    }

    #[cold]
    fn wait_blocking(&self, submission: &mut Submission<P>) -> Result<Submitted, Rejection> {
        for _ in 0..YIELDS {
            if self.budget.fits(Amount::new(1, submission.bytes)) {
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
        ended: Result<Submitted, Rejection>,
        submission: Submission<P>,
    ) -> Result<Submitted, SubmitError<P>> {
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
            Err(rejection) => Err(self.reject(rejection, submission)),
        }
    }

    #[cold]
    fn reject(&self, rejection: Rejection, submission: Submission<P>) -> SubmitError<P> {
        count(&self.counters.rejected);
        self.observe(Event::Rejected);
        let message = submission.envelope.expect("only an accepted message is removed").open().message;
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
        key: Key,
        own: &mut Option<Amount>,
        asker: Option<Arc<dyn AskHandle>>,
    ) -> Result<(), SubmitError<P>> {
        let mut submission = self.prepare(message, asker);
        let ended = self.accept_follow_up(&mut submission, key, own);
        self.finish(ended, submission).map(|_| ())
    }

    fn accept_follow_up(
        &self,
        submission: &mut Submission<P>,
        key: Key,
        own: &mut Option<Amount>,
    ) -> Result<Submitted, Rejection> {
        let bytes = submission.bytes;
        if bytes > self.max_message_bytes() {
            return Err(Rejection::TooLarge);
        }
        // Use the budget of the message being handled first, with additional bytes if necessary.
        let inherited = own.filter(|own| {
            let more = bytes.saturating_sub(own.bytes());
            more == 0 || self.budget.try_take(Amount::new(0, more))
        });
        if inherited.is_none() && !self.budget.try_take(Amount::new(1, bytes)) {
            return Err(if self.is_closed() { Rejection::Closed } else { Rejection::Full(Scope::Total) });
        }
        let replaces = inherited.map(|own| (key, own.bytes()));
        let enqueued = self.enqueue(submission, Origin::Handler { replaces });
        let unused = match (enqueued, inherited) {
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
        let wanted = Amount::new(1, submission.bytes);
        let rejection = if self.budget.try_take(wanted) {
            match self.enqueue(submission, Origin::Outside) {
                Ok(()) => return Ok(Submitted::Queued),
                Err(rejection) => {
                    self.give_back(wanted);
                    rejection
                }
            }
        } else {
            Rejection::Full(Scope::Total)
        };
        self.overflow(submission, rejection)
    }

    #[cold]
    fn overflow(&self, submission: &mut Submission<P>, rejection: Rejection) -> Result<Submitted, Rejection> {
        // A waiting submission reads the phase after it has registered, and closing wakes all registered ones, so it notices a shutdown.
        if self.phase() != PoolPhase::Open {
            return Err(Rejection::Closed);
        }
        match (&self.overflow, rejection) {
            (Overflow::DropOldest, Rejection::Full(scope)) => self.displace(submission, scope),
            (Overflow::Coalesce(merge), Rejection::Full(scope)) => self.coalesce(submission, scope, &**merge),
            _ => Err(rejection),
        }
    }

    /// Queues a message whose budget has been taken, unless its key is full or the pool is closed.
    #[inline(always)]
    fn enqueue(&self, submission: &mut Submission<P>, origin: Origin) -> Result<(), Rejection> {
        let home = self.home(submission.key);
        let Some(limit) = self.key_limit else { return self.append(home, submission, origin) };

        let shard = &self.shards[home];
        let mut stripe = lock(&shard.stripe);
        shard.sort_in(&mut stripe);
        let (mut messages, mut bytes) = stripe.load(submission.key);
        if let Origin::Handler { replaces: Some((key, size)) } = origin
            && key == submission.key
        {
            (messages, bytes) = (messages - 1, bytes - size);
        }
        if messages + 1 > limit.messages || bytes + submission.bytes > limit.bytes {
            return Err(Rejection::Full(Scope::Key(submission.key)));
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
            Placement::Moving => self.idle.lacks_searchers(),
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
    fn displace(&self, submission: &mut Submission<P>, mut scope: Scope) -> Result<Submitted, Rejection> {
        let wanted = Amount::new(1, submission.bytes);
        let mut dropped = 0;
        loop {
            let Some(victim) = self.victim(submission.key, scope) else { return Err(Rejection::Full(scope)) };
            dropped += 1;
            let budget = Amount::new(1, victim.bytes);
            count(&self.counters.displaced);
            self.observe(Event::Displaced);
            self.dead_letter(victim.open(), DeadLetterReason::Displaced);
            // Last, because `drain` considers the pool empty when all budget has been returned.
            self.give_back(budget);

            if !self.budget.try_take(wanted) {
                scope = Scope::Total;
                continue;
            }
            match self.enqueue(submission, Origin::Outside) {
                Ok(()) => return Ok(Submitted::Displacing(dropped)),
                Err(rejection) => {
                    self.give_back(wanted);
                    let Rejection::Full(other) = rejection else { return Err(rejection) };
                    scope = other;
                }
            }
        }
    }

    /// Removes the oldest queued message of the key. If there is none and the whole pool is full, removes that of the key that has been
    /// ready longest, first in the same shard and then in the others.
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

    /// Merges a message into the newest queued message of its key. The budget for its bytes is taken before the merge.
    fn coalesce(&self, submission: &mut Submission<P>, scope: Scope, merge: &Merge<P>) -> Result<Submitted, Rejection> {
        let full = Err(Rejection::Full(scope));
        let (key, bytes) = (submission.key, submission.bytes);
        let Some(mut reserved) = ByteReservation::take(self, bytes) else { return full };
        let shard = &self.shards[self.home(key)];
        let mut stripe = lock(&shard.stripe);
        shard.sort_in(&mut stripe);
        let key_full = self.key_limit.is_some_and(|limit| stripe.load(key).1 + bytes > limit.bytes);
        let Some(queued) = stripe.newest(key).filter(|_| !key_full) else { return full };
        let Some(Delivery { message, asker, .. }) = submission.envelope.take().map(Envelope::open) else { return full };
        merge(&mut queued.payload, message.payload);
        if let Some(second) = asker {
            let asker = queued.asker();
            *asker = Some(match asker.take() {
                Some(first) => merge_questions(first, second),
                None => second,
            });
        }
        // If the merged payload is larger than the sum of both, the sum counts.
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
    fn take(engine: &'a Engine<P>, bytes: usize) -> Option<Self> {
        engine.budget.try_take(Amount::new(0, bytes)).then(|| Self { engine, bytes })
    }

    /// Uses budget for a message that has changed its size. It must not have grown by more than the reservation.
    fn spend(&mut self, before: usize, after: usize) {
        self.bytes = self.bytes + before - after;
    }
}

impl<P: Send + 'static> Drop for ByteReservation<'_, P> {
    fn drop(&mut self) {
        self.engine.give_back(Amount::new(0, self.bytes));
    }
}

/// The registration of a waiting submitter, removed when dropped.
struct WaitTicket<'a> {
    budget: &'a Budget,
    scope: Scope,
    ticket: u64,
}

impl<'a> WaitTicket<'a> {
    /// Returns the ticket for this bound. Replaces a ticket for another bound.
    fn hold<'p>(current: &'p mut Option<Self>, budget: &'a Budget, scope: Scope) -> &'p Self {
        if current.as_ref().is_some_and(|ticket| ticket.scope != scope) {
            *current = None;
        }
        current.get_or_insert_with(|| WaitTicket { budget, scope, ticket: budget.ticket() })
    }

    fn register(&self, waker: &Waker) {
        self.budget.register(self.scope, self.ticket, waker);
    }
}

impl Drop for WaitTicket<'_> {
    fn drop(&mut self) {
        self.budget.unregister(self.scope, self.ticket);
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
