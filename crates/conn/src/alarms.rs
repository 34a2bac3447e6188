//! One timer task for all connections of a supervisor.
//!
//! A connection has at most one alarm and does not move it while it is busy; if the alarm fires too early, it is set again. So a
//! busy connection has no cost, an idle connection without timeouts has no alarm, and thousands of connections share one timer.
//!
//! Alarms are kept in an ordered set under one lock. The task sleeps until the first alarm and ends after the last one. A hashed timer
//! wheel would have to wake at every tick.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::sync::lock;
use crate::{ConnectionId, FrameLike, SessionRegistry};

pub(crate) struct Alarms<F: FrameLike> {
    connections: Arc<SessionRegistry<F>>,
    state: Mutex<AlarmState>,
    /// Notified when an alarm is set that is earlier than all others, and when the last alarm is cancelled.
    changed: Notify,
}

#[derive(Default)]
struct AlarmState {
    pending: BTreeSet<(Instant, ConnectionId)>,
    /// The task that sleeps until the first alarm.
    driver: Option<JoinHandle<()>>,
}

impl<F: FrameLike> Alarms<F> {
    /// Creates the alarms of the connections in this registry.
    pub(crate) fn new(connections: Arc<SessionRegistry<F>>) -> Self {
        Self { connections, state: Mutex::default(), changed: Notify::new() }
    }

    /// Sets the alarm of a connection, replacing the one set before. Must be called within a runtime.
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

    /// Fires alarms at their times until none is left.
    async fn drive(self: Arc<Self>) {
        let fire_on_drop = FireOnDrop(&self);
        while let Some(next) = self.fire_expired(Instant::now()) {
            tokio::select! {
                () = tokio::time::sleep_until(next) => {}
                () = self.changed.notified() => {}
            }
        }
        drop(fire_on_drop);
    }

    /// Fires all alarms whose time has come. Returns the time of the next alarm.
    fn fire_expired(&self, now: Instant) -> Option<Instant> {
        let mut expired = Vec::new();
        let mut state = lock(&self.state);
        while let Some(&(at, id)) = state.pending.first()
            && at <= now
        {
            state.pending.pop_first();
            expired.push(id);
        }
        let next = state.pending.first().map(|&(at, _)| at);
        if next.is_none() {
            // Under the lock, so that the next `set` starts another driver.
            state.driver = None;
        }
        drop(state);
        self.fire(&expired);
        next
    }

    fn fire(&self, connections: &[ConnectionId]) {
        for mailbox in self.connections.find_running(connections) {
            mailbox.fire_alarm();
        }
    }
}

/// Fires all alarms when the driver is dropped with its runtime. Connections on other runtimes then set their alarms again, and
/// the first of them starts another driver.
struct FireOnDrop<'a, F: FrameLike>(&'a Alarms<F>);

impl<F: FrameLike> Drop for FireOnDrop<'_, F> {
    fn drop(&mut self) {
        let mut state = lock(&self.0.state);
        let pending = std::mem::take(&mut state.pending);
        if !pending.is_empty() {
            state.driver = None;
        }
        drop(state);
        self.0.fire(&pending.into_iter().map(|(_, id)| id).collect::<Vec<_>>());
    }
}
