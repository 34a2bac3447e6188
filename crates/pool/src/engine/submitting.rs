//! Submission: the budget, the overflow policy, and follow-up messages.
//!
//! A follow-up inherits the budget of the message that caused it. So a chain of messages makes progress however full the pool is,
//! and no worker waits for budget. A message that has passed its budget on and then fails is retried only if there is other
//! budget: the bound always holds.
#![expect(
    clippy::inline_always,
    reason = "a message is large, and a call that is not inlined copies it: measured 1.2 to 1.8 times the CPU"
)]

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Poll, Wake, Waker};

use super::{Engine, Phase, count};
use crate::ask::{Asked, both};
use crate::message::Envelope;
use crate::room::{Amount, Room, Scope};
use crate::sync::{Ordering, lock, thread};
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

/// How often a thread that may block lets others run, before it blocks: room comes in batches, and soon if handlers are quick.
const YIELDS: u32 = if cfg!(loom) { 0 } else { 16 };

impl<P: Send + 'static> Engine<P> {
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
        match self.offer(envelope) {
            Err(refusal) if self.may_wait(&refusal) => {
                let wanted = Amount::new(1, refusal.envelope.bytes);
                for _ in 0..YIELDS {
                    if self.room.fits(wanted) {
                        break;
                    }
                    thread::yield_now();
                }
                block_on(self.wait(refusal.envelope))
            }
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
        shard.sort_in(&mut stripe);
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
            shard.sort_in(&mut stripe);
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
        shard.sort_in(&mut stripe);
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

/// Drives a future on this thread.
fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let waker = unpark_this_thread();
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

/// Made once per thread.
#[cfg(not(loom))]
fn unpark_this_thread() -> Waker {
    thread_local! {
        static WAKER: Waker = Waker::from(Arc::new(Unpark(thread::current())));
    }
    WAKER.with(Waker::clone)
}

/// The model checker starts its threads anew for every interleaving.
#[cfg(loom)]
fn unpark_this_thread() -> Waker {
    Waker::from(Arc::new(Unpark(thread::current())))
}
