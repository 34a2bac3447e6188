//! A deterministic pool for tests: without threads, seeded, in virtual time, stepped by the caller.

use std::future::Future as _;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::ask::new_ask;
use crate::clock::Clock;
use crate::engine::{Engine, NextWork, WorkerState};
use crate::{AskError, Builder, DeadLetters, Handler, Message, Reply, Shutdown, Stats, SubmitError, Submitted};

/// A deterministic pool for tests, created by [`Builder::simulate`]. Messages are handled only in [`step`](Self::step), the time
/// changes only in [`advance`](Self::advance), and the same seed gives the same order.
///
/// It has the bounds, policies, retries and dead letters of the real pool, but no threads. With
/// [`Placement::Moving`](crate::Placement::Moving) any ready key may be next, so a test with many seeds covers the orders that
/// concurrent workers can cause.
///
/// ```
/// use std::convert::Infallible;
/// use std::sync::Mutex;
/// use std::sync::Arc;
/// use tidewire_pool::{Context, Message, Pool};
///
/// let order = |seed| {
///     let seen = Arc::new(Mutex::new(Vec::new()));
///     let log = Arc::clone(&seen);
///     let handler = move |message: &mut Message<&'static str>, _: &mut Context<'_, _>| {
///         log.lock().unwrap().push(message.payload);
///         Ok::<(), Infallible>(())
///     };
///     let mut pool = Pool::builder().workers(2).simulate(seed, handler).unwrap();
///     for (key, name) in [(1, "a1"), (1, "a2"), (2, "b1"), (3, "c1")] {
///         pool.submit(Message::new(key, name)).unwrap();
///     }
///     while pool.step() {}
///     let seen = seen.lock().unwrap().clone();
///     seen
/// };
/// assert_eq!(order(1), order(1));
/// for seed in 0..100 {
///     let seen = order(seed);
///     let position = |name| seen.iter().position(|&other| other == name);
///     assert!(position("a1") < position("a2"), "messages of a key stay in order");
/// }
/// ```
pub struct Simulation<P: Send + 'static> {
    engine: Engine<P>,
    random: fastrand::Rng,
    state: WorkerState<P>,
}

impl<P: Send + 'static> Simulation<P> {
    pub(crate) fn new<H: Handler<P>>(options: Builder<P>, seed: u64, handler: H) -> Self {
        Self {
            engine: Engine::new(options, handler, Clock::simulated()),
            random: fastrand::Rng::with_seed(seed),
            state: WorkerState::of(0),
        }
    }

    /// Submits a message. It never waits, not even under [`Overflow::Wait`](crate::Overflow::Wait), because only a step of the caller
    /// returns budget.
    pub fn submit(&mut self, message: Message<P>) -> Result<Submitted, SubmitError<P>> {
        self.engine.try_submit(message, None)
    }

    /// Submits a message that carries a [`Reply`], and steps until the reply or an error. If no message is left before that, the result
    /// is [`AskError::Unanswered`].
    pub fn ask<R: Send + 'static>(&mut self, message: impl FnOnce(Reply<R>) -> Message<P>) -> Result<R, AskError<P>> {
        let (reply, ask, mut future) = new_ask();
        self.engine.try_submit(message(reply), Some(ask)).map_err(AskError::NotSubmitted)?;
        let mut context = Context::from_waker(Waker::noop());
        loop {
            if let Poll::Ready(result) = Pin::new(&mut future).poll(&mut context) {
                return result.map_err(Into::into);
            }
            if !self.step_or_advance() {
                return Err(AskError::Unanswered);
            }
        }
    }

    /// Handles one message of a key that the seed selects. Returns false if no message was ready.
    pub fn step(&mut self) -> bool {
        let workers = self.engine.workers();
        let first = self.random.usize(..workers);
        let choice = self.random.usize(..);
        let mut homes = (0..workers).map(|offset| (first + offset) % workers);
        let next = homes.find_map(|home| self.engine.next_chosen(home, choice, &mut self.state));
        let Some(envelope) = next else { return false };
        self.engine.handle(envelope, &mut self.state);
        self.engine.complete(&mut self.state);
        self.engine.flush(&mut self.state);
        true
    }

    /// Steps until no message is left, and advances the time to the next retry if no message is ready. Returns the number of
    /// steps and advances, at most `limit`.
    pub fn run(&mut self, limit: usize) -> usize {
        (0..limit).take_while(|_| self.step_or_advance()).count()
    }

    fn step_or_advance(&mut self) -> bool {
        if self.step() {
            return true;
        }
        let next = (0..self.engine.workers()).map(|worker| self.engine.next_work(worker));
        let Some(NextWork::Later(time)) = next.min_by_key(|next| next.time()) else { return false };
        self.advance(time);
        true
    }

    /// Returns the virtual time. It has no relation to real time.
    pub fn now(&self) -> Instant {
        self.engine.clock.now()
    }

    /// Advances the virtual time.
    pub fn advance(&mut self, by: Duration) {
        self.engine.clock.advance(by);
    }

    /// Returns the dead letters.
    pub fn dead_letters(&self) -> &DeadLetters<P> {
        &self.engine.dead_letters
    }

    /// Returns the number of messages in the pool.
    pub fn depth(&self) -> usize {
        self.engine.depth().messages()
    }

    /// Returns the number of bytes in the pool.
    pub fn bytes(&self) -> usize {
        self.engine.depth().bytes()
    }

    /// Returns the counters of the pool.
    pub fn stats(&self) -> Stats {
        self.engine.stats()
    }

    /// Closes the pool, and returns the queued messages.
    pub fn abort(&mut self) -> Shutdown<P> {
        Shutdown { returned: self.engine.close(), running: 0 }
    }
}

impl<P: Send + 'static> std::fmt::Debug for Simulation<P> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Simulation").field("depth", &self.depth()).finish_non_exhaustive()
    }
}
