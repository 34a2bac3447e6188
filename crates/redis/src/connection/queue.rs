//! The queue between the tasks that send requests and the actor.

use std::sync::atomic::AtomicUsize;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use tokio::sync::{Notify, Semaphore, broadcast, watch};
use tokio::time::{Instant, timeout_at};

use super::batch::Batch;
use super::budget::{Budget, Weight};
use super::submission::{Reply, Submission};
use crate::stats::Tally;
use crate::{ClientStats, Error, Fault, Options, Outcome, Phase, State, Status};

/// How many states somebody may be behind before they miss some.
const STATES: usize = 64;

/// One of so many has gone away: then they are looked for.
const WORTH: usize = 64;

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
    /// No deadline of these is earlier. There may be no request any more that has it.
    first: Option<Instant>,
    budget: Budget,
    /// There was no room for somebody since those who have gone away were last looked for.
    is_short: bool,
    /// How many have gone away since then. What they asked may still take room.
    gone: usize,
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

/// What the actor has to know.
pub(super) struct Look {
    /// When what still waits may have its first deadline.
    pub(super) first: Option<Instant>,
    /// Those who have gone away are to be looked for.
    pub(super) is_to_sweep: bool,
    /// By when it is to have ended, if it is to.
    pub(super) closing: Option<Instant>,
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
            first: None,
            budget: Budget::new(options.max_requests, options.max_bytes),
            is_short: false,
            gone: 0,
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
            match push(self.queue(), asked, reply) {
                Ok(()) => return Ok(()),
                Err(Refused::Because(error)) => return Err(error),
                Err(Refused::Full(unanswered)) => reply = unanswered,
            }
            // What was given back since the look has left its word.
            self.room.notified().await;
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
    /// the actor.
    pub(super) fn look(&self, empty: Option<&mut Batch>, context: &Context<'_>) -> Look {
        let mut queue = self.queue();
        if let Some(empty) = empty {
            std::mem::swap(&mut queue.waiting, empty);
            queue.first = None;
        }
        queue.register(context);
        Look { first: queue.first, is_to_sweep: queue.is_to_sweep(), closing: queue.closing }
    }

    /// All that waits.
    pub(super) fn take(&self) -> Batch {
        let mut queue = self.queue();
        queue.first = None;
        std::mem::take(&mut queue.waiting)
    }

    /// Puts back what was not sent, before all that came since.
    pub(super) fn put_back(&self, unsent: Batch) {
        let mut queue = self.queue();
        queue.first = unsent.first_deadline().into_iter().chain(queue.first).min();
        queue.waiting.prepend(unsent);
    }

    /// Ends what has waited too long. Returns when to look again.
    pub(super) fn expire(&self, now: Instant, phase: Phase) -> Option<Instant> {
        let mut queue = self.queue();
        if queue.first.is_none_or(|first| first > now) {
            return queue.first;
        }
        let late = queue.waiting.take_out(|request| request.deadline > now);
        let next = queue.waiting.first_deadline();
        queue.first = next;
        drop(queue);
        for request in late {
            self.time_out(request, phase);
        }
        next
    }

    /// Somebody has gone away before their request has ended.
    pub(crate) fn leave(&self) {
        let mut queue = self.queue();
        queue.gone += 1;
        let is_to_sweep = queue.is_to_sweep();
        wake(queue, is_to_sweep);
    }

    /// If there is no room because of those who have gone away, drops what they asked. Returns whether that was so.
    pub(super) fn sweep(&self) -> bool {
        let mut queue = self.queue();
        if !queue.is_to_sweep() {
            return false;
        }
        // Whoever waits for room does not ask again before there is some.
        (queue.is_short, queue.gone) = (queue.budget.waiting > 0, 0);
        let unwanted = queue.waiting.take_out(Submission::is_wanted);
        drop(queue);
        for request in unwanted {
            self.give_back(request.weight);
        }
        true
    }

    /// Requests are taken from now on.
    pub(super) fn open_gate(&self) {
        let mut queue = self.queue();
        if !matches!(queue.gate, Gate::Closed) {
            queue.gate = Gate::Open;
        }
    }

    /// Waits until something has an earlier deadline than this, or those who have gone away are to be looked for, or it is to be
    /// closed.
    pub(super) async fn changed(&self, first: Option<Instant>) {
        std::future::poll_fn(|context| {
            let mut queue = self.queue();
            queue.register(context);
            let is_earlier = queue.first.is_some_and(|new| first.is_none_or(|first| new < first));
            let is_changed = is_earlier || queue.is_to_sweep() || queue.closing.is_some();
            if is_changed { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    /// Requests are refused from now on, and those that wait end. Whatever the fault was, it was not an answer to them.
    pub(super) fn shut_gate(&self, fault: &Fault) {
        let error = Error::Lost { outcome: Outcome::NeverSent, source: fault.clone() };
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
        wake(queue, true);
        self.room.notify_one();
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
    let Some(weight) = queue.budget.take(count, bytes.len()) else {
        queue.is_short = true;
        let is_to_sweep = queue.is_to_sweep();
        wake(queue, is_to_sweep);
        return Err(Refused::Full(reply));
    };
    let request = Submission { len: bytes.len(), left: count, weight, submitted, deadline, reply: Some(reply) };
    queue.waiting.push(request, bytes);
    queue.first = Some(queue.first.map_or(deadline, |first| first.min(deadline)));
    wake(queue, true);
    Ok(())
}

/// Wakes the actor, if it is to be woken and does not know yet.
fn wake(mut queue: MutexGuard<'_, Queue>, is_to_wake: bool) {
    let actor = queue.actor.take_if(|_| is_to_wake);
    drop(queue);
    if let Some(actor) = actor {
        actor.wake();
    }
}

impl Queue {
    /// Whether there is no room, and enough of it is taken for those who have gone away that they are worth looking for.
    fn is_to_sweep(&self) -> bool {
        self.is_short && self.gone > self.budget.used().requests / WORTH
    }

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
