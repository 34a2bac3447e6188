//! The states of a client's connection.

use std::sync::Arc;

use tokio::sync::broadcast::{self, error::RecvError};

use crate::Fault;

/// What a client's connection is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum State {
    /// Nothing yet. Requests wait.
    Init,
    /// It is made for the first time. Requests wait.
    Connecting,
    /// It is there.
    Open,
    /// It was lost, or an attempt failed; the next one is made after a pause. Requests are refused.
    Failed,
    /// It is made anew. Requests wait.
    Reconnecting,
    /// It is about to end: what was asked is answered, and nothing more is taken.
    Closing,
    /// It has ended.
    Closed,
}

/// A state, why it was entered, and which connection it is about.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Status {
    /// The state.
    pub state: State,
    /// How many connections there have been. The first one is the first generation.
    pub generation: u64,
    /// The fault that led here last, if there was one.
    pub last_error: Option<Arc<Fault>>,
}

/// The states of a client's connection, one by one. Made by [`Client::states`](crate::Client::states).
#[derive(Debug)]
pub struct States {
    /// The state at the beginning, until it was given.
    first: Option<Status>,
    receiver: broadcast::Receiver<Status>,
    missed: u64,
    is_over: bool,
}

impl States {
    pub(crate) fn new((first, receiver): (Status, broadcast::Receiver<Status>)) -> Self {
        Self { first: Some(first), receiver, missed: 0, is_over: false }
    }

    /// The next state; nothing after [`State::Closed`]. Whoever is more than 64 behind misses the oldest.
    pub async fn next(&mut self) -> Option<Status> {
        if self.is_over {
            return None;
        }
        let status = match self.first.take() {
            Some(first) => first,
            None => loop {
                match self.receiver.recv().await {
                    Ok(status) => break status,
                    Err(RecvError::Lagged(count)) => self.missed += count,
                    Err(RecvError::Closed) => return None,
                }
            },
        };
        self.is_over = status.state == State::Closed;
        Some(status)
    }

    /// How many were missed so far.
    pub fn missed(&self) -> u64 {
        self.missed
    }
}
