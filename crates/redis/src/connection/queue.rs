//! Where those who ask meet the actor.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;

use tokio::sync::{broadcast, watch};
use tokio::time::Instant;

use super::submission::{Budget, Submission, befallen};
use crate::stats::Tally;
use crate::{ClientStats, Error, Options, Outcome, Phase, State, Status};

/// How many states somebody may be behind before they miss some.
const STATES: usize = 64;

/// What handles and the actor share.
pub(crate) struct Shared {
    pub(crate) options: Options,
    pub(crate) budget: Arc<Budget>,
    pub(crate) status: watch::Sender<Status>,
    /// The same one by one. Sent to while the status is locked, so that both are in the same order.
    states: broadcast::Sender<Status>,
    queue: Mutex<Queue>,
    /// What is counted where it is rare.
    stats: Mutex<ClientStats>,
    /// What the actor has told.
    tally: Mutex<Tally>,
    /// Something was queued since the actor last looked.
    ready: AtomicBool,
    actor: Mutex<Option<Waker>>,
    /// How many can ask.
    pub(crate) handles: AtomicUsize,
}

struct Queue {
    requests: VecDeque<Submission>,
    /// How many have been queued so far.
    arrived: u64,
    gate: Gate,
    /// When it is to have ended, if it is to.
    closing: Option<Instant>,
}

/// What becomes of new requests.
enum Gate {
    Open,
    /// There is no connection, for this reason.
    Failed(Error),
    Closed,
}

impl Shared {
    pub(crate) fn new(options: Options) -> Self {
        let status = Status { state: State::Init, generation: 0, last_error: None };
        Self {
            budget: Arc::new(Budget::new(options.max_requests, options.max_bytes)),
            options,
            status: watch::Sender::new(status),
            states: broadcast::Sender::new(STATES),
            queue: Mutex::new(Queue { requests: VecDeque::new(), arrived: 0, gate: Gate::Open, closing: None }),
            stats: Mutex::default(),
            tally: Mutex::default(),
            ready: AtomicBool::new(false),
            actor: Mutex::new(None),
            handles: AtomicUsize::new(0),
        }
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a request, or ends it at once.
    pub(crate) fn submit(&self, request: Submission) {
        let mut queue = self.queue();
        let refused = match &queue.gate {
            Gate::Open => {
                queue.requests.push_back(request);
                queue.arrived += 1;
                drop(queue);
                return self.announce();
            }
            Gate::Failed(error) => error.clone(),
            Gate::Closed => Error::Closed { outcome: Outcome::NeverSent },
        };
        drop(queue);
        request.fail(refused);
    }

    /// Why nothing is taken now, if so.
    pub(crate) fn refuses(&self) -> Option<Error> {
        match &self.queue().gate {
            Gate::Open => None,
            Gate::Failed(error) => Some(error.clone()),
            Gate::Closed => Some(Error::Closed { outcome: Outcome::NeverSent }),
        }
    }

    fn announce(&self) {
        if !self.ready.swap(true, SeqCst) {
            self.wake();
        }
    }

    fn wake(&self) {
        let actor = self.actor.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(waker) = actor {
            waker.wake();
        }
    }

    /// Who is woken. Lowers the flag: what is queued after this wakes again.
    pub(crate) fn register(&self, waker: &Waker) {
        let mut actor = self.actor.lock().unwrap_or_else(PoisonError::into_inner);
        if actor.as_ref().is_none_or(|known| !known.will_wake(waker)) {
            *actor = Some(waker.clone());
        }
        drop(actor);
        self.ready.store(false, SeqCst);
    }

    /// Whether something has been queued since the actor last looked.
    pub(crate) fn has_news(&self) -> bool {
        self.ready.load(SeqCst)
    }

    /// All that waits.
    pub(crate) fn take(&self) -> VecDeque<Submission> {
        std::mem::take(&mut self.queue().requests)
    }

    /// All that waits, for a queue that is empty and gives its room.
    pub(crate) fn take_into(&self, empty: &mut VecDeque<Submission>) {
        std::mem::swap(&mut self.queue().requests, empty);
    }

    /// Puts back what was not sent, before all that came since.
    pub(crate) fn put_back(&self, mut unsent: VecDeque<Submission>) {
        let mut queue = self.queue();
        unsent.append(&mut queue.requests);
        queue.requests = unsent;
    }

    /// Ends what has waited too long or for nobody. Returns when to look again, and how many have been queued so far.
    pub(crate) fn expire(&self, now: Instant, phase: Phase) -> (Option<Instant>, u64) {
        let mut queue = self.queue();
        let (mut late, mut next) = (Vec::new(), None::<Instant>);
        for request in std::mem::take(&mut queue.requests) {
            if request.deadline <= now {
                late.push(request);
            } else if !request.is_abandoned() {
                next = Some(next.map_or(request.deadline, |next| next.min(request.deadline)));
                queue.requests.push_back(request);
            }
        }
        let arrived = queue.arrived;
        drop(queue);
        for request in late {
            self.time_out(request, phase);
        }
        (next, arrived)
    }

    /// Requests are taken from now on.
    pub(crate) fn open_gate(&self) {
        let mut queue = self.queue();
        if !matches!(queue.gate, Gate::Closed) {
            queue.gate = Gate::Open;
        }
    }

    /// The same, if so; else they are refused as they were.
    pub(crate) fn open_gate_if(&self, is_open: bool) {
        if is_open {
            self.open_gate();
        }
    }

    /// Waits until more than that has been queued, or it is to be closed.
    pub(crate) async fn queued(&self, seen: u64) {
        std::future::poll_fn(|context| {
            // Lowered before the look, so that what comes after it wakes again.
            self.register(context.waker());
            let queue = self.queue();
            let is_new = queue.arrived != seen || queue.closing.is_some();
            if is_new { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
        })
        .await;
    }

    /// Requests are refused from now on, and those that wait end. Whatever the fault was, it was not an answer to them.
    pub(crate) fn shut_gate(&self, error: &Error) {
        let error = befallen(error, Outcome::NeverSent);
        let mut queue = self.queue();
        if !matches!(queue.gate, Gate::Closed) {
            queue.gate = Gate::Failed(error.clone());
        }
        let waiting = std::mem::take(&mut queue.requests);
        drop(queue);
        for request in waiting {
            request.fail(error.clone());
        }
    }

    /// Nothing more is taken; by then it is to have ended.
    pub(crate) fn close(&self, by: Instant) {
        let mut queue = self.queue();
        queue.gate = Gate::Closed;
        queue.closing = Some(queue.closing.map_or(by, |closing| closing.min(by)));
        drop(queue);
        self.announce();
        self.wake();
    }

    /// By when it is to have ended, if it is to.
    pub(crate) fn closing(&self) -> Option<Instant> {
        self.queue().closing
    }

    /// Ends what is late.
    pub(crate) fn time_out(&self, request: Submission, phase: Phase) {
        self.count(|stats| stats.timeouts.count(phase));
        request.fail(Error::TimedOut { phase });
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
        stats.queued += self.queue().requests.len();
        (stats.in_flight, stats.in_flight_bytes) = self.budget.used();
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

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("status", &*self.status.borrow()).finish_non_exhaustive()
    }
}
