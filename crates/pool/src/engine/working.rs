//! Workers: taking a message, calling the handler, and settling the result.
//!
//! A message has a hundred bytes or more, so it is copied once on its way to the handler and then stays in the [`Hand`] of its
//! worker. That took the CPU time per message from about 165 to 110 ns. It is the reason for the out-parameters and the forced
//! inlining on this path, and on no other.
#![expect(
    clippy::inline_always,
    reason = "a message is large, and a call that is not inlined copies it: measured 1.2 to 1.8 times the CPU"
)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use super::{Engine, Phase, Shard, count, quietly};
use crate::clock::later;
use crate::message::Envelope;
use crate::room::{Amount, Scope};
use crate::stripe::{Stripe, Turn};
use crate::sync::{Ordering, Padded, lock};
use crate::{Context, Event, Key, Placement, Reason};

/// What a worker holds: a key, the message of it that is being handled, and room to give back. It stays in one place, because
/// a message is large to move.
pub(crate) struct Hand<P> {
    worker: usize,
    /// The shard of the key whose turn it is, until that is settled.
    held: Option<(usize, Turn)>,
    key: Key,
    bytes: usize,
    /// Absent when it has ended.
    envelope: Option<Envelope<P>>,
    /// When it is to be tried again.
    due: Option<Instant>,
    release: Amount,
}

impl<P> Hand<P> {
    pub(crate) fn of(worker: usize) -> Self {
        Self { worker, held: None, key: Key(0), bytes: 0, envelope: None, due: None, release: Amount::default() }
    }
}

impl<P: Send + 'static> Engine<P> {
    /// Settles the last message of a worker and takes its next, from its own shard or, if keys move, from any.
    #[inline]
    pub(crate) fn next(&self, home: usize, hand: &mut Hand<P>) -> bool {
        if hand.held.is_some_and(|(shard, _)| shard != home) {
            self.settle(hand);
        }
        let take = |shard: &Shard<P>, stripe: &mut Stripe<P>, slot: &mut _| self.take(shard, stripe, slot);
        if self.visit(home, hand, take) {
            return true;
        }
        let mut others = (home + 1..self.shards.len()).chain(0..home);
        self.placement == Placement::Moving && others.any(|other| self.visit(other, hand, take))
    }

    /// As [`next`](Self::next) of one shard, of any of its keys if keys move: for a simulation.
    pub(crate) fn next_of(&self, shard: usize, choice: usize, hand: &mut Hand<P>) -> bool {
        let now = self.clock.now();
        self.visit(shard, hand, |shard, stripe, slot| {
            shard.sort_in(stripe);
            match self.placement {
                Placement::Moving => stripe.next_of(choice, now, slot),
                Placement::Pinned => stripe.next(|| now, slot),
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
        take: impl FnOnce(&Shard<P>, &mut Stripe<P>, &mut Option<Envelope<P>>) -> Option<Turn>,
    ) -> bool {
        let shard = &self.shards[number];
        let settled = hand.held.take();
        let (mut unretried, mut held) = (None, false);
        let mut stripe = lock(&shard.stripe);
        if let Some((_, turn)) = settled {
            match hand.envelope.take().zip(hand.due.take()) {
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
        let turn = take(shard, &mut stripe, &mut hand.envelope);
        if let (Some(turn), Some(envelope)) = (turn, &hand.envelope) {
            hand.held = Some((number, turn));
            self.shards[hand.worker].worker.busy.store(true, Ordering::Relaxed);
            (hand.key, hand.bytes) = (envelope.message.key, envelope.bytes);
        }
        // A worker that leaves work behind makes sure that somebody looks after it; a key that is held, that somebody
        // sleeps no longer than it is.
        let wake = (held || stripe.has_work()) && self.placement == Placement::Moving && self.idle.lacks_searchers();
        drop(stripe);
        if wake {
            self.idle.wake_any(number);
        }
        if settled.is_some() && self.key_limit.is_some() && self.room.is_awaited() {
            self.room.wake(Scope::Key(key), 1);
        }
        if let Some(envelope) = unretried {
            self.give_back(Amount::new(1, envelope.bytes));
            self.bury(envelope, Reason::ShutDown);
        }
        turn.is_some()
    }

    /// The next message of a shard that may be handled now.
    #[inline(always)]
    fn take(&self, shard: &Shard<P>, stripe: &mut Stripe<P>, slot: &mut Option<Envelope<P>>) -> Option<Turn> {
        loop {
            if stripe.arrivals().is_empty() && shard.pending.load(Ordering::Relaxed) > 0 {
                shard.swap(stripe);
            }
            let turn = stripe.next(|| self.clock.now(), slot);
            // What has arrived may all have been of keys that are being handled.
            if turn.is_some() || shard.pending.load(Ordering::Relaxed) == 0 {
                return turn;
            }
        }
    }

    /// Hands a message to the handler, and decides what becomes of it.
    #[inline]
    pub(crate) fn handle(&self, hand: &mut Hand<P>) {
        let Some(envelope) = &mut hand.envelope else { return };
        let room = Amount::new(1, hand.bytes);

        if envelope.message.deadline.is_some_and(|deadline| self.clock.now() > deadline) {
            count(&self.counters.expired);
            self.observe(Event::Expired);
            self.bury_held(hand, Reason::Expired);
            self.shards[hand.worker].worker.busy.store(false, Ordering::Relaxed);
            return self.release(room, hand);
        }

        envelope.attempts += 1;
        let mut context = Context {
            engine: self,
            key: hand.key,
            room: Some(room),
            trace: envelope.message.trace,
            attempt: envelope.attempts,
            submitted: envelope.submitted,
            final_attempt: false,
            asker: envelope.asker.clone(),
        };
        let slot = &mut hand.envelope;
        let result = catch_unwind(AssertUnwindSafe(|| {
            if let Some(envelope) = slot {
                self.handler.deliver(&mut envelope.message, &mut context)?;
            }
            // Here, because dropping a payload may panic too.
            *slot = None;
            Ok::<(), Reason>(())
        }));
        let (left, final_attempt) = (context.room, context.final_attempt);
        drop(context);
        match result {
            Ok(Ok(())) => self.handled(hand.worker),
            Ok(Err(reason)) => {
                // If a follow-up has taken over its room, it needs some to be kept.
                let has_room = || left.is_some() || self.room.try_take(room);
                if self.failed(reason, !final_attempt, has_room, hand) {
                    self.shards[hand.worker].worker.busy.store(false, Ordering::Relaxed);
                    return;
                }
            }
            Err(panic) => self.panicked(panic, hand),
        }
        // Before its room is given back: a pool that holds nothing has no worker that is busy, unless a follow-up has taken
        // the room over and ended first. Then this is what a drain waits for, and it is told by giving back nothing.
        self.shards[hand.worker].worker.busy.store(false, Ordering::Relaxed);
        match left {
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
    fn failed(&self, reason: Reason, again: bool, has_room: impl FnOnce() -> bool, hand: &mut Hand<P>) -> bool {
        count(&self.counters.failed);
        let attempts = hand.envelope.as_ref().map_or(0, |envelope| envelope.attempts);
        let retry = self.retry.filter(|retry| again && attempts < retry.attempts && has_room());
        tracing::warn!(key = hand.key.0, attempts, again = retry.is_some(), %reason, "message failed");
        if let Some(retry) = retry {
            count(&self.counters.retried);
            self.observe(Event::Retried);
            hand.due = Some(later(self.clock.now(), retry.pause_after(attempts)));
            return true;
        }
        self.bury_held(hand, reason);
        false
    }

    #[cold]
    fn panicked(&self, panic: Box<dyn std::any::Any + Send>, hand: &mut Hand<P>) {
        count(&self.counters.panicked);
        let text = panic_text(&*panic);
        tracing::error!(key = hand.key.0, panic = text, "the handler of a message panicked");
        quietly(|| drop(panic));
        if hand.envelope.is_some() {
            self.bury_held(hand, Reason::Panicked(text));
        } else {
            // It was the drop of its payload that panicked, after it was handled.
            self.handled(hand.worker);
        }
    }

    #[cold]
    fn bury_held(&self, hand: &mut Hand<P>, reason: Reason) {
        if let Some(envelope) = hand.envelope.take() {
            self.bury(envelope, reason);
        }
    }

    /// Gives room back, now or with more of it.
    fn release(&self, room: Amount, hand: &mut Hand<P>) {
        hand.release = hand.release + room;
        let batch = self.release_batch;
        if hand.release.messages() >= batch.messages()
            || hand.release.bytes() >= batch.bytes()
            || self.phase() != Phase::Open
        {
            self.flush(hand);
        }
    }

    /// Gives back all that a worker has to.
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
