//! One clock for all connections of a supervisor.
//!
//! A connection has at most one alarm, and does not touch it while it is busy: an alarm that goes off too early is set again. So
//! a busy connection pays nothing, an idle one without timeouts has no alarm, and thousands of connections share one timer.
//!
//! Alarms are in an ordered map under one lock. A hashed timer wheel would have to tick; the task that drives this clock sleeps
//! until the first alarm, and ends with the last one.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, Weak};

use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::mailbox::Mailbox;
use crate::sync::lock;
use crate::{ConnectionId, FrameLike};

pub(crate) struct Alarms<F: FrameLike> {
    state: Mutex<State<F>>,
    /// Rung when an alarm is set that goes off before all others, and when there is none left.
    earlier: Notify,
}

struct State<F: FrameLike> {
    pending: BTreeMap<(Instant, ConnectionId), Weak<Mailbox<F>>>,
    /// Who drives the clock.
    driver: Option<JoinHandle<()>>,
}

impl<F: FrameLike> Alarms<F> {
    pub(crate) fn new() -> Self {
        Self { state: Mutex::new(State { pending: BTreeMap::new(), driver: None }), earlier: Notify::new() }
    }

    /// Sets the alarm of a connection, in place of the one set before. Called from within a runtime.
    pub(crate) fn set(
        self: &Arc<Self>,
        id: ConnectionId,
        before: Option<Instant>,
        at: Instant,
        mailbox: &Arc<Mailbox<F>>,
    ) {
        let mut state = lock(&self.state);
        if let Some(before) = before {
            state.pending.remove(&(before, id));
        }
        state.pending.insert((at, id), Arc::downgrade(mailbox));
        let is_first = state.pending.first_key_value().is_some_and(|(&(_, first), _)| first == id);
        if state.driver.as_ref().is_none_or(JoinHandle::is_finished) {
            state.driver = Some(tokio::spawn(Arc::clone(self).drive()));
        } else if is_first {
            self.earlier.notify_one();
        }
    }

    pub(crate) fn cancel(&self, id: ConnectionId, at: Instant) {
        let mut state = lock(&self.state);
        state.pending.remove(&(at, id));
        if state.pending.is_empty() {
            self.earlier.notify_one();
        }
    }

    async fn drive(self: Arc<Self>) {
        let handing_over = HandOver(&self);
        while let Some(next) = self.ring(Instant::now()) {
            tokio::select! {
                () = tokio::time::sleep_until(next) => {}
                () = self.earlier.notified() => {}
            }
        }
        drop(handing_over);
    }

    /// Lets all alarms go off that are due, and tells when the next one is.
    fn ring(&self, now: Instant) -> Option<Instant> {
        let mut due = Vec::new();
        let mut state = lock(&self.state);
        let next = loop {
            match state.pending.first_entry() {
                Some(first) if first.key().0 <= now => due.extend(first.remove().upgrade()),
                Some(first) => break Some(first.key().0),
                None => break None,
            }
        };
        if next.is_none() {
            // Under the lock, so that whoever sets the next alarm starts another driver.
            state.driver = None;
        }
        drop(state);
        for mailbox in due {
            mailbox.set_off_alarm();
        }
        next
    }
}

/// A driver that is dropped, with its runtime, lets all alarms go off: the connections of other runtimes set them again, and
/// the first of those starts another driver.
struct HandOver<'a, F: FrameLike>(&'a Alarms<F>);

impl<F: FrameLike> Drop for HandOver<'_, F> {
    fn drop(&mut self) {
        let mut state = lock(&self.0.state);
        let left = std::mem::take(&mut state.pending);
        if !left.is_empty() {
            state.driver = None;
        }
        drop(state);
        for mailbox in left.into_values().filter_map(|mailbox| mailbox.upgrade()) {
            mailbox.set_off_alarm();
        }
    }
}
