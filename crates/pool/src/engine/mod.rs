//! The state that workers and submitters share, and the operations on it.
//!
//! # The path of a message
//!
//! 1. `submit` puts the message into an envelope with its size (`pool.rs`).
//! 2. The budget for one message and its bytes is acquired in one atomic step (`budget.rs`). If the pool is full, the overflow
//!    policy applies: reject, wait, drop the oldest message, or merge (`submission.rs`).
//! 3. The message is appended to the intake of its home shard, whose number is the key modulo the number of workers. A worker is
//!    woken if no worker is searching (`idle.rs`).
//! 4. A worker takes the next message of its own shard. If the shard has none and keys may move, it takes one from another shard
//!    (`worker.rs`, `delivery.rs`).
//! 5. The stripe dequeues the first message of a key that no worker is handling. A message of a busy key waits in the queue of
//!    its key (`stripe.rs`).
//! 6. A message whose deadline has passed becomes a dead letter. Any other message goes to the handler, with a `Context` for
//!    follow-up messages.
//! 7. A handled message returns its budget. A failed one waits for its next attempt, and its key with it, or becomes a
//!    dead letter (`dead_letters.rs`), and a caller of `ask` gets the reason (`ask.rs`).
//!
//! `simulation.rs` does steps 4 to 7 on the caller's thread, in virtual time. The decorators (`observe.rs`, `resilience/`) are
//! handlers around a handler, and the engine is not aware of them.
//!
//! # Two locks per shard
//!
//! Submitters append to the *intake* and access nothing else of the shard. Workers lock the *stripe*, which has the queues of the keys,
//! and move the whole intake into it by one swap. So a submitter contends with a worker once per batch, not once per message. A
//! submission that needs the queue of its key (for a bound per key or an overflow policy) locks the stripe first and then the intake,
//! as workers do.
//!
//! # Moving keys
//!
//! The messages of a key stay in its home shard, and an idle worker takes the next message from there. Only one message of a key is
//! handled at a time, so no state moves between workers. A key exists only while it has a message that waits or is being handled.
//!
//! # The budget
//!
//! A message is in one place at any time: in an intake, queued in a stripe, or with a worker. It uses budget until it has ended, so
//! the budget in use counts all messages of the pool, and a pool whose budget is unused is empty.
//!
//! Workers return budget in batches of a 64th of the bound, divided by the number of workers, because all submitters use the same
//! counter. A bound of less than 64 messages per worker is therefore exact at any time; a larger bound is exact when the workers are
//! idle.

mod delivery;
mod shutdown;
mod submission;

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::ask::AskFailure;
use crate::budget::{Amount, Budget};
use crate::clock::Clock;
use crate::handler::Deliver;
use crate::idle::Idle;
use crate::message::{Delivery, Envelope};
use crate::options::OnDeadLetter;
use crate::stripe::{Stripe, Tracking};
use crate::sync::{AtomicBool, AtomicU64, AtomicUsize, Condvar, Mutex, Ordering, Padded, lock};
use crate::{
    Builder, DeadLetter, DeadLetterReason, DeadLetters, Event, Handler, Key, Observer, Overflow, Placement, Retry,
    Stats,
};

pub(crate) use delivery::{NextWork, WorkerState};

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
    /// Notified when the budget becomes unused while the pool drains.
    empty: (Mutex<()>, Condvar),
    pub(crate) dead_letters: DeadLetters<P>,
    on_dead_letter: Option<Box<OnDeadLetter<P>>>,
    observer: Option<Arc<dyn Observer>>,
    counters: Counters,
    /// The amount of budget that a worker collects before it returns it: a 64th of the bound, divided by the number of workers.
    release_batch: Amount,
}

struct Shard<P> {
    intake: Mutex<Intake<P>>,
    /// The number of messages in the intake, which can be read without its lock.
    pending: AtomicUsize,
    stripe: Padded<Mutex<Stripe<P>>>,
    /// Written only by the worker of this shard.
    worker: Padded<WorkerStatus>,
}

impl<P> Shard<P> {
    /// Moves the messages in the intake to the arrivals of the stripe, which must be empty.
    fn take_intake(&self, stripe: &mut Stripe<P>) {
        let mut intake = lock(&self.intake);
        std::mem::swap(&mut intake.queue, stripe.arrivals());
        self.pending.store(0, Ordering::Relaxed);
    }

    /// Moves all messages to the queues of their keys, for operations that need all messages of a key.
    fn queue_arrivals(&self, stripe: &mut Stripe<P>) {
        stripe.queue_arrivals();
        self.take_intake(stripe);
        stripe.queue_arrivals();
    }
}

/// The status of a worker.
#[derive(Default)]
struct WorkerStatus {
    handled: AtomicU64,
    /// Whether the worker is handling a message. Set under the lock of the stripe from which the message is taken, so that `close`,
    /// which takes that lock, sees it.
    busy: AtomicBool,
}

struct Intake<P> {
    queue: VecDeque<Envelope<P>>,
    phase: PoolPhase,
    accepted: u64,
}

#[derive(Debug, Clone, Copy)]
struct KeyLimit {
    messages: usize,
    bytes: usize,
}

/// Counters of rare events.
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
enum PoolPhase {
    Open = 0,
    /// Only follow-ups are accepted.
    Draining = 1,
    Closed = 2,
}

impl<P: Send + 'static> Engine<P> {
    pub(crate) fn new<H: Handler<P>>(options: Builder<P>, handler: H, clock: Clock) -> Self {
        let intake = || Intake { queue: VecDeque::new(), phase: PoolPhase::Open, accepted: 0 };
        let tracking = match options.placement {
            _ if options.key_messages.is_some() || options.key_bytes.is_some() => Tracking::Load,
            Placement::Moving if options.workers > 1 => Tracking::Key,
            Placement::Moving | Placement::Pinned => Tracking::Nothing,
        };
        let shard = || Shard {
            intake: Mutex::new(intake()),
            pending: AtomicUsize::new(0),
            stripe: Padded(Mutex::new(Stripe::new(tracking))),
            worker: Padded(WorkerStatus { handled: AtomicU64::new(0), busy: AtomicBool::new(false) }),
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
            phase: AtomicUsize::new(PoolPhase::Open as usize),
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

    fn phase(&self) -> PoolPhase {
        match self.phase.load(Ordering::SeqCst) {
            0 => PoolPhase::Open,
            1 => PoolPhase::Draining,
            _ => PoolPhase::Closed,
        }
    }

    fn release_budget(&self, amount: Amount) {
        let left = self.budget.release(amount);
        if left.messages() == 0 && self.phase() != PoolPhase::Open {
            let _guard = lock(&self.empty.0);
            self.empty.1.notify_all();
        }
    }

    /// Turns a message into a dead letter. The caller returns its budget.
    fn dead_letter(&self, delivery: Delivery<P>, reason: DeadLetterReason) {
        let Delivery { message, attempts, ask } = delivery;
        let failure = ask.map(|ask| (ask, AskFailure::DeadLettered(reason.clone())));
        let mut letter = DeadLetter { message, reason, attempts };
        if let Some(hook) = &self.on_dead_letter {
            log_panic(|| hook(&mut letter));
        }
        count(&self.counters.dead_lettered);
        let forgotten = self.dead_letters.push(letter);
        self.observe(Event::DeadLettered);
        self.observe(Event::Ended);
        // After the letter is stored, so that a caller of `ask` finds it, and before a letter is dropped: dropping its `Reply` would
        // end the ask as unanswered.
        if let Some((ask, failure)) = failure {
            ask.fail(failure);
        }
        if let Some(forgotten) = forgotten {
            count(&self.counters.forgotten);
            self.observe(Event::Forgotten);
            log_panic(|| drop(forgotten));
        }
    }

    pub(crate) fn depth(&self) -> Amount {
        self.budget.used()
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
            log_panic(|| observer.observe(event));
        }
    }

    fn home(&self, key: Key) -> usize {
        #[expect(clippy::cast_possible_truncation, reason = "below the number of shards")]
        let home = (key.0 % self.shards.len() as u64) as usize;
        home
    }
}

/// Runs application code and logs a panic, which cannot be returned to a caller.
fn log_panic(code: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(code)).is_err() {
        tracing::error!("application code panicked: the drop of a payload, the dead letter hook or the observer");
    }
}
