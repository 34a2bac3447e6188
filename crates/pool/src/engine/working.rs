//! Workers: taking a message, calling the handler, and settling the result.
//!
//! Copies are a large part of the cost of a message. An envelope is returned alone, never in a tuple or a result, because each
//! of these has another layout and copies it. This and the forced inlining are for this path, and for no other.
#![expect(
    clippy::inline_always,
    reason = "a call that is not inlined copies the message: measured 1.2 to 1.8 times the CPU"
)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use super::{Engine, Phase, Shard, count, quietly};
use crate::budget::{Amount, Scope};
use crate::clock::later;
use crate::message::{Delivery, Envelope};
use crate::stripe::{Stripe, Turn};
use crate::sync::{Ordering, Padded, lock};
use crate::{Context, Event, Key, Message, Placement, Reason};

/// What a worker holds: a key whose message it handles, and budget to return.
pub(crate) struct Hand<P> {
    worker: usize,
    /// The shard of the key whose turn it is, until that is settled.
    held: Option<(usize, Turn)>,
    key: Key,
    bytes: usize,
    /// The message if it failed, and when it is to be tried again.
    retry: Option<(Envelope<P>, Instant)>,
    release: Amount,
}

impl<P> Hand<P> {
    pub(crate) fn of(worker: usize) -> Self {
        Self { worker, held: None, key: Key(0), bytes: 0, retry: None, release: Amount::default() }
    }
}

impl<P: Send + 'static> Engine<P> {
    /// Settles the last message of a worker and takes its next, from its own shard or, if keys move, from any.
    #[inline]
    pub(crate) fn next(&self, home: usize, hand: &mut Hand<P>) -> Option<Envelope<P>> {
        if hand.held.is_some_and(|(shard, _)| shard != home) {
            self.settle(hand);
        }
        let take = |shard: &Shard<P>, stripe: &mut Stripe<P>, turn: &mut Turn| self.take(shard, stripe, turn);
        let next = self.visit(home, hand, take);
        if next.is_some() || self.placement == Placement::Pinned {
            return next;
        }
        (home + 1..self.shards.len()).chain(0..home).find_map(|other| self.visit(other, hand, take))
    }

    /// As [`next`](Self::next) of one shard, of any of its keys if keys move: for a simulation.
    pub(crate) fn next_of(&self, shard: usize, choice: usize, hand: &mut Hand<P>) -> Option<Envelope<P>> {
        let now = self.clock.now();
        self.visit(shard, hand, |shard, stripe, turn| {
            shard.sort_in(stripe);
            match self.placement {
                Placement::Moving => stripe.next_of(choice, now, turn),
                Placement::Pinned => stripe.next(|| now, turn),
            }
        })
    }

    /// Settles the last message of a worker: its key may have its next turn.
    pub(crate) fn settle(&self, hand: &mut Hand<P>) {
        if let Some((shard, _)) = hand.held {
            self.visit(shard, hand, |_, _, _| None);
        }
    }

    #[inline]
    fn visit(
        &self,
        number: usize,
        hand: &mut Hand<P>,
        take: impl FnOnce(&Shard<P>, &mut Stripe<P>, &mut Turn) -> Option<Envelope<P>>,
    ) -> Option<Envelope<P>> {
        let shard = &self.shards[number];
        let settled = hand.held.take();
        let (mut unretried, mut held) = (None, false);
        let mut stripe = lock(&shard.stripe);
        if let Some((_, turn)) = settled {
            match hand.retry.take() {
                // Read under the lock under which closing clears the stripe: nothing is put back after that.
                Some((envelope, _)) if self.phase() == Phase::Closed => {
                    stripe.done(turn, hand.bytes);
                    unretried = Some(envelope);
                }
                Some((envelope, due)) => {
                    stripe.again(turn, envelope, due);
                    held = true;
                }
                None => stripe.done(turn, hand.bytes),
            }
        }
        let key = hand.key;
        let mut turn = Turn::UNTRACKED;
        let next = take(shard, &mut stripe, &mut turn);
        if let Some(envelope) = &next {
            hand.held = Some((number, turn));
            self.shards[hand.worker].worker.busy.store(true, Ordering::Relaxed);
            (hand.key, hand.bytes) = (envelope.key, envelope.bytes);
        }
        // If a worker leaves work behind, another one must look for it. If a key is held, a sleeping worker must wake when it
        // is due.
        let wake = (held || stripe.has_work()) && self.placement == Placement::Moving && self.idle.lacks_searchers();
        drop(stripe);
        if wake {
            self.idle.wake_any(number);
        }
        if settled.is_some() && self.key_limit.is_some() && self.budget.is_awaited() {
            self.budget.wake(Scope::Key(key), 1);
        }
        if let Some(envelope) = unretried {
            self.give_back(Amount::new(1, envelope.bytes));
            self.bury(envelope.open(), Reason::ShutDown);
        }
        next
    }

    /// The next message of a shard that may be handled now.
    #[inline(always)]
    fn take(&self, shard: &Shard<P>, stripe: &mut Stripe<P>, turn: &mut Turn) -> Option<Envelope<P>> {
        loop {
            if stripe.arrivals().is_empty() && shard.pending.load(Ordering::Relaxed) > 0 {
                shard.swap(stripe);
            }
            let next = stripe.next(|| self.clock.now(), turn);
            // All arrivals may have been of keys that are being handled.
            if next.is_some() || shard.pending.load(Ordering::Relaxed) == 0 {
                return next;
            }
        }
    }

    /// Hands a message to the handler, and decides what becomes of it.
    #[inline]
    pub(crate) fn handle(&self, envelope: Envelope<P>, hand: &mut Hand<P>) {
        let budget = Amount::new(1, hand.bytes);
        let submitted = envelope.submitted;
        let Delivery { message, attempts, asker } = envelope.open();

        if message.deadline.is_some_and(|deadline| self.clock.now() > deadline) {
            count(&self.counters.expired);
            self.observe(Event::Expired);
            self.bury(Delivery { message, attempts, asker }, Reason::Expired);
            self.shards[hand.worker].worker.busy.store(false, Ordering::Relaxed);
            return self.release(budget, hand);
        }

        let mut context = Context {
            engine: self,
            key: hand.key,
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
            // Here, because dropping a payload may panic too.
            slot = None;
            Ok::<(), Reason>(())
        }));
        let left = context.budget;
        match result {
            Ok(Ok(())) => self.handled(hand.worker),
            Ok(Err(reason)) => self.failed(reason, slot, context, hand),
            Err(panic) => self.panicked(panic, slot, context, hand),
        }
        // Before its budget is returned: a pool that holds nothing has no worker that is busy, unless a follow-up has taken the
        // budget over and ended first. Then a drain waits for this worker, and returning nothing wakes it.
        self.shards[hand.worker].worker.busy.store(false, Ordering::Relaxed);
        match left {
            // It keeps its budget.
            _ if hand.retry.is_some() => {}
            Some(left) => self.release(left, hand),
            None => self.give_back(Amount::default()),
        }
    }

    fn handled(&self, worker: usize) {
        let handled = &self.shards[worker].worker.handled;
        handled.store(handled.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        self.observe(Event::Ended);
    }

    /// Decides whether a message that failed is tried again.
    #[cold]
    fn failed(&self, reason: Reason, message: Option<Message<P>>, context: Context<'_, P>, hand: &mut Hand<P>) {
        count(&self.counters.failed);
        let Some(message) = message else { return };
        let Context { key, budget, attempt, submitted, final_attempt, asker, .. } = context;
        // If a follow-up has taken over its budget, it needs other budget to be kept.
        let has_budget = || budget.is_some() || self.budget.try_take(Amount::new(1, hand.bytes));
        let retry = self.retry.filter(|retry| !final_attempt && attempt < retry.attempts && has_budget());
        tracing::warn!(key = key.0, attempts = attempt, again = retry.is_some(), %reason, "message failed");
        let delivery = Delivery { message, attempts: attempt, asker };
        if let Some(retry) = retry {
            count(&self.counters.retried);
            self.observe(Event::Retried);
            let due = later(self.clock.now(), retry.pause_after(attempt));
            hand.retry = Some((Envelope::seal(delivery, hand.bytes, submitted), due));
        } else {
            self.bury(delivery, reason);
        }
    }

    #[cold]
    fn panicked(
        &self,
        panic: Box<dyn std::any::Any + Send>,
        message: Option<Message<P>>,
        context: Context<'_, P>,
        hand: &Hand<P>,
    ) {
        count(&self.counters.panicked);
        let text = panic_text(&*panic);
        tracing::error!(key = hand.key.0, panic = text, "message handler panicked");
        quietly(|| drop(panic));
        if let Some(message) = message {
            let Context { attempt: attempts, asker, .. } = context;
            self.bury(Delivery { message, attempts, asker }, Reason::Panicked(text));
        } else {
            // The drop of its payload panicked, after it was handled.
            self.handled(hand.worker);
        }
    }

    /// Returns budget, now or with the next batch.
    fn release(&self, budget: Amount, hand: &mut Hand<P>) {
        hand.release = hand.release + budget;
        let batch = self.release_batch;
        if hand.release.messages() >= batch.messages()
            || hand.release.bytes() >= batch.bytes()
            || self.phase() != Phase::Open
        {
            self.flush(hand);
        }
    }

    /// Returns all budget that a worker has collected.
    pub(crate) fn flush(&self, hand: &mut Hand<P>) {
        let release = std::mem::take(&mut hand.release);
        if release != Amount::default() {
            self.give_back(release);
        }
    }

    /// A last look before a worker sleeps: whether there is something to do now, and else when.
    pub(crate) fn look(&self, home: usize) -> Look {
        if self.phase() == Phase::Closed {
            return Look::Work;
        }
        let mut due: Option<Instant> = None;
        let moving = self.placement == Placement::Moving;
        for (number, shard) in self.shards.iter().enumerate() {
            if !moving && number != home {
                continue;
            }
            let stripe = lock(&shard.stripe);
            if stripe.has_work() || !lock(&shard.intake).queue.is_empty() {
                return Look::Work;
            }
            due = due.into_iter().chain(stripe.next_due()).min();
        }
        let Some(due) = due else { return Look::Nothing };
        match due.checked_duration_since(self.clock.now()) {
            None | Some(Duration::ZERO) => Look::Work,
            Some(time) => Look::Later(time),
        }
    }

    /// The last searcher has found work: another worker is to look for what else there is, or to sleep no longer than
    /// until the next key is due.
    pub(crate) fn hand_over(&self, home: usize) {
        if self.placement == Placement::Moving && self.look(home) != Look::Nothing {
            self.idle.wake_any(home);
        }
    }

    /// Whether something was submitted, without locking: a hint.
    pub(crate) fn smells_work(&self, home: usize) -> bool {
        let pending = |shard: &Padded<Shard<P>>| shard.pending.load(Ordering::Relaxed) > 0;
        match self.placement {
            Placement::Moving => self.shards.iter().any(pending),
            Placement::Pinned => pending(&self.shards[home]),
        }
    }
}

/// What a worker saw in its last look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Look {
    Work,
    Later(Duration),
    Nothing,
}

impl Look {
    /// How long there is nothing to do.
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
    text.unwrap_or("a panic without text").to_owned()
}
