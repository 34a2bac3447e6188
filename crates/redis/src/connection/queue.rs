//! The queue between the callers and the actor of a connection.
//!
//! One critical section checks the gate, takes a permit and appends the request. Requests are therefore written in the order in
//! which their submissions returned, and no request is accepted after a close.
//!
//! # Waking the actor
//!
//! `actor` holds the waker of the actor while the actor has seen everything in the queue. It is registered in the critical section
//! that takes the requests, and taken by the first change after that: a request, a close, or a reason to drop abandoned requests.
//! So a change is either seen by the actor or wakes it, and further changes do not wake it until it looks again.

use std::task::{Context, Poll, Waker};

use tokio::time::Instant;

use super::batch::Batch;
use super::gate::{Gate, Permit, Waiters};
use super::request::PendingRequest;
use crate::Error;
use crate::sync::{Mutex, MutexGuard, lock};

/// Requests that no connection has taken yet.
pub(crate) struct Queue {
    state: Mutex<QueueState>,
    waiters: Waiters,
}

struct QueueState {
    gate: Gate,
    pending: Batch,
    /// No pending request has an earlier deadline. The request that had this one may have ended.
    earliest_deadline: Option<Instant>,
    /// When the connection must have ended, if it is closing.
    closing: Option<Instant>,
    /// The number of [`Hold`](super::shared::Hold)s.
    holds: usize,
    actor: Option<Waker>,
}

/// Why a request was not queued.
pub(crate) enum SubmitRejection {
    /// There is no permit for it now.
    Full(PendingRequest),
    /// No request is accepted now.
    Error(Error),
}

/// Information for the actor besides the requests that it takes.
pub(super) struct Signals {
    /// The earliest deadline of the requests that stay in the queue.
    pub(super) earliest_deadline: Option<Instant>,
    /// Whether to drop abandoned requests.
    pub(super) should_reclaim: bool,
    /// When the connection must have ended, if it is closing.
    pub(super) closing: Option<Instant>,
    /// Whether a closing connection must stay open until then, because the client itself may need it.
    pub(super) is_held: bool,
}

/// Statistics of the queue.
pub(crate) struct Usage {
    pub(crate) queued: usize,
    pub(crate) in_flight: Permit,
}

impl Queue {
    pub(super) fn new(limit: Permit) -> Self {
        let state = QueueState {
            gate: Gate::new(limit),
            pending: Batch::default(),
            earliest_deadline: None,
            closing: None,
            holds: 0,
            actor: None,
        };
        Self { state: Mutex::new(state), waiters: Waiters::new() }
    }

    fn lock(&self) -> MutexGuard<'_, QueueState> {
        lock(&self.state)
    }

    /// Queues a request, if there is a permit for it and no caller waits for one.
    pub(crate) fn submit(&self, bytes: &[u8], request: PendingRequest) -> Result<(), SubmitRejection> {
        let state = self.lock();
        if state.gate.has_waiters() {
            state.gate.check().map_err(SubmitRejection::Error)?;
            return Err(SubmitRejection::Full(request));
        }
        push(state, bytes, request)
    }

    /// Queues a request once there is a permit for it, in order of arrival.
    pub(super) async fn submit_in_turn(&self, bytes: &[u8], mut request: PendingRequest) -> Result<(), Error> {
        let _waiting = self.add_waiter();
        let _turn = self.waiters.turn().await;
        loop {
            match push(self.lock(), bytes, request) {
                Ok(()) => return Ok(()),
                Err(SubmitRejection::Error(error)) => return Err(error),
                Err(SubmitRejection::Full(rejected)) => request = rejected,
            }
            self.waiters.released().await;
        }
    }

    /// Queues a request of the client itself, without a permit. It is accepted while the connection closes.
    pub(super) fn submit_own(&self, bytes: &[u8], request: PendingRequest) -> Result<(), Error> {
        let state = self.lock();
        state.gate.check_own()?;
        append(state, bytes, request);
        Ok(())
    }

    /// Keeps the connection open while it is closing, until its deadline or until [`unhold`](Self::unhold).
    pub(super) fn hold(&self) {
        self.lock().holds += 1;
    }

    pub(super) fn unhold(&self) {
        let mut state = self.lock();
        state.holds -= 1;
        let is_awaited = state.holds == 0 && state.closing.is_some();
        wake_if(state, is_awaited);
    }

    /// Counts a waiting caller until the guard is dropped.
    fn add_waiter(&self) -> impl Drop {
        struct WaiterGuard<'a>(&'a Queue);
        impl Drop for WaiterGuard<'_> {
            fn drop(&mut self) {
                self.0.lock().gate.remove_waiter();
            }
        }
        self.lock().gate.add_waiter();
        WaiterGuard(self)
    }

    /// Returns the permits of requests that have ended.
    pub(super) fn release(&self, permit: Permit) {
        if self.lock().gate.release(permit) {
            self.waiters.notify();
        }
    }

    /// Swaps the pending requests with an empty batch, if there is one, and registers the actor to be woken by the next change.
    pub(super) fn poll_take(&self, empty: Option<&mut Batch>, context: &Context<'_>) -> Signals {
        let mut state = self.lock();
        if let Some(empty) = empty {
            std::mem::swap(&mut state.pending, empty);
            state.earliest_deadline = None;
        }
        state.register(context);
        Signals {
            earliest_deadline: state.earliest_deadline,
            should_reclaim: state.gate.should_reclaim(),
            closing: state.closing,
            is_held: state.holds > 0,
        }
    }

    /// Takes the pending requests.
    pub(super) fn take(&self) -> Batch {
        let mut state = self.lock();
        state.earliest_deadline = None;
        std::mem::take(&mut state.pending)
    }

    /// Returns unsent requests to the front of the queue.
    pub(super) fn put_back(&self, unsent: Batch) {
        let mut state = self.lock();
        state.earliest_deadline = unsent.earliest_deadline().into_iter().chain(state.earliest_deadline).min();
        state.pending.prepend(unsent);
    }

    /// Takes the requests whose deadline has passed. Also returns the next deadline.
    pub(super) fn take_expired(&self, now: Instant) -> (Vec<PendingRequest>, Option<Instant>) {
        let mut state = self.lock();
        if state.earliest_deadline.is_none_or(|earliest| earliest > now) {
            return (Vec::new(), state.earliest_deadline);
        }
        let expired = state.pending.remove(|request| request.deadline <= now);
        state.earliest_deadline = state.pending.earliest_deadline();
        (expired, state.earliest_deadline)
    }

    /// Records that a caller has gone away before its request has ended.
    pub(crate) fn abandon(&self) {
        let mut state = self.lock();
        state.gate.abandon();
        let should_reclaim = state.gate.should_reclaim();
        wake_if(state, should_reclaim);
    }

    /// Drops the pending requests of callers that have gone away, if other callers lack their permits. Returns whether they do.
    pub(super) fn reclaim(&self) -> bool {
        let mut state = self.lock();
        if !state.gate.should_reclaim() {
            return false;
        }
        state.gate.start_reclaim();
        let abandoned = state.pending.remove(|request| !request.has_caller());
        drop(state);
        for request in abandoned {
            self.release(request.permit);
        }
        true
    }

    /// Waits until a request has an earlier deadline than this, abandoned requests are to be dropped, or the connection is closing.
    pub(super) async fn changed(&self, earliest_deadline: Option<Instant>) {
        std::future::poll_fn(|context| {
            let mut state = self.lock();
            state.register(context);
            let is_earlier =
                state.earliest_deadline.is_some_and(|new| earliest_deadline.is_none_or(|earliest| new < earliest));
            let is_changed = is_earlier || state.gate.should_reclaim() || state.closing.is_some();
            if is_changed { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    /// Accepts requests from now on.
    pub(super) fn open(&self) {
        self.lock().gate.open();
    }

    /// Rejects requests with this error from now on. Returns the pending ones, which end with the same error.
    pub(super) fn fail(&self, error: Error) -> Batch {
        self.lock().gate.fail(error);
        self.waiters.notify();
        self.take()
    }

    /// Rejects all further requests. The connection must have ended by this deadline, or by an earlier one that was set before.
    pub(crate) fn close(&self, deadline: Instant) {
        let mut state = self.lock();
        state.gate.close();
        state.closing = Some(state.closing.map_or(deadline, |closing| closing.min(deadline)));
        wake_if(state, true);
        self.waiters.notify();
    }

    /// Rejects all requests. Returns the pending ones.
    pub(super) fn end(&self) -> Batch {
        self.lock().gate.end();
        self.waiters.notify();
        self.take()
    }

    /// Whether requests of callers are accepted now.
    pub(crate) fn is_accepting(&self) -> bool {
        self.lock().gate.check().is_ok()
    }

    pub(super) fn is_closing(&self) -> bool {
        self.closing().is_some()
    }

    /// Returns when the connection must have ended, if it is closing.
    pub(crate) fn closing(&self) -> Option<Instant> {
        self.lock().closing
    }

    pub(crate) fn usage(&self) -> Usage {
        let state = self.lock();
        Usage { queued: state.pending.requests.len(), in_flight: state.gate.in_flight() }
    }
}

/// Queues a request, if there is a permit for it.
fn push(
    mut state: MutexGuard<'_, QueueState>,
    bytes: &[u8],
    mut request: PendingRequest,
) -> Result<(), SubmitRejection> {
    state.gate.check().map_err(SubmitRejection::Error)?;
    let Some(permit) = state.gate.admit(request.permit) else {
        let should_reclaim = state.gate.should_reclaim();
        wake_if(state, should_reclaim);
        return Err(SubmitRejection::Full(request));
    };
    request.permit = permit;
    append(state, bytes, request);
    Ok(())
}

/// Queues a request that has its permit.
fn append(mut state: MutexGuard<'_, QueueState>, bytes: &[u8], request: PendingRequest) {
    let deadline = request.deadline;
    state.earliest_deadline = Some(state.earliest_deadline.map_or(deadline, |earliest| earliest.min(deadline)));
    state.pending.push(request, bytes);
    wake_if(state, true);
}

/// Unlocks, and wakes the actor if `should_wake` and if it waits.
fn wake_if(mut state: MutexGuard<'_, QueueState>, should_wake: bool) {
    let actor = state.actor.take_if(|_| should_wake);
    drop(state);
    if let Some(actor) = actor {
        actor.wake();
    }
}

impl QueueState {
    fn register(&mut self, context: &Context<'_>) {
        if self.actor.as_ref().is_none_or(|actor| !actor.will_wake(context.waker())) {
            self.actor = Some(context.waker().clone());
        }
    }
}
