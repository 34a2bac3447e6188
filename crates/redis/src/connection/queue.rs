//! Where those who ask meet the actor.

use std::sync::atomic::AtomicUsize;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use tokio::sync::{Notify, Semaphore, broadcast, watch};
use tokio::time::{Instant, timeout_at};

use super::batch::Batch;
use super::budget::{Budget, Weight};
use super::submission::{Reply, Submission, befallen};
use crate::stats::Tally;
use crate::{ClientStats, Error, Options, Outcome, Phase, State, Status};

/// How many states somebody may be behind before they miss some.
const STATES: usize = 64;

/// What handles and the actor share.
pub(crate) struct Shared {
    pub(crate) options: Options,
    pub(crate) status: watch::Sender<Status>,
    /// The same one by one. Sent to while the status is locked, so that both are in the same order.
    states: broadcast::Sender<Status>,
    queue: Mutex<Queue>,
    /// Those who wait for room, one behind the other.
    line: Semaphore,
    /// Wakes the first of them.
    room: Notify,
    /// What is counted where it is rare.
    stats: Mutex<ClientStats>,
    /// What the actor has told.
    tally: Mutex<Tally>,
    /// How many can ask.
    pub(crate) handles: AtomicUsize,
}

struct Queue {
    waiting: Batch,
    /// How many have been queued so far.
    arrived: u64,
    budget: Budget,
    gate: Gate,
    /// When it is to have ended, if it is to.
    closing: Option<Instant>,
    /// Who is to be woken when something is queued. It is there while the actor does not know of anything.
    actor: Option<Waker>,
}

/// What becomes of new requests.
enum Gate {
    Open,
    /// There is no connection, for this reason.
    Failed(Error),
    Closed,
}

/// A request that is to be queued.
#[derive(Clone, Copy)]
pub(crate) struct Asked<'a> {
    /// One command or several, as they are written.
    pub(crate) bytes: &'a [u8],
    /// How many.
    pub(crate) count: usize,
    pub(crate) submitted: Instant,
    pub(crate) deadline: Instant,
}

/// Why a request was not queued.
pub(crate) enum Refused {
    /// There is no room now, and this still waits for its reply.
    Full(Reply),
    Because(Error),
}

impl Shared {
    pub(crate) fn new(options: Options) -> Self {
        let status = Status { state: State::Init, generation: 0, last_error: None };
        let queue = Queue {
            waiting: Batch::default(),
            arrived: 0,
            budget: Budget::new(options.max_requests, options.max_bytes),
            gate: Gate::Open,
            closing: None,
            actor: None,
        };
        Self {
            options,
            status: watch::Sender::new(status),
            states: broadcast::Sender::new(STATES),
            queue: Mutex::new(queue),
            line: Semaphore::new(1),
            room: Notify::new(),
            stats: Mutex::default(),
            tally: Mutex::default(),
            handles: AtomicUsize::new(0),
        }
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a request, if there is room and nobody waits for some.
    pub(crate) fn submit(&self, asked: Asked<'_>, reply: Reply) -> Result<(), Refused> {
        let queue = self.queue();
        if queue.budget.waiting > 0 && matches!(queue.gate, Gate::Open) {
            return Err(Refused::Full(reply));
        }
        push(queue, asked, reply)
    }

    /// Queues a request when there is room, in the order of asking.
    pub(crate) async fn submit_in_turn(&self, asked: Asked<'_>, reply: Reply) -> Result<(), Error> {
        let _counted = self.count_in();
        timeout_at(asked.deadline, self.submit_first(asked, reply)).await.unwrap_or_else(|_| {
            self.count(|stats| stats.timeouts.count(Phase::Queued));
            Err(Error::TimedOut { phase: Phase::Queued })
        })
    }

    async fn submit_first(&self, asked: Asked<'_>, mut reply: Reply) -> Result<(), Error> {
        // It is never closed. Whoever is first looks for themselves whether there is still something to wait for.
        let _first = self.line.acquire().await;
        loop {
            let mut room = std::pin::pin!(self.room.notified());
            // Before the look: what is given back after it wakes.
            room.as_mut().enable();
            match push(self.queue(), asked, reply) {
                Ok(()) => return Ok(()),
                Err(Refused::Because(error)) => return Err(error),
                Err(Refused::Full(unanswered)) => reply = unanswered,
            }
            room.await;
        }
    }

    /// One more waits for room, until this is dropped.
    fn count_in(&self) -> impl Drop {
        struct Counted<'a>(&'a Shared);
        impl Drop for Counted<'_> {
            fn drop(&mut self) {
                self.0.queue().budget.waiting -= 1;
            }
        }
        self.queue().budget.waiting += 1;
        Counted(self)
    }

    /// Gives back the room of what has ended.
    pub(super) fn give_back(&self, weight: Weight) {
        if self.queue().budget.give_back(weight) {
            self.room.notify_one();
        }
    }

    /// Takes all that waits to a batch that is empty and gives its room, if there is one. Whoever queues something after this wakes
    /// the actor. Returns by when it is to have ended, if it is to.
    pub(super) fn look(&self, empty: Option<&mut Batch>, context: &Context<'_>) -> Option<Instant> {
        let mut queue = self.queue();
        if let Some(empty) = empty {
            std::mem::swap(&mut queue.waiting, empty);
        }
        queue.register(context);
        queue.closing
    }

    /// All that waits.
    pub(super) fn take(&self) -> Batch {
        std::mem::take(&mut self.queue().waiting)
    }

    /// Puts back what was not sent, before all that came since.
    pub(super) fn put_back(&self, unsent: Batch) {
        self.queue().waiting.prepend(unsent);
    }

    /// Ends what has waited too long or for nobody. Returns when to look again, and how many have been queued so far.
    pub(super) fn expire(&self, now: Instant, phase: Phase) -> (Option<Instant>, u64) {
        let mut queue = self.queue();
        let over = queue.waiting.take_out(|request| request.deadline > now && request.is_wanted());
        let next = queue.waiting.requests.iter().map(|request| request.deadline).min();
        let arrived = queue.arrived;
        drop(queue);
        for request in over {
            self.time_out(request, phase);
        }
        (next, arrived)
    }

    /// Requests are taken from now on.
    pub(super) fn open_gate(&self) {
        let mut queue = self.queue();
        if !matches!(queue.gate, Gate::Closed) {
            queue.gate = Gate::Open;
        }
    }

    /// The same, if so; else they are refused as they were.
    pub(super) fn open_gate_if(&self, is_open: bool) {
        if is_open {
            self.open_gate();
        }
    }

    /// Waits until more than that has been queued, or it is to be closed.
    pub(super) async fn queued(&self, seen: u64) {
        std::future::poll_fn(|context| {
            let mut queue = self.queue();
            queue.register(context);
            let is_new = queue.arrived != seen || queue.closing.is_some();
            if is_new { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    /// Requests are refused from now on, and those that wait end. Whatever the fault was, it was not an answer to them.
    pub(super) fn shut_gate(&self, error: &Error) {
        let error = befallen(error, Outcome::NeverSent);
        let mut queue = self.queue();
        if !matches!(queue.gate, Gate::Closed) {
            queue.gate = Gate::Failed(error.clone());
        }
        drop(queue);
        self.room.notify_one();
        for request in self.take().requests {
            self.end(request, error.clone());
        }
    }

    /// Nothing more is taken; by then it is to have ended.
    pub(crate) fn close(&self, by: Instant) {
        let mut queue = self.queue();
        queue.gate = Gate::Closed;
        queue.closing = Some(queue.closing.map_or(by, |closing| closing.min(by)));
        let actor = queue.actor.take();
        drop(queue);
        self.room.notify_one();
        if let Some(actor) = actor {
            actor.wake();
        }
    }

    /// By when it is to have ended, if it is to.
    pub(super) fn closing(&self) -> Option<Instant> {
        self.queue().closing
    }

    /// Ends what will have no reply. Its room is there before somebody can ask again.
    pub(super) fn end(&self, request: Submission, error: Error) {
        self.give_back(request.weight);
        request.fail(error);
    }

    /// Ends what is late and was not sent.
    pub(super) fn time_out(&self, request: Submission, phase: Phase) {
        if request.is_wanted() {
            self.count(|stats| stats.timeouts.count(phase));
        }
        self.end(request, Error::TimedOut { phase });
    }

    /// Counts something that is rare.
    pub(crate) fn count(&self, add: impl FnOnce(&mut ClientStats)) {
        add(&mut self.stats.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// What the actor has counted so far. It tells when it rests.
    pub(crate) fn tally(&self) -> MutexGuard<'_, Tally> {
        self.tally.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn stats(&self) -> ClientStats {
        let mut stats = self.stats.lock().unwrap_or_else(PoisonError::into_inner).with(&self.tally());
        let queue = self.queue();
        let Weight { requests, bytes } = queue.budget.used();
        (stats.queued, stats.in_flight, stats.in_flight_bytes) = (queue.waiting.requests.len(), requests, bytes);
        stats
    }

    pub(crate) fn enter(&self, state: State) {
        self.transition(|status| status.state = state);
    }

    pub(crate) fn transition(&self, change: impl FnOnce(&mut Status)) {
        self.status.send_modify(|status| {
            change(status);
            // Nobody has to listen.
            let _ = self.states.send(status.clone());
        });
    }

    /// The state now, and all that follow.
    pub(crate) fn states(&self) -> (Status, broadcast::Receiver<Status>) {
        let status = self.status.borrow();
        (status.clone(), self.states.subscribe())
    }
}

/// Queues a request, if there is room.
fn push(mut queue: MutexGuard<'_, Queue>, asked: Asked<'_>, reply: Reply) -> Result<(), Refused> {
    match &queue.gate {
        Gate::Open => {}
        Gate::Failed(error) => return Err(Refused::Because(error.clone())),
        Gate::Closed => return Err(Refused::Because(Error::Closed { outcome: Outcome::NeverSent })),
    }
    let Asked { bytes, count, submitted, deadline } = asked;
    let Some(weight) = queue.budget.take(count, bytes.len()) else { return Err(Refused::Full(reply)) };
    let request = Submission { len: bytes.len(), left: count, weight, submitted, deadline, reply: Some(reply) };
    queue.waiting.push(request, bytes);
    queue.arrived += 1;
    let actor = queue.actor.take();
    drop(queue);
    if let Some(actor) = actor {
        actor.wake();
    }
    Ok(())
}

impl Queue {
    /// Who is to be woken.
    fn register(&mut self, context: &Context<'_>) {
        if self.actor.as_ref().is_none_or(|actor| !actor.will_wake(context.waker())) {
            self.actor = Some(context.waker().clone());
        }
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("status", &*self.status.borrow()).finish_non_exhaustive()
    }
}
