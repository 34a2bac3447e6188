//! All that a pool does, without its threads: what workers and submitters share.
//!
//! Keys are spread over *shards*, one per worker, which is its home. A shard has two locks. Submitters append to the
//! *intake* and touch nothing else. Workers hold the *stripe*, which knows the keys, and from time to time swap the whole
//! intake out of the submitters' way. So a submitter meets a worker once per batch, not once per message. Whoever needs to
//! know the keys at submission (a bound per key, an overflow policy) takes the stripe first and the intake then, as workers
//! do.
//!
//! A message is in one place at any time: in an intake, queued in a stripe, or in the hands of a worker. It holds its room
//! until it has ended, so the room that is held counts every message of the pool, and none is left when it is back to
//! zero.
#![expect(
    clippy::inline_always,
    reason = "a message is large: a call that is not inlined copies it, at half the speed"
)]

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Poll, Wake, Waker};
use std::time::{Duration, Instant};

use crate::ask::{Asked, Silence, both};
use crate::clock::{Clock, later};
use crate::handler::Deliver;
use crate::idle::Idle;
use crate::message::Envelope;
use crate::options::OnDeadLetter;
use crate::room::{Amount, Room, Scope};
use crate::stripe::{Stripe, Turn};
use crate::sync::{AtomicBool, AtomicU64, AtomicUsize, Condvar, Mutex, Ordering, Padded, lock, thread};
use crate::{
    Builder, Context, DeadLetter, DeadLetters, Event, Handler, Key, Merge, Message, Observer, Overflow, Placement,
    Reason, Retry, Stats, SubmitError, Submitted,
};

pub(crate) struct Engine<P> {
    shards: Vec<Padded<Shard<P>>>,
    pub(crate) placement: Placement,
    room: Room,
    key_limit: Option<KeyLimit>,
    size: fn(&P) -> usize,
    overflow: Overflow<P>,
    retry: Option<Retry>,
    handler: Box<dyn Deliver<P>>,
    timed: bool,
    pub(crate) clock: Clock,
    pub(crate) idle: Idle,
    phase: AtomicUsize,
    /// Rung when the pool is empty while it drains.
    empty: (Mutex<()>, Condvar),
    pub(crate) dead_letters: DeadLetters<P>,
    on_dead_letter: Option<Box<OnDeadLetter<P>>>,
    observer: Option<Arc<dyn Observer>>,
    counters: Counters,
    /// How much a worker may have to give back before it does: a 64th of the room, over all workers. Giving back
    /// touches what submitters touch, so it is not done for every message.
    release_batch: Amount,
}

struct Shard<P> {
    intake: Mutex<Intake<P>>,
    /// As many as the intake has, for a look without the lock.
    pending: AtomicUsize,
    stripe: Padded<Mutex<Stripe<P>>>,
    /// Written by the worker whose home it is, and nobody else.
    worker: Padded<Work>,
}

/// What a worker tells of itself.
#[derive(Default)]
struct Work {
    handled: AtomicU64,
    /// Whether it holds a message that has not been handled. Set under the lock of the stripe that it is taken from, so
    /// whoever has closed that stripe knows.
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

/// Who submits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Origin {
    Outside,
    /// A handler. Its message may be about to be replaced by the follow-up, and then no longer counts for its key.
    Handler {
        replaces: Option<(Key, usize)>,
    },
}

/// A message that was not accepted.
pub(crate) struct Refusal<P> {
    envelope: Envelope<P>,
    why: Why,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Why {
    Full(Scope),
    TooLarge,
    Closed,
}

impl<P> From<Refusal<P>> for SubmitError<P> {
    fn from(Refusal { envelope, why }: Refusal<P>) -> Self {
        match why {
            Why::Full(_) => Self::Full(envelope.message),
            Why::TooLarge => Self::TooLarge(envelope.message),
            Why::Closed => Self::Closed(envelope.message),
        }
    }
}

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

/// How often a thread that may block lets others run, before it blocks: room comes in batches, and soon if handlers are quick.
const YIELDS: u32 = if cfg!(loom) { 0 } else { 16 };

impl<P: Send + 'static> Engine<P> {
    pub(crate) fn new<H: Handler<P>>(options: Builder<P>, handler: H, clock: Clock) -> Self {
        let intake = || Intake { queue: VecDeque::new(), phase: Phase::Open, accepted: 0 };
        let shared = options.placement == Placement::Moving && options.workers > 1;
        let tracked = shared || options.key_messages.is_some() || options.key_bytes.is_some();
        let shard = || Shard {
            intake: Mutex::new(intake()),
            pending: AtomicUsize::new(0),
            stripe: Padded(Mutex::new(Stripe::new(tracked))),
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
            room: Room::new(options.messages, options.bytes),
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

    // Submitting

    #[inline]
    pub(crate) fn envelope(&self, message: Message<P>, asker: Option<Arc<dyn Asked>>) -> Envelope<P> {
        let bytes = (self.size)(&message.payload);
        Envelope { message, bytes, attempts: 0, submitted: self.timed.then(|| self.clock.now()), asker }
    }

    /// Accepts a message or not, without waiting.
    pub(crate) fn try_submit(&self, envelope: Envelope<P>) -> Result<Submitted, Refusal<P>> {
        self.counted(self.offer(envelope))
    }

    /// As [`try_submit`](Self::try_submit), but waits for room if that is the policy.
    pub(crate) async fn submit(&self, envelope: Envelope<P>) -> Result<Submitted, Refusal<P>> {
        match self.offer(envelope) {
            Err(refusal) if self.may_wait(&refusal) => self.wait(refusal.envelope).await,
            ended => self.counted(ended),
        }
    }

    /// As [`submit`](Self::submit), on a thread that may block.
    #[inline]
    pub(crate) fn submit_blocking(&self, envelope: Envelope<P>) -> Result<Submitted, Refusal<P>> {
        let mut ended = self.offer(envelope);
        for _ in 0..YIELDS {
            match ended {
                Err(refusal) if self.may_wait(&refusal) => {
                    thread::yield_now();
                    ended = self.offer(refusal.envelope);
                }
                ended => return self.counted(ended),
            }
        }
        match ended {
            Err(refusal) if self.may_wait(&refusal) => block_on(self.wait(refusal.envelope)),
            ended => self.counted(ended),
        }
    }

    fn may_wait(&self, refusal: &Refusal<P>) -> bool {
        matches!((&self.overflow, refusal.why), (Overflow::Wait, Why::Full(_)))
    }

    async fn wait(&self, envelope: Envelope<P>) -> Result<Submitted, Refusal<P>> {
        let mut envelope = Some(envelope);
        let mut place = None;
        let waiting = poll_fn(|context| {
            // Twice: after registering, what became free before that would not be told.
            for registered in [false, true] {
                let Some(offered) = envelope.take() else { break };
                match self.offer(offered) {
                    Err(Refusal { envelope: back, why: Why::Full(scope) })
                        if matches!(self.overflow, Overflow::Wait) =>
                    {
                        envelope = Some(back);
                        if !registered {
                            Place::hold(&mut place, &self.room, scope).register(context.waker());
                        }
                    }
                    ended => return Poll::Ready(ended),
                }
            }
            Poll::Pending
        });
        let ended = waiting.await;
        self.counted(ended)
    }

    fn counted(&self, ended: Result<Submitted, Refusal<P>>) -> Result<Submitted, Refusal<P>> {
        match &ended {
            Ok(Submitted::Queued | Submitted::Displacing(_)) => self.observe(Event::Submitted),
            Ok(Submitted::Merged) => {
                count(&self.counters.merged);
                self.observe(Event::Merged);
            }
            Err(_) => {
                count(&self.counters.rejected);
                self.observe(Event::Rejected);
            }
        }
        ended
    }

    /// Accepts a follow-up if it has room: that of the message being handled, or free room.
    pub(crate) fn follow_up(
        &self,
        message: Message<P>,
        key: Key,
        own: &mut Option<Amount>,
        asker: Option<Arc<dyn Asked>>,
    ) -> Result<(), SubmitError<P>> {
        let envelope = self.envelope(message, asker);
        let refuse = |envelope, why| {
            count(&self.counters.rejected);
            self.observe(Event::Rejected);
            Err(Refusal { envelope, why }.into())
        };
        if envelope.bytes > self.largest() {
            return refuse(envelope, Why::TooLarge);
        }
        let wanted = Amount::new(1, envelope.bytes);
        // Its own room first, enlarged if need be.
        let inherited = own.filter(|own| {
            let more = envelope.bytes.saturating_sub(own.bytes());
            more == 0 || self.room.try_take(Amount::new(0, more))
        });
        if inherited.is_none() && !self.room.try_take(wanted) {
            return refuse(envelope, if self.is_closed() { Why::Closed } else { Why::Full(Scope::Total) });
        }
        let bytes = envelope.bytes;
        let replaces = inherited.map(|own| (key, own.bytes()));
        match self.place(envelope, Origin::Handler { replaces }) {
            Ok(()) => {
                if let Some(own_room) = inherited {
                    *own = None;
                    let surplus = own_room.bytes().saturating_sub(bytes);
                    if surplus > 0 {
                        self.give_back(Amount::new(0, surplus));
                    }
                }
                self.observe(Event::Submitted);
                Ok(())
            }
            Err(Refusal { envelope, why }) => {
                let taken = match inherited {
                    Some(own_room) => Amount::new(0, bytes.saturating_sub(own_room.bytes())),
                    None => wanted,
                };
                if taken != Amount::default() {
                    self.give_back(taken);
                }
                refuse(envelope, why)
            }
        }
    }

    /// More bytes than this never have room.
    fn largest(&self) -> usize {
        self.key_limit.map_or(self.room.limit().bytes(), |limit| limit.bytes)
    }

    #[inline(always)]
    fn offer(&self, envelope: Envelope<P>) -> Result<Submitted, Refusal<P>> {
        let bytes = envelope.bytes;
        if bytes > self.largest() {
            return Err(Refusal { envelope, why: Why::TooLarge });
        }
        let wanted = Amount::new(1, bytes);
        let refusal = if self.room.try_take(wanted) {
            match self.place(envelope, Origin::Outside) {
                Ok(()) => return Ok(Submitted::Queued),
                Err(refusal) => {
                    self.give_back(wanted);
                    refusal
                }
            }
        } else {
            Refusal { envelope, why: Why::Full(Scope::Total) }
        };
        // One that waits looks here after it has registered, and closing wakes those who have: so it learns of the end.
        if self.phase() != Phase::Open {
            return Err(Refusal { why: Why::Closed, ..refusal });
        }
        match (&self.overflow, refusal) {
            (Overflow::DropOldest, Refusal { envelope, why: Why::Full(scope) }) => self.displace(envelope, scope),
            (Overflow::Coalesce(merge), Refusal { envelope, why: Why::Full(scope) }) => {
                self.coalesce(envelope, scope, &**merge)
            }
            (_, refusal) => Err(refusal),
        }
    }

    /// Queues a message whose room is taken, unless its key has no room or the pool has closed.
    #[inline(always)]
    fn place(&self, envelope: Envelope<P>, origin: Origin) -> Result<(), Refusal<P>> {
        let home = self.home(envelope.message.key);
        let shard = &self.shards[home];
        let Some(limit) = self.key_limit else { return self.append(home, envelope, origin) };

        let mut stripe = lock(&shard.stripe);
        Self::sort_in(shard, &mut stripe);
        let (mut messages, mut bytes) = stripe.load(envelope.message.key);
        if let Origin::Handler { replaces: Some((key, size)) } = origin
            && key == envelope.message.key
        {
            (messages, bytes) = (messages - 1, bytes - size);
        }
        if messages + 1 > limit.messages || bytes + envelope.bytes > limit.bytes {
            let scope = Scope::Key(envelope.message.key);
            return Err(Refusal { envelope, why: Why::Full(scope) });
        }
        self.append(home, envelope, origin)
    }

    #[inline(always)]
    fn append(&self, home: usize, envelope: Envelope<P>, origin: Origin) -> Result<(), Refusal<P>> {
        let shard = &self.shards[home];
        let mut intake = lock(&shard.intake);
        let last = if origin == Origin::Outside { Phase::Open } else { Phase::Draining };
        if intake.phase > last {
            return Err(Refusal { envelope, why: Why::Closed });
        }
        intake.queue.push_back(envelope);
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

    fn wake(&self, home: usize) {
        match self.placement {
            Placement::Moving => self.idle.wake_any(home),
            Placement::Pinned => self.idle.wake(home),
        }
    }

    /// Makes room by dropping older messages.
    fn displace(&self, envelope: Envelope<P>, scope: Scope) -> Result<Submitted, Refusal<P>> {
        let (key, wanted) = (envelope.message.key, Amount::new(1, envelope.bytes));
        let (mut envelope, mut scope, mut dropped) = (envelope, scope, 0);
        loop {
            let Some(victim) = self.victim(key, scope) else { return Err(Refusal { envelope, why: Why::Full(scope) }) };
            dropped += 1;
            let room = Amount::new(1, victim.bytes);
            count(&self.counters.displaced);
            self.observe(Event::Displaced);
            self.bury(victim, Reason::Displaced);
            // Last, because a pool that drains is empty when all room is back.
            self.give_back(room);

            if !self.room.try_take(wanted) {
                scope = Scope::Total;
                continue;
            }
            match self.place(envelope, Origin::Outside) {
                Ok(()) => return Ok(Submitted::Displacing(dropped)),
                Err(Refusal { envelope: back, why }) => {
                    self.give_back(wanted);
                    match why {
                        Why::Full(other) => (envelope, scope) = (back, other),
                        Why::TooLarge | Why::Closed => return Err(Refusal { envelope: back, why }),
                    }
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
            Self::sort_in(shard, &mut stripe);
            match scope {
                Scope::Total => stripe.pop_oldest(key).or_else(|| stripe.pop_oldest_of_any()),
                Scope::Key(_) => stripe.pop_oldest(key),
            }
        })
    }

    /// Merges a message into the newest of its key. The bytes of both have room before they are merged.
    fn coalesce(&self, envelope: Envelope<P>, scope: Scope, merge: &Merge<P>) -> Result<Submitted, Refusal<P>> {
        let full = |envelope| Err(Refusal { envelope, why: Why::Full(scope) });
        let (key, bytes) = (envelope.message.key, envelope.bytes);
        let Some(mut extra) = Extra::take(self, bytes) else { return full(envelope) };
        let shard = &self.shards[self.home(key)];
        let mut stripe = lock(&shard.stripe);
        Self::sort_in(shard, &mut stripe);
        let key_full = self.key_limit.is_some_and(|limit| stripe.load(key).1 + bytes > limit.bytes);
        let Some(queued) = stripe.newest(key).filter(|_| !key_full) else { return full(envelope) };
        merge(&mut queued.message.payload, envelope.message.payload);
        queued.asker = match (queued.asker.take(), envelope.asker) {
            (Some(first), Some(second)) => Some(both(first, second)),
            (first, second) => first.or(second),
        };
        // A function that makes more of two payloads than they were is taken for one that adds them up.
        let before = queued.bytes;
        let after = (self.size)(&queued.message.payload).min(before + bytes);
        queued.bytes = after;
        stripe.resize(key, before, after);
        drop(stripe);
        extra.spend(before, after);
        Ok(Submitted::Merged)
    }

    // Working

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
            Self::sort_in(shard, stripe);
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
            self.bury(envelope, Reason::Failed("the pool was shut down before the next attempt".into()));
        }
        turn.is_some()
    }

    /// The next message of a shard that may be handled now.
    #[inline(always)]
    fn take(&self, shard: &Shard<P>, stripe: &mut Stripe<P>, slot: &mut Option<Envelope<P>>) -> Option<Turn> {
        loop {
            if stripe.arrivals().is_empty() && shard.pending.load(Ordering::Relaxed) > 0 {
                Self::swap(shard, stripe);
            }
            let turn = stripe.next(|| self.clock.now(), slot);
            // What has arrived may all have been of keys that are being handled.
            if turn.is_some() || shard.pending.load(Ordering::Relaxed) == 0 {
                return turn;
            }
        }
    }

    /// Exchanges the arrivals, of which there are none, for what was submitted meanwhile.
    fn swap(shard: &Shard<P>, stripe: &mut Stripe<P>) {
        let mut intake = lock(&shard.intake);
        std::mem::swap(&mut intake.queue, stripe.arrivals());
        shard.pending.store(0, Ordering::Relaxed);
    }

    /// Brings all messages to where the keys are, for those who must know them all.
    fn sort_in(shard: &Shard<P>, stripe: &mut Stripe<P>) {
        stripe.sort_in();
        Self::swap(shard, stripe);
        stripe.sort_in();
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
            Ok::<(), String>(())
        }));
        let (left, final_attempt) = (context.room, context.final_attempt);
        drop(context);
        match result {
            Ok(Ok(())) => self.handled(hand.worker),
            Ok(Err(error)) => {
                // If a follow-up has taken over its room, it needs some to be kept.
                let has_room = || left.is_some() || self.room.try_take(room);
                if self.failed(error, !final_attempt, has_room, hand) {
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
    fn failed(&self, error: String, again: bool, has_room: impl FnOnce() -> bool, hand: &mut Hand<P>) -> bool {
        count(&self.counters.failed);
        let attempts = hand.envelope.as_ref().map_or(0, |envelope| envelope.attempts);
        let retry = self.retry.filter(|retry| again && attempts < retry.attempts && has_room());
        tracing::warn!(key = hand.key.0, attempts, again = retry.is_some(), error, "a message failed");
        if let Some(retry) = retry {
            count(&self.counters.retried);
            self.observe(Event::Retried);
            hand.due = Some(later(self.clock.now(), retry.pause_after(attempts)));
            return true;
        }
        self.bury_held(hand, Reason::Failed(error));
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

    fn give_back(&self, amount: Amount) {
        let left = self.room.give_back(amount);
        if left.messages() == 0 && self.phase() != Phase::Open {
            let _guard = lock(&self.empty.0);
            self.empty.1.notify_all();
        }
    }

    /// Makes a dead letter of a message whose room is given back elsewhere.
    fn bury(&self, envelope: Envelope<P>, reason: Reason) {
        let Envelope { message, attempts, asker, .. } = envelope;
        let told = asker.map(|asker| (asker, Silence::DeadLettered(reason.clone())));
        let mut letter = DeadLetter { message, reason, attempts };
        if let Some(hook) = &self.on_dead_letter {
            quietly(|| hook(&mut letter));
        }
        count(&self.counters.dead_lettered);
        let forgotten = self.dead_letters.keep(letter);
        self.observe(Event::DeadLettered);
        self.observe(Event::Ended);
        // So late that whoever is told finds the letter, but before one is dropped: that would tell less.
        if let Some((asker, silence)) = told {
            asker.ended(silence);
        }
        if let Some(forgotten) = forgotten {
            count(&self.counters.forgotten);
            self.observe(Event::Forgotten);
            quietly(|| drop(forgotten));
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

    // Ending

    fn phase(&self) -> Phase {
        match self.phase.load(Ordering::SeqCst) {
            0 => Phase::Open,
            1 => Phase::Draining,
            _ => Phase::Closed,
        }
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.phase() == Phase::Closed
    }

    fn enter(&self, phase: Phase) {
        self.phase.fetch_max(phase as usize, Ordering::SeqCst);
        for shard in &self.shards {
            let mut intake = lock(&shard.intake);
            intake.phase = intake.phase.max(phase);
        }
        self.room.wake_all();
    }

    /// Accepts only follow-ups from now on, and waits until all is handled or the time is over.
    pub(crate) fn drain(&self, patience: Duration) {
        self.enter(Phase::Draining);
        let deadline = Instant::now().checked_add(patience);
        let mut guard = lock(&self.empty.0);
        while self.room.held_now().messages() > 0 || self.running() > 0 {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return;
            }
            let wait = left.unwrap_or(Duration::MAX);
            guard = self.empty.1.wait_timeout(guard, wait).unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
    }

    /// Accepts nothing any more, and takes back what has not begun.
    pub(crate) fn close(&self) -> Vec<Message<P>> {
        self.enter(Phase::Closed);
        let mut returned = Vec::new();
        for shard in &self.shards {
            let mut stripe = lock(&shard.stripe);
            Self::sort_in(shard, &mut stripe);
            returned.append(&mut stripe.clear());
        }
        self.idle.wake_all();
        let returned = returned.into_iter().map(|envelope| {
            count(&self.counters.returned);
            self.give_back(Amount::new(1, envelope.bytes));
            self.observe(Event::Returned);
            self.observe(Event::Ended);
            if let Some(asker) = envelope.asker {
                asker.ended(Silence::Returned);
            }
            envelope.message
        });
        returned.collect()
    }

    /// How many workers hold a message. After [`close`](Self::close) there will be no more.
    pub(crate) fn running(&self) -> usize {
        self.shards.iter().filter(|shard| shard.worker.busy.load(Ordering::Relaxed)).count()
    }

    // Watching

    pub(crate) fn depth(&self) -> Amount {
        self.room.held()
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

/// Room for bytes that is given back when dropped, but for what was spent: also if the code in between panics.
struct Extra<'a, P: Send + 'static> {
    engine: &'a Engine<P>,
    bytes: usize,
}

impl<'a, P: Send + 'static> Extra<'a, P> {
    fn take(engine: &'a Engine<P>, bytes: usize) -> Option<Self> {
        engine.room.try_take(Amount::new(0, bytes)).then(|| Self { engine, bytes })
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

/// A place in the line of those who wait for room, given up when dropped.
struct Place<'a> {
    room: &'a Room,
    scope: Scope,
    ticket: u64,
}

impl<'a> Place<'a> {
    /// Keeps the place if it is in the right line, else takes one there.
    fn hold<'p>(place: &'p mut Option<Self>, room: &'a Room, scope: Scope) -> &'p Self {
        if place.as_ref().is_some_and(|place| place.scope != scope) {
            *place = None;
        }
        place.get_or_insert_with(|| Place { room, scope, ticket: room.ticket() })
    }

    fn register(&self, waker: &Waker) {
        self.room.register(self.scope, self.ticket, waker);
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.room.unregister(self.scope, self.ticket);
    }
}

/// Runs a piece of the application's code that may panic and has nobody to tell: a panic hook has already told.
fn quietly(code: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(code)).is_err() {
        tracing::error!("the drop of a payload, the hook of dead letters or the observer panicked");
    }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("a panic without text").to_owned()
}

/// Drives a future on this thread.
fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(thread::Thread);

    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }

    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut std::task::Context::from_waker(&waker)) {
            return output;
        }
        thread::park();
    }
}
