//! One clock for all connections of a supervisor.
//!
//! A connection has at most one alarm, and does not touch it while it is busy: an alarm that goes off too early is set again. So
//! a busy connection pays nothing, an idle one without timeouts has no alarm, and thousands of connections share one timer.
//!
//! Alarms are in an ordered set under one lock. A hashed timer wheel would have to tick; the task that drives this clock sleeps
//! until the first alarm, and ends with the last one.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::sync::lock;
use crate::{ConnectionId, FrameLike, SessionRegistry};

pub(crate) struct Alarms<F: FrameLike> {
    connections: Arc<SessionRegistry<F>>,
    state: Mutex<State>,
    /// Notified when an alarm is set that goes off before all others, and when the last one is cancelled.
    changed: Notify,
}

#[derive(Default)]
struct State {
    pending: BTreeSet<(Instant, ConnectionId)>,
    /// The task that sleeps until the first alarm.
    driver: Option<JoinHandle<()>>,
}

impl<F: FrameLike> Alarms<F> {
    /// Creates a clock for the connections of this registry.
    pub(crate) fn new(connections: Arc<SessionRegistry<F>>) -> Self {
        Self { connections, state: Mutex::default(), changed: Notify::new() }
    }

    /// Sets the alarm of a connection, in place of the one set before. Called from within a runtime.
    pub(crate) fn set(self: &Arc<Self>, id: ConnectionId, before: Option<Instant>, at: Instant) {
        let mut state = lock(&self.state);
        if let Some(before) = before {
            state.pending.remove(&(before, id));
        }
        state.pending.insert((at, id));
        let is_first = state.pending.first().is_some_and(|&(_, first)| first == id);
        if state.driver.as_ref().is_none_or(JoinHandle::is_finished) {
            state.driver = Some(tokio::spawn(Arc::clone(self).drive()));
        } else if is_first {
            self.changed.notify_one();
        }
    }

    pub(crate) fn cancel(&self, id: ConnectionId, at: Instant) {
        let mut state = lock(&self.state);
        state.pending.remove(&(at, id));
        if state.pending.is_empty() {
            self.changed.notify_one();
        }
    }

    async fn drive(self: Arc<Self>) {
        let handover = Handover(&self);
        while let Some(next) = self.set_off_due(Instant::now()) {
            tokio::select! {
                () = tokio::time::sleep_until(next) => {}
                () = self.changed.notified() => {}
            }
        }
        drop(handover);
    }

    /// Sets off all alarms that are due. Returns when the next one is.
    fn set_off_due(&self, now: Instant) -> Option<Instant> {
        let mut due = Vec::new();
        let mut state = lock(&self.state);
        while let Some(&(at, id)) = state.pending.first()
            && at <= now
        {
            state.pending.pop_first();
            due.push(id);
        }
        let next = state.pending.first().map(|&(at, _)| at);
        if next.is_none() {
            // Under the lock, so that the next `set` starts another driver.
            state.driver = None;
        }
        drop(state);
        self.set_off(&due);
        next
    }

    fn set_off(&self, connections: &[ConnectionId]) {
        for mailbox in self.connections.find_running(connections) {
            mailbox.set_off_alarm();
        }
    }
}

/// Sets off all alarms when the driver is dropped with its runtime. Connections on other runtimes set their alarms again, and
/// the first of them starts another driver.
struct Handover<'a, F: FrameLike>(&'a Alarms<F>);

impl<F: FrameLike> Drop for Handover<'_, F> {
    fn drop(&mut self) {
        let mut state = lock(&self.0.state);
        let pending = std::mem::take(&mut state.pending);
        if !pending.is_empty() {
            state.driver = None;
        }
        drop(state);
        self.0.set_off(&pending.into_iter().map(|(_, id)| id).collect::<Vec<_>>());
    }
}
