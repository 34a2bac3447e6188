//! The actor of a connection: it owns the socket, reconnects when it is lost, and ends every request exactly once.
//!
//! # The path of a command
//!
//! 1. A command is encoded while it is built (`command.rs`, `commands/`), inline while it is small (`buffer.rs`). `sharing.rs`
//!    refuses commands that would harm other tasks on the connection.
//! 2. The client submits it. One critical section (`queue`) checks whether requests are accepted now and whether the budget
//!    allows it (`budget`), and appends its bytes to those that wait (`batch`). The first submission after the actor found the
//!    queue empty wakes it.
//! 3. While the connection is open (`serving`), the actor takes all waiting bytes and requests by a swap, writes the bytes at
//!    once (`output`), and records the requests in flight in order, with their deadlines.
//! 4. Input goes through the decoder (`resp/`). Each reply belongs to the oldest request in flight. Its budget is returned before
//!    its task is woken.
//! 5. That task converts the reply to the requested type (`request.rs`, `convert/`).
//! 6. When the connection is lost, every waiting request learns whether a byte of it was written. The actor then reconnects
//!    (`transport`) and publishes every state.

mod batch;
mod budget;
mod clock;
mod output;
mod queue;
mod serving;
mod submission;
mod transport;

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

pub(crate) use self::clock::{after, later};
pub(crate) use self::queue::{Asked, Refused, Shared};
use self::serving::{End, Serving};
pub(crate) use self::submission::{Replies, Reply};
use self::transport::{Entered, Refusal};
use crate::{Error, Fault, Outcome, Phase, State, WhileDown};

/// The connection of a client, to be [run](Self::run) by whoever has it.
#[must_use = "nothing is sent unless it is run"]
pub struct Connection {
    shared: Arc<Shared>,
    /// Attempts since a connection was last a steady one.
    attempts: u32,
    /// What it ends with.
    last_error: Option<Arc<Fault>>,
}

/// Why there will be no further connection.
enum Over {
    /// Somebody closed it, or there is nobody left.
    Closed,
    /// The server does not let us in, or it is not to be tried again.
    Refused(Fault),
}

impl Connection {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        Self { shared, attempts: 0, last_error: None }
    }

    /// Connects, sends and receives, connects anew when it has to, and ends when the client is closed or nobody has it any more.
    pub async fn run(mut self) {
        if let Over::Refused(error) = self.run_on().await {
            self.last_error = Some(Arc::new(error));
        }
    }

    async fn run_on(&mut self) -> Over {
        let mut state = State::Connecting;
        loop {
            // First the gate: whoever sees the state finds that it is so.
            if self.shared.options.while_down != WhileDown::Fail || state == State::Connecting {
                self.shared.open_gate();
            }
            self.shared.enter(state);
            let failure = match self.attempt().await {
                Ok(entered) => {
                    self.shared.open_gate();
                    self.shared.transition(|status| {
                        status.state = State::Open;
                        status.generation += 1;
                    });
                    let since = Instant::now();
                    let end = Serving::new(entered, Arc::clone(&self.shared)).run().await;
                    if matches!(end, End::Lost(_)) {
                        self.shared.count(|stats| stats.lost += 1);
                    }
                    if since.elapsed() >= self.shared.options.steady_after {
                        self.attempts = 0;
                    }
                    match end {
                        End::Closed => return Over::Closed,
                        // It was to end anyway, and only its last replies are missing.
                        End::Lost(error) if self.shared.closing().is_some() => {
                            self.last_error = Some(Arc::new(error));
                            return Over::Closed;
                        }
                        End::Lost(error) => error,
                    }
                }
                Err(Attempt::Closed) => return Over::Closed,
                Err(Attempt::Failed(error)) => error,
                Err(Attempt::Refused(error)) => {
                    self.tell(&error, true);
                    self.shared.shut_gate(&error);
                    return Over::Refused(error);
                }
            };
            self.tell(&failure, !self.shared.options.reconnect);
            if !self.shared.options.reconnect {
                self.shared.shut_gate(&failure);
                return Over::Refused(failure);
            }
            if self.shared.options.while_down != WhileDown::Queue {
                self.shared.shut_gate(&failure);
            }
            self.shared.transition(|status| {
                status.state = State::Failed;
                status.last_error = Some(Arc::new(failure));
            });
            if self.pause().await.is_err() {
                return Over::Closed;
            }
            state = State::Reconnecting;
        }
    }

    /// Tells what went wrong, with the sources, which say why. If nobody will try again, somebody has to know.
    fn tell(&self, fault: &Fault, is_for_good: bool) {
        let (address, error) = (&self.shared.options.address, fault as &dyn std::error::Error);
        if is_for_good {
            tracing::warn!(?address, error, "there is no connection to Redis, and the client is closed");
        } else {
            tracing::debug!(?address, error, "a connection to Redis failed");
        }
    }

    /// Connects and shakes hands, in the time that there is for it.
    async fn attempt(&self) -> Result<Entered, Attempt> {
        self.shared.count(|stats| stats.attempts += 1);
        let options = &self.shared.options;
        let connecting = tokio::time::timeout(options.connect_timeout, transport::connect(options));
        match self.meanwhile(connecting).await {
            None => Err(Attempt::Closed),
            Some(Ok(Ok(entered))) => Ok(entered),
            Some(Ok(Err(Refusal::Failed(error)))) => Err(Attempt::Failed(error)),
            Some(Ok(Err(Refusal::Refused(error)))) => Err(Attempt::Refused(error)),
            Some(Err(_)) => Err(Attempt::Failed(Fault::ConnectTimedOut)),
        }
    }

    /// Waits before the next attempt: not at all before the first.
    async fn pause(&mut self) -> Result<(), Closed> {
        let options = &self.shared.options;
        let longest = options.min_backoff.saturating_mul(1 << self.attempts.saturating_sub(1).min(20));
        let longest = longest.min(options.max_backoff);
        let pause =
            if self.attempts == 0 { Duration::ZERO } else { longest.mul_f64(fastrand::f64().mul_add(0.5, 0.5)) };
        self.attempts = self.attempts.saturating_add(1);
        self.meanwhile(tokio::time::sleep(pause)).await.ok_or(Closed)
    }

    /// Waits for something while there is no connection: requests end at their deadlines, and a close is heeded at once.
    async fn meanwhile<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        let mut work = std::pin::pin!(work);
        loop {
            if self.shared.closing().is_some() {
                return None;
            }
            self.shared.sweep();
            let next = self.shared.expire(Instant::now(), Phase::Connecting);
            tokio::select! {
                done = &mut work => return Some(done),
                () = sleep_until(next.unwrap_or_else(|| after(Duration::from_hours(1)))) => {}
                () = self.shared.changed(next) => {}
            }
        }
    }
}

/// What came of an attempt to connect.
enum Attempt {
    /// It may be tried again.
    Failed(Fault),
    /// It would be refused again.
    Refused(Fault),
    /// Nobody wants it any more.
    Closed,
}

struct Closed;

/// However it ends, also unrun or with its task: nobody waits for a connection that there will not be.
impl Drop for Connection {
    fn drop(&mut self) {
        self.shared.close(Instant::now());
        for request in self.shared.take().requests {
            self.shared.end(request, Error::Closed { outcome: Outcome::NeverSent });
        }
        self.shared.transition(|status| {
            status.state = State::Closed;
            status.last_error = self.last_error.take().or(status.last_error.take());
        });
    }
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connection").finish_non_exhaustive()
    }
}
