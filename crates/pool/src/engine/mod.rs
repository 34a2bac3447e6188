//! The pool without its threads: the state that workers and submitters share, and what they do with it.
//!
//! # The path of a message
//!
//! 1. `submit` puts the message into an envelope with its size (`pool.rs`).
//! 2. One atomic step takes the budget for one message and its bytes (`budget.rs`). If the pool is full, the overflow policy
//!    decides: reject, wait, drop the oldest message, or merge (`submitting`).
//! 3. The message is appended to the intake of its home shard, which is its key modulo the number of workers. A worker is woken
//!    if none is searching (`idle.rs`).
//! 4. A worker takes the next message of its own shard. If that has none and keys may move, it takes one from another shard
//!    (`worker.rs`, `working`).
//! 5. The stripe hands out the first message of a key that no worker is handling. A message of a busy key waits in the list of
//!    its key (`stripe.rs`).
//! 6. A message whose deadline has passed becomes a dead letter. Any other goes to the handler, with a `Context` for follow-up
//!    messages.
//! 7. A handled message returns its budget. A failed one is held for its next attempt, together with its whole key, or becomes a
//!    dead letter (`dead.rs`), and its asker gets the reason (`ask.rs`).
//!
//! `simulation.rs` does steps 4 to 7 on the caller's thread, in virtual time. The decorators (`observe.rs`, `resilience/`) are
//! handlers around a handler; the engine does not know them.
//!
//! # Two locks per shard
//!
//! Submitters append to the *intake* and touch nothing else. Workers hold the *stripe*, which knows the keys, and take over the
//! whole intake by one swap from time to time. So a submitter contends with a worker once per batch, not once per message. A
//! submission that needs to know the keys (a bound per key, an overflow policy) locks the stripe first and then the intake, as
//! workers do.
//!
//! # Keys do not move, their execution does
//!
//! A key lives in its home shard, and an idle worker takes its next message from there. Only one message of a key is out at a
//! time, so no state is handed over between workers. A key exists only while it has a message that waits or is being handled.
//!
//! # The budget
//!
//! A message is in one place at any time: in an intake, queued in a stripe, or held by a worker. It keeps its budget until it has
//! ended, so the budget in use counts every message of the pool, and a pool whose budget is unused is empty.
//!
//! Workers return budget in batches of a 64th of the bound, divided by the number of workers, because every submitter touches the
//! same counter. A bound of less than 64 messages per worker is therefore exact at any time; a larger one is exact when the
//! workers are idle.

mod ending;
mod submitting;
mod working;

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::ask::Silence;
use crate::budget::{Amount, Budget};
use crate::clock::Clock;
use crate::handler::Deliver;
use crate::idle::Idle;
use crate::message::{Delivery, Envelope};
use crate::options::OnDeadLetter;
use crate::stripe::{Stripe, Tracking};
use crate::sync::{AtomicBool, AtomicU64, AtomicUsize, Condvar, Mutex, Ordering, Padded, lock};
use crate::{
    Builder, DeadLetter, DeadLetters, Event, Handler, Key, Observer, Overflow, Placement, Reason, Retry, Stats,
};

pub(crate) use working::{Hand, Look};

pub(crate) struct Engine<P> {
    shards: Vec<Padded<Shard<P>>>,
    pub(crate) placement: Placement,
    budget: Budget,
    key_limit: Option<KeyLimit>,
    size: fn(&P) -> usize,
    overflow: Overflow<P>,
    retry: Option<Retry>,
    handler: Box<dyn Deliver<P>>,
    pub(crate) timed: bool,
    pub(crate) clock: Clock,
    pub(crate) idle: Idle,
    phase: AtomicUsize,
    /// Rung when the pool is empty while it drains.
    empty: (Mutex<()>, Condvar),
    pub(crate) dead_letters: DeadLetters<P>,
    on_dead_letter: Option<Box<OnDeadLetter<P>>>,
    observer: Option<Arc<dyn Observer>>,
    counters: Counters,
    /// The budget that a worker collects before it returns it: a 64th of the bound, over all workers. Submitters use the same
    /// counter, so it is not returned for every message.
    release_batch: Amount,
}

struct Shard<P> {
    intake: Mutex<Intake<P>>,
    /// As many as the intake has, for a look without the lock.
    pending: AtomicUsize,
    stripe: Padded<Mutex<Stripe<P>>>,
    /// Written only by the worker whose home it is.
    worker: Padded<Work>,
}

impl<P> Shard<P> {
    /// Exchanges the arrivals, of which there are none, for what was submitted meanwhile.
    fn swap(&self, stripe: &mut Stripe<P>) {
        let mut intake = lock(&self.intake);
        std::mem::swap(&mut intake.queue, stripe.arrivals());
        self.pending.store(0, Ordering::Relaxed);
    }

    /// Brings all messages to where the keys are, for those who must know them all.
    fn sort_in(&self, stripe: &mut Stripe<P>) {
        stripe.sort_in();
        self.swap(stripe);
        stripe.sort_in();
    }
}

/// What a worker tells of itself.
#[derive(Default)]
struct Work {
    handled: AtomicU64,
    /// Whether it holds a message that has not been handled. Set under the lock of the stripe from which the message is taken, so
    /// that it is known after that stripe has been closed.
    busy: AtomicBool,
}

struct Intake<P> {
    queue: VecDeque<Envelope<P>>,
    phase: Phase,
    accepted: u64,
}

#[derive(Debug, Clone, Copy)]
struct KeyLimit {
    messages: usize,
    bytes: usize,
}

/// What rarely happens, counted by whom it happens to.
#[derive(Debug, Default)]
struct Counters {
    merged: AtomicU64,
    rejected: AtomicU64,
    displaced: AtomicU64,
    failed: AtomicU64,
    panicked: AtomicU64,
    retried: AtomicU64,
    expired: AtomicU64,
    dead_lettered: AtomicU64,
    forgotten: AtomicU64,
    returned: AtomicU64,
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    Open = 0,
    /// Only follow-ups are accepted.
    Draining = 1,
    Closed = 2,
}

impl<P: Send + 'static> Engine<P> {
    pub(crate) fn new<H: Handler<P>>(options: Builder<P>, handler: H, clock: Clock) -> Self {
        let intake = || Intake { queue: VecDeque::new(), phase: Phase::Open, accepted: 0 };
        let tracking = match options.placement {
            _ if options.key_messages.is_some() || options.key_bytes.is_some() => Tracking::Load,
            Placement::Moving if options.workers > 1 => Tracking::Key,
            Placement::Moving | Placement::Pinned => Tracking::Nothing,
        };
        let shard = || Shard {
            intake: Mutex::new(intake()),
            pending: AtomicUsize::new(0),
            stripe: Padded(Mutex::new(Stripe::new(tracking))),
            worker: Padded(Work { handled: AtomicU64::new(0), busy: AtomicBool::new(false) }),
        };
        let per_worker = |limit: usize| limit / 64 / options.workers;
        let key_limit = (options.key_messages.is_some() || options.key_bytes.is_some()).then(|| KeyLimit {
            messages: options.key_messages.unwrap_or(options.messages),
            bytes: options.key_bytes.unwrap_or(options.bytes),
        });
        Self {
            release_batch: Amount::new(per_worker(options.messages), per_worker(options.bytes)),
            shards: (0..options.workers).map(|_| Padded(shard())).collect(),
            placement: options.placement,
            budget: Budget::new(options.messages, options.bytes),
            key_limit,
            size: options.size,
            overflow: options.overflow,
            retry: options.retry,
            handler: Box::new(handler),
            timed: H::TIMED,
            clock,
            idle: Idle::new(options.workers),
            phase: AtomicUsize::new(Phase::Open as usize),
            empty: (Mutex::new(()), Condvar::new()),
            dead_letters: DeadLetters::new(options.dead_letters),
            on_dead_letter: options.on_dead_letter,
            observer: options.observer,
            counters: Counters::default(),
        }
    }

    pub(crate) fn workers(&self) -> usize {
        self.shards.len()
    }

    fn phase(&self) -> Phase {
        match self.phase.load(Ordering::SeqCst) {
            0 => Phase::Open,
            1 => Phase::Draining,
            _ => Phase::Closed,
        }
    }

    fn give_back(&self, amount: Amount) {
        let left = self.budget.give_back(amount);
        if left.messages() == 0 && self.phase() != Phase::Open {
            let _guard = lock(&self.empty.0);
            self.empty.1.notify_all();
        }
    }

    /// Makes a dead letter of a message whose budget is returned elsewhere.
    fn bury(&self, delivery: Delivery<P>, reason: Reason) {
        let Delivery { message, attempts, asker } = delivery;
        let told = asker.map(|asker| (asker, Silence::DeadLettered(reason.clone())));
        let mut letter = DeadLetter { message, reason, attempts };
        if let Some(hook) = &self.on_dead_letter {
            quietly(|| hook(&mut letter));
        }
        count(&self.counters.dead_lettered);
        let forgotten = self.dead_letters.keep(letter);
        self.observe(Event::DeadLettered);
        self.observe(Event::Ended);
        // After the letter is kept, so that the asker finds it, and before one is dropped, which would end the question unanswered.
        if let Some((asker, silence)) = told {
            asker.ended(silence);
        }
        if let Some(forgotten) = forgotten {
            count(&self.counters.forgotten);
            self.observe(Event::Forgotten);
            quietly(|| drop(forgotten));
        }
    }

    pub(crate) fn depth(&self) -> Amount {
        self.budget.held()
    }

    pub(crate) fn stats(&self) -> Stats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let Counters { merged, rejected, displaced, failed, panicked, retried, expired, .. } = &self.counters;
        let Counters { dead_lettered, forgotten, returned, .. } = &self.counters;
        Stats {
            submitted: self.shards.iter().map(|shard| lock(&shard.intake).accepted).sum(),
            merged: read(merged),
            rejected: read(rejected),
            handled: self.shards.iter().map(|shard| read(&shard.worker.handled)).sum(),
            failed: read(failed),
            panicked: read(panicked),
            retried: read(retried),
            expired: read(expired),
            displaced: read(displaced),
            dead_lettered: read(dead_lettered),
            forgotten: read(forgotten),
            returned: read(returned),
        }
    }

    fn observe(&self, event: Event) {
        if let Some(observer) = &self.observer {
            quietly(|| observer.observe(event));
        }
    }

    fn home(&self, key: Key) -> usize {
        #[expect(clippy::cast_possible_truncation, reason = "below the number of shards")]
        let home = (key.0 % self.shards.len() as u64) as usize;
        home
    }
}

/// Runs the application's code and logs a panic, which has no caller to return to.
fn quietly(code: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(code)).is_err() {
        tracing::error!("the drop of a payload, the hook of dead letters or the observer panicked");
    }
}
