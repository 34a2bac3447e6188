//! The status of a connection, for callers that watch it.
//!
//! The newest status and the stream of all states are updated in one critical section, so both have the same order. The gate of
//! the queue changes before the status does: a caller that sees a status finds requests accepted or rejected as its state says.

use std::sync::Arc;

use tokio::sync::broadcast::{self, error::RecvError};
use tokio::sync::watch;

use crate::ConnectionError;

/// States that a [`States`] may be behind before it misses the oldest.
const MAX_BUFFERED_STATES: usize = 64;

/// The state of a client's connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ConnectionState {
    /// The connection has not been started. Requests wait.
    Init,
    /// The first attempt to connect is running. Requests wait.
    Connecting,
    /// The connection is open.
    Open,
    /// The connection was lost or an attempt failed, and the next attempt has not begun. Requests are rejected, unless
    /// [`WhileDown`](crate::WhileDown) says otherwise.
    Failed,
    /// Another attempt to connect is running. Requests wait, unless [`WhileDown`](crate::WhileDown) says otherwise.
    Reconnecting,
    /// The client is closing: requests in flight are answered, and new ones are rejected.
    Closing,
    /// The client is closed.
    Closed,
}

/// A state, the number of its connection, and the last error.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Status {
    /// The state.
    pub state: ConnectionState,
    /// The number of connections so far. The first connection has generation 1.
    pub generation: u64,
    /// The last error of the connection, if there was one. It stays after a reconnect.
    pub last_error: Option<Arc<ConnectionError>>,
}

/// A stream of all states of a client's connection, in order. Made by [`Client::states`](crate::Client::states).
#[derive(Debug)]
pub struct States {
    /// The first state, until it has been returned.
    first: Option<Status>,
    receiver: broadcast::Receiver<Status>,
    missed: u64,
    is_over: bool,
}

impl States {
    /// Waits for the next state. Returns `None` after [`ConnectionState::Closed`].
    ///
    /// A stream that is more than 64 states behind skips the oldest; [`missed`](Self::missed) counts them. The future is
    /// cancellation safe.
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
        self.is_over = status.state == ConnectionState::Closed;
        Some(status)
    }

    /// Returns the number of states that were skipped.
    pub fn missed(&self) -> u64 {
        self.missed
    }
}

/// Publishes the status of a connection.
pub(crate) struct StatusSender {
    newest: watch::Sender<Status>,
    /// Sent to while `newest` is locked.
    all: broadcast::Sender<Status>,
}

impl StatusSender {
    pub(super) fn new() -> Self {
        let status = Status { state: ConnectionState::Init, generation: 0, last_error: None };
        Self { newest: watch::Sender::new(status), all: broadcast::Sender::new(MAX_BUFFERED_STATES) }
    }

    pub(super) fn set_state(&self, state: ConnectionState) {
        self.update(|status| status.state = state);
    }

    pub(super) fn update(&self, change: impl FnOnce(&mut Status)) {
        self.newest.send_modify(|status| {
            change(status);
            // Fails if there is no receiver.
            let _ = self.all.send(status.clone());
        });
    }

    pub(crate) fn state(&self) -> ConnectionState {
        self.newest.borrow().state
    }

    pub(crate) fn generation(&self) -> u64 {
        self.newest.borrow().generation
    }

    pub(crate) fn state_and_generation(&self) -> (ConnectionState, u64) {
        let status = self.newest.borrow();
        (status.state, status.generation)
    }

    pub(crate) fn subscribe(&self) -> watch::Receiver<Status> {
        self.newest.subscribe()
    }

    /// Returns a stream of the current state and all following ones.
    pub(crate) fn states(&self) -> States {
        let status = self.newest.borrow();
        States { first: Some(status.clone()), receiver: self.all.subscribe(), missed: 0, is_over: false }
    }
}
