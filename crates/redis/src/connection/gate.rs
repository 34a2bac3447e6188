//! Admission: whether requests are accepted now, and how many may be in flight.
//!
//! A request is in flight from its admission until it ends: in the queue, while it is written, and until its last reply has come.
//! For that time it holds a [`Permit`] for its commands and its bytes. A permit is returned exactly once:
//!
//! - when the last reply has been decoded, before the caller is woken, so that the caller can use the permit again at once;
//! - when a request of which no byte was written ends: at its deadline, when the connection is lost or closed, or when its caller
//!   has gone away and other callers wait for permits;
//! - when the connection to which the request was written is lost.
//!
//! A request that was written and has timed out keeps its permit until its reply has come. Otherwise callers that give up could
//! send without bound to a server that does not answer.
//!
//! # Waiting for a permit
//!
//! While callers wait, new requests queue behind them, so that small requests do not starve a large one. The
//! semaphore of [`Waiters`] admits one caller at a time in order of arrival, and only this caller waits for `released`. No wake-up
//! is lost: a release after its failed attempt leaves a notification that the next wait consumes. If it is cancelled instead, the
//! next caller attempts as soon as it has the semaphore, before it waits.

use tokio::sync::{Notify, Semaphore};

use crate::sync::switch_point;
use crate::{Error, RequestOutcome};

/// Abandoned requests are dropped when they are more than one in this number of the commands in flight. Fewer are not worth the pass
/// over the queue.
const RECLAIM_RATIO: usize = 64;

/// The part of the budget that a request needs, and holds while it is in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Permit {
    pub(crate) commands: usize,
    pub(crate) bytes: usize,
}

/// Decides which requests are accepted. It has no lock and does not wait: it is a part of the state of the queue.
#[derive(Debug)]
pub(super) struct Gate {
    state: GateState,
    limit: Permit,
    in_flight: Permit,
    /// Callers that wait for a permit.
    waiting: usize,
    /// Whether a request found no permit since abandoned requests were last dropped.
    is_exhausted: bool,
    /// Callers that have gone away since then. Their requests may still hold permits.
    abandoned: usize,
}

#[derive(Debug)]
enum GateState {
    Open,
    /// There is no connection, for this reason.
    Failed(Error),
    /// Callers are rejected. The connection may still send requests of the client itself.
    Closed,
    /// The connection has ended.
    Ended,
}

impl Gate {
    /// Creates an open gate. Limits of zero count as one, since no request could be sent otherwise.
    pub(super) fn new(limit: Permit) -> Self {
        let limit = Permit { commands: limit.commands.max(1), bytes: limit.bytes.max(1) };
        Self {
            state: GateState::Open,
            limit,
            in_flight: Permit::default(),
            waiting: 0,
            is_exhausted: false,
            abandoned: 0,
        }
    }

    /// Returns an error if no request is accepted now, regardless of the budget.
    pub(super) fn check(&self) -> Result<(), Error> {
        match &self.state {
            GateState::Open => Ok(()),
            GateState::Failed(error) => Err(error.clone()),
            GateState::Closed | GateState::Ended => Err(Error::Closed { outcome: RequestOutcome::NeverSent }),
        }
    }

    /// Returns an error if no request of the client itself is accepted now.
    pub(super) fn check_own(&self) -> Result<(), Error> {
        if let GateState::Closed = self.state { Ok(()) } else { self.check() }
    }

    /// Rejects all requests, for good.
    pub(super) fn end(&mut self) {
        self.state = GateState::Ended;
    }

    /// Takes a permit, if the budget allows it. A request larger than the whole budget gets all of it.
    pub(super) fn admit(&mut self, needed: Permit) -> Option<Permit> {
        let permit =
            Permit { commands: needed.commands.min(self.limit.commands), bytes: needed.bytes.min(self.limit.bytes) };
        let fits = permit.commands <= self.limit.commands - self.in_flight.commands
            && permit.bytes <= self.limit.bytes - self.in_flight.bytes;
        self.is_exhausted |= !fits;
        fits.then(|| {
            self.in_flight.add(permit);
            permit
        })
    }

    /// Releases a permit. Returns whether a waiting caller must be notified.
    pub(super) fn release(&mut self, permit: Permit) -> bool {
        self.in_flight.commands -= permit.commands;
        self.in_flight.bytes -= permit.bytes;
        self.waiting > 0 && permit != Permit::default()
    }

    pub(super) fn in_flight(&self) -> Permit {
        self.in_flight
    }

    pub(super) fn has_waiters(&self) -> bool {
        self.waiting > 0
    }

    pub(super) fn add_waiter(&mut self) {
        self.waiting += 1;
    }

    pub(super) fn remove_waiter(&mut self) {
        self.waiting -= 1;
    }

    /// Accepts requests again, unless the gate is closed.
    pub(super) fn open(&mut self) {
        if !matches!(self.state, GateState::Closed | GateState::Ended) {
            self.state = GateState::Open;
        }
    }

    /// Rejects requests with this error, unless the gate is closed.
    pub(super) fn fail(&mut self, error: Error) {
        if !matches!(self.state, GateState::Closed | GateState::Ended) {
            self.state = GateState::Failed(error);
        }
    }

    /// Rejects all further requests.
    pub(super) fn close(&mut self) {
        if !matches!(self.state, GateState::Ended) {
            self.state = GateState::Closed;
        }
    }

    /// Counts a caller that has gone away before its request has ended.
    pub(super) fn abandon(&mut self) {
        self.abandoned += 1;
    }

    /// Whether requests lack permits, and abandoned requests may hold enough of them.
    pub(super) fn should_reclaim(&self) -> bool {
        self.is_exhausted && self.abandoned > self.in_flight.commands / RECLAIM_RATIO
    }

    /// Records that abandoned requests are being dropped. Callers that wait do not attempt again before a release, so the
    /// gate stays exhausted for them.
    pub(super) fn start_reclaim(&mut self) {
        (self.is_exhausted, self.abandoned) = (self.has_waiters(), 0);
    }
}

impl Permit {
    /// Adds the permit of another request, to return both at once.
    pub(super) fn add(&mut self, other: Self) {
        self.commands += other.commands;
        self.bytes += other.bytes;
    }
}

/// The callers that wait for a permit, in order of arrival.
#[derive(Debug)]
pub(super) struct Waiters {
    turn: Semaphore,
    released: Notify,
}

impl Waiters {
    pub(super) fn new() -> Self {
        Self { turn: Semaphore::new(1), released: Notify::new() }
    }

    /// Waits until all earlier callers have been admitted or have gone away. The turn ends when the guard is dropped.
    pub(super) async fn turn(&self) -> impl Drop {
        switch_point();
        self.turn.acquire().await.expect("the semaphore is never closed")
    }

    /// Waits until a permit is released or the gate changes. Only the caller that holds the turn may call it.
    pub(super) async fn released(&self) {
        switch_point();
        self.released.notified().await;
    }

    /// Lets the caller that holds the turn attempt again.
    pub(super) fn notify(&self) {
        switch_point();
        self.released.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn permit(commands: usize, bytes: usize) -> Permit {
        Permit { commands, bytes }
    }

    #[test]
    fn request_larger_than_the_budget_gets_all_of_it() {
        let mut gate = Gate::new(permit(4, 10));
        let large = gate.admit(permit(100, 5)).expect("the budget is unused");
        assert_eq!((large, gate.admit(permit(1, 1))), (permit(4, 5), None));
        gate.release(large);
        let small = gate.admit(permit(1, 1)).expect("the budget is unused");
        assert_eq!(gate.admit(permit(1, 1000)), None);
        gate.release(small);
        assert_eq!(gate.admit(permit(1, 1000)), Some(permit(1, 10)));
    }

    #[test]
    fn budget_of_zero_admits_one_request() {
        assert!(Gate::new(permit(0, 0)).admit(permit(1, 1)).is_some());
    }

    #[test]
    fn closed_gate_stays_closed() {
        let mut gate = Gate::new(permit(1, 1));
        gate.fail(Error::QueueFull);
        assert!(matches!(gate.check(), Err(Error::QueueFull)));
        gate.open();
        assert!(gate.check().is_ok());
        gate.close();
        gate.open();
        gate.fail(Error::QueueFull);
        assert!(matches!(gate.check(), Err(Error::Closed { outcome: RequestOutcome::NeverSent })));
    }
}
