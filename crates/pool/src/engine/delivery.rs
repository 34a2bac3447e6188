//! Delivery: a worker takes a message, calls the handler, and processes the result.
//!
//! Copies are a large part of the cost of a message. An envelope is returned alone, never in a tuple or a result, because their layout
//! differs, which causes a copy. Only this path needs this and the forced inlining.
#![expect(
    clippy::inline_always,
    reason = "a call that is not inlined copies the message: measured 1.2 to 1.8 times the CPU"
)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use super::{Engine, PoolPhase, Shard, count, log_panic};
use crate::budget::{Amount, Bound};
use crate::clock::instant_after;
use crate::message::{Delivery, Envelope};
use crate::stripe::{KeyToken, Stripe};
use crate::sync::{Ordering, Padded, lock};
use crate::{Context, DeadLetterReason, Event, Key, Message, Placement};

/// The local state of a worker: the message that it is handling, and the budget that it has not returned yet.
pub(crate) struct WorkerState<P> {
    worker: usize,
    /// The shard and the token of the current message, until it is completed.
    current: Option<(usize, KeyToken)>,
    key: Key,
    bytes: usize,
    /// The message and the time of its retry, if it failed.
    retry: Option<(Envelope<P>, Instant)>,
    unreleased: Amount,
}

impl<P> WorkerState<P> {
    pub(crate) fn of(worker: usize) -> Self {
        Self { worker, current: None, key: Key(0), bytes: 0, retry: None, unreleased: Amount::default() }
    }
}

impl<P: Send + 'static> Engine<P> {
    /// Completes the current message of a worker and takes the next one, from its own shard or, if keys move, from any shard.
    #[inline]
    pub(crate) fn next(&self, home: usize, state: &mut WorkerState<P>) -> Option<Envelope<P>> {
        if state.current.is_some_and(|(shard, _)| shard != home) {
            self.complete(state);
        }
        let take = |shard: &Shard<P>, stripe: &mut Stripe<P>, token: &mut KeyToken| self.take(shard, stripe, token);
        let next = self.visit(home, state, take);
        if next.is_some() || self.placement == Placement::Pinned {
            return next;
        }
        (home + 1..self.shards.len()).chain(0..home).find_map(|other| self.visit(other, state, take))
    }

    /// Like [`next`](Self::next), but takes a message of one shard, of the key that `choice` selects if keys move. For a simulation.
    pub(crate) fn next_chosen(&self, shard: usize, choice: usize, state: &mut WorkerState<P>) -> Option<Envelope<P>> {
        let now = self.clock.now();
        self.visit(shard, state, |shard, stripe, token| {
            shard.queue_arrivals(stripe);
            match self.placement {
                Placement::Moving => stripe.next_chosen(choice, now, token),
                Placement::Pinned => stripe.next(|| now, token),
            }
        })
    }

    /// Completes the current message of a worker, so that its key becomes ready again.
    pub(crate) fn complete(&self, state: &mut WorkerState<P>) {
        if let Some((shard, _)) = state.current {
            self.visit(shard, state, |_, _, _| None);
        }
    }

    /// Completes the current message of a worker, and takes the next one of a shard, under one lock. The current message must be of this
    /// shard.
    #[inline]
    fn visit(
        &self,
        number: usize,
        state: &mut WorkerState<P>,
        take: impl FnOnce(&Shard<P>, &mut Stripe<P>, &mut KeyToken) -> Option<Envelope<P>>,
    ) -> Option<Envelope<P>> {
        let shard = &self.shards[number];
        let completed = state.current.take();
        let (mut unretried, mut is_delayed) = (None, false);
        let mut stripe = lock(&shard.stripe);
        if let Some((_, token)) = completed {
            match state.retry.take() {
                // The phase is read under the lock with which `close` clears the stripe, so no message is put back after that.
                Some((envelope, _)) if self.phase() == PoolPhase::Closed => {
                    stripe.done(token, state.bytes);
                    unretried = Some(envelope);
                }
                Some((envelope, due)) => {
                    stripe.retry(token, envelope, due);
                    is_delayed = true;
                }
                None => stripe.done(token, state.bytes),
            }
        }
        let key = state.key;
        let mut token = KeyToken::UNTRACKED;
        let next = take(shard, &mut stripe, &mut token);
        if let Some(envelope) = &next {
            state.current = Some((number, token));
            self.shards[state.worker].worker.busy.store(true, Ordering::Relaxed);
            (state.key, state.bytes) = (envelope.key, envelope.bytes);
        }
        // If there is more work, another worker must search for it. If a key is delayed, a sleeping worker must wake when it is due.
        let wake =
            (is_delayed || stripe.has_work()) && self.placement == Placement::Moving && self.idle.must_wake_worker();
        drop(stripe);
        if wake {
            self.idle.wake_any(number);
        }
        if completed.is_some() && self.key_limit.is_some() && self.budget.has_waiters() {
            self.budget.wake(Bound::Key(key), 1);
        }
        if let Some(envelope) = unretried {
            self.release_budget(Amount::new(1, envelope.bytes));
            self.dead_letter(envelope.into_delivery(), DeadLetterReason::ShutDown);
        }
        next
    }

    /// Takes the next message of a shard that can be handled now.
    #[inline(always)]
    fn take(&self, shard: &Shard<P>, stripe: &mut Stripe<P>, token: &mut KeyToken) -> Option<Envelope<P>> {
        loop {
            if stripe.arrivals().is_empty() && shard.pending.load(Ordering::Relaxed) > 0 {
                shard.take_intake(stripe);
            }
            let next = stripe.next(|| self.clock.now(), token);
            // All arrivals may have belonged to keys that are being handled. Then the new messages in the intake are tried.
            if next.is_some() || shard.pending.load(Ordering::Relaxed) == 0 {
                return next;
            }
        }
    }

    /// Calls the handler with a message, and retries the message or ends it.
    #[inline]
    pub(crate) fn handle(&self, envelope: Envelope<P>, state: &mut WorkerState<P>) {
        let budget = Amount::new(1, state.bytes);
        let submitted = envelope.submitted;
        let Delivery { message, attempts, ask } = envelope.into_delivery();

        if message.deadline.is_some_and(|deadline| self.clock.now() > deadline) {
            count(&self.counters.expired);
            self.observe(Event::Expired);
            self.dead_letter(Delivery { message, attempts, ask }, DeadLetterReason::Expired);
            self.shards[state.worker].worker.busy.store(false, Ordering::Relaxed);
            return self.release_batched(budget, state);
        }

        let mut context = Context {
            engine: self,
            key: state.key,
            budget: Some(budget),
            trace: message.trace,
            attempt: attempts + 1,
            submitted,
            is_final_attempt: false,
            ask,
        };
        let mut slot = Some(message);
        let result = catch_unwind(AssertUnwindSafe(|| {
            if let Some(message) = &mut slot {
                self.handler.deliver(message, &mut context)?;
            }
            // Inside the closure, because dropping a payload may panic too.
            slot = None;
            Ok::<(), DeadLetterReason>(())
        }));
        let left = context.budget;
        match result {
            Ok(Ok(())) => self.handled(state.worker),
            Ok(Err(reason)) => self.failed(reason, slot, context, state),
            Err(panic) => self.panicked(panic, slot, context, state),
        }
        // Before the budget is returned, so that a pool without budget in use has no busy worker. The exception is a worker whose
        // follow-up has taken over the budget and has ended. `drain` waits for this worker, and returning a budget of zero wakes it.
        self.shards[state.worker].worker.busy.store(false, Ordering::Relaxed);
        match left {
            // A retried message keeps its budget.
            _ if state.retry.is_some() => {}
            Some(left) => self.release_batched(left, state),
            None => self.release_budget(Amount::default()),
        }
    }

    fn handled(&self, worker: usize) {
        let handled = &self.shards[worker].worker.handled;
        handled.store(handled.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        self.observe(Event::Ended);
    }

    /// Schedules the retry of a failed message, or turns it into a dead letter.
    #[cold]
    fn failed(
        &self,
        reason: DeadLetterReason,
        message: Option<Message<P>>,
        context: Context<'_, P>,
        state: &mut WorkerState<P>,
    ) {
        count(&self.counters.failed);
        let Some(message) = message else { return };
        let Context { key, budget, attempt, submitted, is_final_attempt, ask, .. } = context;
        // If a follow-up has taken over the budget, a retry needs new budget.
        let has_budget = || budget.is_some() || self.budget.try_acquire(Amount::new(1, state.bytes));
        let retry = self.retry.filter(|retry| !is_final_attempt && attempt < retry.attempts && has_budget());
        tracing::warn!(key = key.0, attempts = attempt, again = retry.is_some(), %reason, "message failed");
        let delivery = Delivery { message, attempts: attempt, ask };
        if let Some(retry) = retry {
            count(&self.counters.retried);
            self.observe(Event::Retried);
            let due = instant_after(self.clock.now(), retry.pause_after(attempt));
            state.retry = Some((Envelope::new(delivery, state.bytes, submitted), due));
        } else {
            self.dead_letter(delivery, reason);
        }
    }

    #[cold]
    fn panicked(
        &self,
        panic: Box<dyn std::any::Any + Send>,
        message: Option<Message<P>>,
        context: Context<'_, P>,
        state: &WorkerState<P>,
    ) {
        count(&self.counters.panicked);
        let text = panic_text(&*panic);
        tracing::error!(key = state.key.0, panic = text, "message handler panicked");
        log_panic(|| drop(panic));
        if let Some(message) = message {
            let Context { attempt: attempts, ask, .. } = context;
            self.dead_letter(Delivery { message, attempts, ask }, DeadLetterReason::Panicked(text));
        } else {
            // The handler succeeded, and the drop of the payload panicked.
            self.handled(state.worker);
        }
    }

    /// Returns budget when a batch is complete, or immediately while the pool shuts down.
    fn release_batched(&self, budget: Amount, state: &mut WorkerState<P>) {
        state.unreleased = state.unreleased + budget;
        let batch = self.release_batch;
        if state.unreleased.messages() >= batch.messages()
            || state.unreleased.bytes() >= batch.bytes()
            || self.phase() != PoolPhase::Open
        {
            self.flush(state);
        }
    }

    /// Returns the budget that a worker has collected.
    pub(crate) fn flush(&self, state: &mut WorkerState<P>) {
        let unreleased = std::mem::take(&mut state.unreleased);
        if unreleased != Amount::default() {
            self.release_budget(unreleased);
        }
    }

    /// Checks all queues before a worker sleeps. Returns when the worker has work.
    pub(crate) fn next_work(&self, home: usize) -> NextWork {
        if self.phase() == PoolPhase::Closed {
            return NextWork::Now;
        }
        let mut due: Option<Instant> = None;
        let moving = self.placement == Placement::Moving;
        for (number, shard) in self.shards.iter().enumerate() {
            if !moving && number != home {
                continue;
            }
            let stripe = lock(&shard.stripe);
            if stripe.has_work() || !lock(&shard.intake).queue.is_empty() {
                return NextWork::Now;
            }
            due = due.into_iter().chain(stripe.next_due()).min();
        }
        let Some(due) = due else { return NextWork::Never };
        match due.checked_duration_since(self.clock.now()) {
            None | Some(Duration::ZERO) => NextWork::Now,
            Some(time) => NextWork::Later(time),
        }
    }

    /// Wakes another worker if there is more work, now or later. The last searcher calls it when it has found work.
    pub(crate) fn wake_next(&self, home: usize) {
        if self.placement == Placement::Moving && self.next_work(home) != NextWork::Never {
            self.idle.wake_any(home);
        }
    }

    /// Returns whether an intake has messages. Without locking, so it is only a hint.
    pub(crate) fn may_have_work(&self, home: usize) -> bool {
        let pending = |shard: &Padded<Shard<P>>| shard.pending.load(Ordering::Relaxed) > 0;
        match self.placement {
            Placement::Moving => self.shards.iter().any(pending),
            Placement::Pinned => pending(&self.shards[home]),
        }
    }
}

/// When a worker has work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NextWork {
    Now,
    Later(Duration),
    Never,
}

impl NextWork {
    /// Returns the time until the worker has work.
    pub(crate) fn time(self) -> Duration {
        match self {
            Self::Now => Duration::ZERO,
            Self::Later(time) => time,
            Self::Never => Duration::MAX,
        }
    }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("panic without a message").to_owned()
}
