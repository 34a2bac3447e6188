//! Workers: taking a message, calling the handler, and settling the result.
//!
//! Copies are a large part of the cost of a message. An envelope is returned alone, never in a tuple or a result, because these have
//! another layout, which causes a copy. Only this path needs that and the forced inlining.
#![expect(
    clippy::inline_always,
    reason = "a call that is not inlined copies the message: measured 1.2 to 1.8 times the CPU"
)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use super::{Engine, PoolPhase, Shard, count, log_panic};
use crate::budget::{Amount, Scope};
use crate::clock::later;
use crate::message::{Delivery, Envelope};
use crate::stripe::{Stripe, Turn};
use crate::sync::{Ordering, Padded, lock};
use crate::{Context, DeadLetterReason, Event, Key, Message, Placement};

/// The local state of a worker: the message that it is handling, and budget to return.
pub(crate) struct WorkerState<P> {
    worker: usize,
    /// The shard and the turn of the current message, until it is settled.
    held: Option<(usize, Turn)>,
    key: Key,
    bytes: usize,
    /// The message and the time of its retry, if it failed.
    retry: Option<(Envelope<P>, Instant)>,
    release: Amount,
}

impl<P> WorkerState<P> {
    pub(crate) fn of(worker: usize) -> Self {
        Self { worker, held: None, key: Key(0), bytes: 0, retry: None, release: Amount::default() }
    }
}

impl<P: Send + 'static> Engine<P> {
    /// Settles the last message of a worker and takes the next one, from its own shard or, if keys move, from any shard.
    #[inline]
    pub(crate) fn next(&self, home: usize, state: &mut WorkerState<P>) -> Option<Envelope<P>> {
        if state.held.is_some_and(|(shard, _)| shard != home) {
            self.settle(state);
        }
        let take = |shard: &Shard<P>, stripe: &mut Stripe<P>, turn: &mut Turn| self.take(shard, stripe, turn);
        let next = self.visit(home, state, take);
        if next.is_some() || self.placement == Placement::Pinned {
            return next;
        }
        (home + 1..self.shards.len()).chain(0..home).find_map(|other| self.visit(other, state, take))
    }

    /// Like [`next`](Self::next), for a simulation: from one shard and, if keys move, from any of its keys.
    pub(crate) fn next_of(&self, shard: usize, choice: usize, state: &mut WorkerState<P>) -> Option<Envelope<P>> {
        let now = self.clock.now();
        self.visit(shard, state, |shard, stripe, turn| {
            shard.sort_in(stripe);
            match self.placement {
                Placement::Moving => stripe.next_of(choice, now, turn),
                Placement::Pinned => stripe.next(|| now, turn),
            }
        })
    }

    /// Settles the last message of a worker, so that its key becomes ready again.
    pub(crate) fn settle(&self, state: &mut WorkerState<P>) {
        if let Some((shard, _)) = state.held {
            self.visit(shard, state, |_, _, _| None);
        }
    }

    #[inline]
    fn visit(
        &self,
        number: usize,
        state: &mut WorkerState<P>,
        take: impl FnOnce(&Shard<P>, &mut Stripe<P>, &mut Turn) -> Option<Envelope<P>>,
    ) -> Option<Envelope<P>> {
        let shard = &self.shards[number];
        let settled = state.held.take();
        let (mut unretried, mut held) = (None, false);
        let mut stripe = lock(&shard.stripe);
        if let Some((_, turn)) = settled {
            match state.retry.take() {
                // The phase is read under the lock with which `close` clears the stripe, so no message is put back after that.
                Some((envelope, _)) if self.phase() == PoolPhase::Closed => {
                    stripe.done(turn, state.bytes);
                    unretried = Some(envelope);
                }
                Some((envelope, due)) => {
                    stripe.retry(turn, envelope, due);
                    held = true;
                }
                None => stripe.done(turn, state.bytes),
            }
        }
        let key = state.key;
        let mut turn = Turn::UNTRACKED;
        let next = take(shard, &mut stripe, &mut turn);
        if let Some(envelope) = &next {
            state.held = Some((number, turn));
            self.shards[state.worker].worker.busy.store(true, Ordering::Relaxed);
            (state.key, state.bytes) = (envelope.key, envelope.bytes);
        }
        // If work is left, another worker must search for it. If a key is held, a sleeping worker must wake when it is due.
        let wake = (held || stripe.has_work()) && self.placement == Placement::Moving && self.idle.lacks_searchers();
        drop(stripe);
        if wake {
            self.idle.wake_any(number);
        }
        if settled.is_some() && self.key_limit.is_some() && self.budget.has_waiters() {
            self.budget.wake(Scope::Key(key), 1);
        }
        if let Some(envelope) = unretried {
            self.give_back(Amount::new(1, envelope.bytes));
            self.dead_letter(envelope.open(), DeadLetterReason::ShutDown);
        }
        next
    }

    /// Takes the next message of a shard that can be handled now.
    #[inline(always)]
    fn take(&self, shard: &Shard<P>, stripe: &mut Stripe<P>, turn: &mut Turn) -> Option<Envelope<P>> {
        loop {
            if stripe.arrivals().is_empty() && shard.pending.load(Ordering::Relaxed) > 0 {
                shard.take_intake(stripe);
            }
            let next = stripe.next(|| self.clock.now(), turn);
            // All arrivals may belong to keys that are being handled.
            if next.is_some() || shard.pending.load(Ordering::Relaxed) == 0 {
                return next;
            }
        }
    }

    /// Calls the handler with a message, and processes the result.
    #[inline]
    pub(crate) fn handle(&self, envelope: Envelope<P>, state: &mut WorkerState<P>) {
        let budget = Amount::new(1, state.bytes);
        let submitted = envelope.submitted;
        let Delivery { message, attempts, asker } = envelope.open();

        if message.deadline.is_some_and(|deadline| self.clock.now() > deadline) {
            count(&self.counters.expired);
            self.observe(Event::Expired);
            self.dead_letter(Delivery { message, attempts, asker }, DeadLetterReason::Expired);
            self.shards[state.worker].worker.busy.store(false, Ordering::Relaxed);
            return self.release(budget, state);
        }

        let mut context = Context {
            engine: self,
            key: state.key,
            budget: Some(budget),
            trace: message.trace,
            attempt: attempts + 1,
            submitted,
            final_attempt: false,
            asker,
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
        // Before the budget is returned, so that a pool without budget in use has no busy worker. The exception is a follow-up that took
        // the budget over and has ended: then `drain` waits for this worker, and returning a budget of zero wakes it.
        self.shards[state.worker].worker.busy.store(false, Ordering::Relaxed);
        match left {
            // A retried message keeps its budget.
            _ if state.retry.is_some() => {}
            Some(left) => self.release(left, state),
            None => self.give_back(Amount::default()),
        }
    }

    fn handled(&self, worker: usize) {
        let handled = &self.shards[worker].worker.handled;
        handled.store(handled.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        self.observe(Event::Ended);
    }

    /// Retries a failed message or turns it into a dead letter.
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
        let Context { key, budget, attempt, submitted, final_attempt, asker, .. } = context;
        // If a follow-up has taken over the budget, a retry needs new budget.
        let has_budget = || budget.is_some() || self.budget.try_take(Amount::new(1, state.bytes));
        let retry = self.retry.filter(|retry| !final_attempt && attempt < retry.attempts && has_budget());
        tracing::warn!(key = key.0, attempts = attempt, again = retry.is_some(), %reason, "message failed");
        let delivery = Delivery { message, attempts: attempt, asker };
        if let Some(retry) = retry {
            count(&self.counters.retried);
            self.observe(Event::Retried);
            let due = later(self.clock.now(), retry.pause_after(attempt));
            state.retry = Some((Envelope::seal(delivery, state.bytes, submitted), due));
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
            let Context { attempt: attempts, asker, .. } = context;
            self.dead_letter(Delivery { message, attempts, asker }, DeadLetterReason::Panicked(text));
        } else {
            // The message was handled, and the drop of its payload panicked.
            self.handled(state.worker);
        }
    }

    /// Returns budget, immediately or with the next batch.
    fn release(&self, budget: Amount, state: &mut WorkerState<P>) {
        state.release = state.release + budget;
        let batch = self.release_batch;
        if state.release.messages() >= batch.messages()
            || state.release.bytes() >= batch.bytes()
            || self.phase() != PoolPhase::Open
        {
            self.flush(state);
        }
    }

    /// Returns all budget that a worker has collected.
    pub(crate) fn flush(&self, state: &mut WorkerState<P>) {
        let release = std::mem::take(&mut state.release);
        if release != Amount::default() {
            self.give_back(release);
        }
    }

    /// Checks all queues before a worker sleeps. Returns when there will be work.
    pub(crate) fn next_work(&self, home: usize) -> NextWork {
        if self.phase() == PoolPhase::Closed {
            return NextWork::Work;
        }
        let mut due: Option<Instant> = None;
        let moving = self.placement == Placement::Moving;
        for (number, shard) in self.shards.iter().enumerate() {
            if !moving && number != home {
                continue;
            }
            let stripe = lock(&shard.stripe);
            if stripe.has_work() || !lock(&shard.intake).queue.is_empty() {
                return NextWork::Work;
            }
            due = due.into_iter().chain(stripe.next_due()).min();
        }
        let Some(due) = due else { return NextWork::Nothing };
        match due.checked_duration_since(self.clock.now()) {
            None | Some(Duration::ZERO) => NextWork::Work,
            Some(time) => NextWork::Later(time),
        }
    }

    /// Wakes another worker if there is more work, now or later. Called by the last searcher when it has found work.
    pub(crate) fn wake_next(&self, home: usize) {
        if self.placement == Placement::Moving && self.next_work(home) != NextWork::Nothing {
            self.idle.wake_any(home);
        }
    }

    /// Returns whether messages were submitted, as a hint without locking.
    pub(crate) fn may_have_work(&self, home: usize) -> bool {
        let pending = |shard: &Padded<Shard<P>>| shard.pending.load(Ordering::Relaxed) > 0;
        match self.placement {
            Placement::Moving => self.shards.iter().any(pending),
            Placement::Pinned => pending(&self.shards[home]),
        }
    }
}

/// When there will be work for a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NextWork {
    Work,
    Later(Duration),
    Nothing,
}

impl NextWork {
    /// Returns the time until there is work.
    pub(crate) fn time(self) -> Duration {
        match self {
            Self::Work => Duration::ZERO,
            Self::Later(time) => time,
            Self::Nothing => Duration::MAX,
        }
    }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("panic without a message").to_owned()
}
