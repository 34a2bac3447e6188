//! Dead letters: messages that were accepted and could not be handled.

use std::collections::VecDeque;
use std::fmt;
use std::time::Duration;

use crate::Message;
use crate::sync::{Mutex, lock};

/// A message that was accepted and not handled.
#[derive(Debug)]
#[non_exhaustive]
pub struct DeadLetter<P> {
    /// The message, as the handler last saw it.
    pub message: Message<P>,
    /// Why it was not handled.
    pub reason: DeadLetterReason,
    /// The number of attempts, including those that a decorator rejected.
    pub attempts: u32,
}

/// Why a message became a dead letter.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeadLetterReason {
    /// The handler returned an error, and no attempt was left. Contains the text of the error.
    Failed(String),
    /// The handler panicked. Contains the text of the panic.
    Panicked(String),
    /// A [`Shedding`](crate::Shedding) handler rejected it, because the queue was not draining.
    Shed {
        /// The time from its submission to its rejection.
        waited: Duration,
    },
    /// The circuit [breaker](crate::Breaker) was open at its last attempt.
    BreakerOpen,
    /// Its deadline passed before it was handled.
    Expired,
    /// It was the oldest message of a full queue under [`Overflow::DropOldest`](crate::Overflow::DropOldest).
    Displaced,
    /// An attempt failed, and the pool was shut down before the next one.
    ShutDown,
}

impl fmt::Display for DeadLetterReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed(error) => write!(f, "the handler failed: {error}"),
            Self::Panicked(text) => write!(f, "the handler panicked: {text}"),
            Self::Shed { waited } => write!(f, "shed after waiting {waited:?}: the queue does not drain"),
            Self::BreakerOpen => f.write_str("the circuit breaker is open"),
            Self::Expired => f.write_str("the deadline passed before the message was handled"),
            Self::Displaced => f.write_str("the message was dropped from a full queue"),
            Self::ShutDown => f.write_str("the pool was shut down before the next attempt"),
        }
    }
}

impl<P> DeadLetter<P> {
    /// Returns the message without its deadline, which may have passed, so that it can be submitted again.
    pub fn into_message(self) -> Message<P> {
        Message { deadline: None, ..self.message }
    }
}

/// The newest dead letters of a pool.
///
/// Above the [bound](crate::Builder::dead_letters), the oldest is dropped and [counted](crate::Stats::forgotten).
#[derive(Debug)]
pub struct DeadLetters<P> {
    capacity: usize,
    letters: Mutex<VecDeque<DeadLetter<P>>>,
}

impl<P> DeadLetters<P> {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { capacity, letters: Mutex::new(VecDeque::new()) }
    }

    /// Adds a letter. Returns the letter that exceeds the bound, if any.
    pub(crate) fn push(&self, letter: DeadLetter<P>) -> Option<DeadLetter<P>> {
        if self.capacity == 0 {
            return Some(letter);
        }
        let mut letters = lock(&self.letters);
        let forgotten = if letters.len() == self.capacity { letters.pop_front() } else { None };
        letters.push_back(letter);
        forgotten
    }

    /// Returns the number of dead letters.
    pub fn len(&self) -> usize {
        lock(&self.letters).len()
    }

    /// Returns whether there are no dead letters.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Calls a function with each dead letter, oldest first. The function must be quick, because it blocks workers that add one.
    pub fn for_each(&self, visit: impl FnMut(&DeadLetter<P>)) {
        lock(&self.letters).iter().for_each(visit);
    }

    /// Removes and returns the oldest dead letters, at most `at_most`, for example to [submit them again](DeadLetter::into_message).
    pub fn take(&self, at_most: usize) -> Vec<DeadLetter<P>> {
        let mut letters = lock(&self.letters);
        let count = letters.len().min(at_most);
        letters.drain(..count).collect()
    }
}
