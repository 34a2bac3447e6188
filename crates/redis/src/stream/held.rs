//! The entries that a worker holds: they wait for a handler, are being handled, or wait for another attempt.

use std::collections::{BTreeSet, HashMap, VecDeque};

use tokio::time::Instant;

use super::Delivery;
use crate::commands::StreamId;

/// An entry: the index of its stream, and its ID.
pub(super) type EntryKey = (usize, StreamId);

/// The entries that a worker holds.
///
/// An entry is in exactly one state, so it is never handled twice at the same time.
#[derive(Debug, Default)]
pub(super) struct Held {
    states: HashMap<EntryKey, State>,
    /// The entries that wait for a handler, the first one first.
    queue: VecDeque<(EntryKey, Delivery)>,
    /// The entries that wait for another attempt, by the time of that attempt.
    retries: BTreeSet<(Instant, EntryKey)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Queued,
    /// Whether the entry is still pending for this worker.
    Running(Result<(), Gone>),
    Retrying(Instant),
}

/// Why an entry is no longer pending for this worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Gone {
    /// Another consumer has claimed it, or the group was deleted.
    Lost,
    /// It was deleted from the stream.
    Deleted,
}

impl Held {
    /// Adds an entry that waits for a handler. Returns false if the entry is held already, unless it waits for another attempt, which
    /// this is.
    pub(super) fn enqueue(&mut self, key: EntryKey, delivery: Delivery) -> bool {
        match self.states.get(&key) {
            Some(State::Queued) => return false,
            Some(State::Running(_)) => {
                // It is pending for this worker, also if it was not before.
                self.states.insert(key, State::Running(Ok(())));
                return false;
            }
            Some(State::Retrying(due)) => {
                self.retries.remove(&(*due, key));
            }
            None => {}
        }
        self.states.insert(key, State::Queued);
        self.queue.push_back((key, delivery));
        true
    }

    /// Takes the next entry for a handler.
    pub(super) fn start(&mut self) -> Option<(EntryKey, Delivery)> {
        let (key, delivery) = self.queue.pop_front()?;
        self.states.insert(key, State::Running(Ok(())));
        Some((key, delivery))
    }

    /// Makes an entry wait for another attempt. If it is no longer pending for this worker, forgets it and returns why.
    pub(super) fn retry_at(&mut self, key: EntryKey, due: Instant) -> Result<(), Gone> {
        if let Some(State::Running(Err(gone))) = self.states.get(&key).copied() {
            self.forget(key);
            return Err(gone);
        }
        self.states.insert(key, State::Retrying(due));
        self.retries.insert((due, key));
        Ok(())
    }

    /// Forgets an entry. Returns whether it was held.
    pub(super) fn forget(&mut self, key: EntryKey) -> bool {
        match self.states.remove(&key) {
            Some(State::Queued) => self.queue.retain(|(queued, _)| *queued != key),
            Some(State::Retrying(due)) => {
                self.retries.remove(&(due, key));
            }
            Some(State::Running(_)) => {}
            None => return false,
        }
        true
    }

    /// Removes an entry that is no longer pending for this worker. If its handler is running, the entry is removed when the handler has
    /// ended. Returns whether it was removed.
    pub(super) fn lose(&mut self, key: EntryKey, gone: Gone) -> bool {
        match self.states.get_mut(&key) {
            Some(State::Running(pending)) => {
                *pending = pending.and(Err(gone));
                false
            }
            _ => self.forget(key),
        }
    }

    /// Removes the entries that wait for a handler.
    pub(super) fn take_queue(&mut self) -> Vec<(EntryKey, u64)> {
        let queue = std::mem::take(&mut self.queue);
        for (key, _) in &queue {
            self.states.remove(key);
        }
        queue.into_iter().map(|(key, delivery)| (key, delivery.deliveries)).collect()
    }

    /// Returns the entries.
    pub(super) fn all(&self) -> impl Iterator<Item = EntryKey> {
        self.states.keys().copied()
    }

    /// Returns the number of entries.
    pub(super) fn len(&self) -> usize {
        self.states.len()
    }

    pub(super) fn is_queue_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Returns the number of entries that wait for another attempt.
    pub(super) fn retrying(&self) -> usize {
        self.retries.len()
    }

    /// Returns when the first entry is due for another attempt.
    pub(super) fn next_retry(&self) -> Option<Instant> {
        self.retries.first().map(|(due, _)| *due)
    }

    /// Returns up to `count` entries of one stream that are due for another attempt.
    pub(super) fn due(&self, now: Instant, count: usize) -> Vec<EntryKey> {
        let mut due = self.retries.iter().take_while(|(due, _)| *due <= now).map(|(_, key)| *key).peekable();
        let stream = due.peek().map(|(stream, _)| *stream);
        due.filter(|(found, _)| Some(*found) == stream).take(count).collect()
    }

    /// Returns the entries that other consumers must not claim.
    pub(super) fn claimed(&self) -> Vec<EntryKey> {
        self.states.iter().filter(|(_, state)| !matches!(state, State::Running(Err(_)))).map(|(key, _)| *key).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn key(sequence: u64) -> EntryKey {
        (0, StreamId { milliseconds: 1, sequence })
    }

    fn delivery(sequence: u64) -> Delivery {
        Delivery { stream: "s".into(), id: key(sequence).1, fields: Vec::new(), deliveries: 1 }
    }

    #[test]
    fn entry_that_is_held_is_not_queued_again() {
        let mut held = Held::default();
        assert!(held.enqueue(key(1), delivery(1)));
        assert!(!held.enqueue(key(1), delivery(1)), "queued");
        assert_eq!(held.start().unwrap().0, key(1));
        assert!(!held.enqueue(key(1), delivery(1)), "running");
        let now = Instant::now();
        assert_eq!(held.retry_at(key(1), now), Ok(()));
        assert_eq!((held.retrying(), held.due(now, 5)), (1, vec![key(1)]));
        assert!(held.enqueue(key(1), delivery(1)), "the next attempt");
        assert_eq!((held.retrying(), held.len()), (0, 1));
        assert!(held.forget(key(1)) && !held.forget(key(1)));
        assert!(held.is_queue_empty() && held.start().is_none());
    }

    #[test]
    fn lost_entry_is_kept_until_its_handler_ends() {
        let mut held = Held::default();
        held.enqueue(key(1), delivery(1));
        held.enqueue(key(2), delivery(2));
        held.start();
        assert!(!held.lose(key(1), Gone::Lost) && !held.lose(key(1), Gone::Deleted));
        assert!(held.lose(key(2), Gone::Lost) && !held.lose(key(2), Gone::Lost));
        assert!(held.all().eq([key(1)]) && held.is_queue_empty() && held.claimed().is_empty());
        assert_eq!(held.retry_at(key(1), Instant::now()), Err(Gone::Lost), "it is of another consumer");
        assert_eq!((held.len(), held.retrying()), (0, 0));
        // It is delivered to this worker once more while the handler runs.
        held.enqueue(key(3), delivery(3));
        held.start();
        held.lose(key(3), Gone::Lost);
        assert!(!held.enqueue(key(3), delivery(3)));
        assert_eq!((held.claimed(), held.retry_at(key(3), Instant::now())), (vec![key(3)], Ok(())));
    }

    #[test]
    fn due_entries_are_of_one_stream_and_in_order() {
        let mut held = Held::default();
        let now = Instant::now();
        let at = |seconds| now + Duration::from_secs(seconds);
        for (entry, seconds) in [((1, key(1).1), 3), ((0, key(2).1), 1), ((0, key(3).1), 2), ((0, key(4).1), 9)] {
            held.enqueue(entry, delivery(0));
            held.start();
            held.retry_at(entry, at(seconds)).unwrap();
        }
        assert_eq!(held.next_retry(), Some(at(1)));
        assert_eq!(held.due(at(5), 10), [key(2), key(3)]);
        assert_eq!(held.due(at(5), 1), [key(2)]);
        assert!(held.due(now, 10).is_empty());
    }
}
