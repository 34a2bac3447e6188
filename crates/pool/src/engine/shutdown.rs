//! Shutdown: draining, closing, and returning the messages that were not handled.

use std::time::{Duration, Instant};

use super::{Engine, PoolPhase, count};
use crate::ask::AskFailure;
use crate::budget::Amount;
use crate::message::Delivery;
use crate::sync::{Ordering, lock};
use crate::{Event, Message};

impl<P: Send + 'static> Engine<P> {
    pub(crate) fn is_closed(&self) -> bool {
        self.phase() == PoolPhase::Closed
    }

    /// Advances the phase, and wakes submitters that wait for budget.
    fn advance_phase(&self, phase: PoolPhase) {
        self.phase.fetch_max(phase as usize, Ordering::SeqCst);
        for shard in &self.shards {
            let mut intake = lock(&shard.intake);
            intake.phase = intake.phase.max(phase);
        }
        self.budget.wake_all();
    }

    /// Stops accepting messages except follow-ups, and waits until all messages have ended or the timeout has passed.
    pub(crate) fn drain(&self, timeout: Duration) {
        self.advance_phase(PoolPhase::Draining);
        let deadline = Instant::now().checked_add(timeout);
        let mut guard = lock(&self.empty.0);
        while self.budget.used_ordered().messages() > 0 || self.running() > 0 {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return;
            }
            let wait = left.unwrap_or(Duration::MAX);
            guard = self.empty.1.wait_timeout(guard, wait).unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
    }

    /// Stops accepting messages, and returns those that no worker has taken.
    pub(crate) fn close(&self) -> Vec<Message<P>> {
        self.advance_phase(PoolPhase::Closed);
        let mut returned = Vec::new();
        for shard in &self.shards {
            let mut stripe = lock(&shard.stripe);
            shard.queue_arrivals(&mut stripe);
            returned.append(&mut stripe.clear());
        }
        self.idle.wake_all();
        let returned = returned.into_iter().map(|envelope| {
            count(&self.counters.returned);
            self.release_budget(Amount::new(1, envelope.bytes));
            self.observe(Event::Returned);
            self.observe(Event::Ended);
            let Delivery { message, ask, .. } = envelope.into_delivery();
            if let Some(ask) = ask {
                ask.fail(AskFailure::Returned);
            }
            message
        });
        returned.collect()
    }

    /// Returns the number of workers that are handling a message. It does not increase after [`close`](Self::close).
    pub(crate) fn running(&self) -> usize {
        self.shards.iter().filter(|shard| shard.worker.busy.load(Ordering::Relaxed)).count()
    }
}
