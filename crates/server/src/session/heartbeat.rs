//! Pings and pongs: how the server finds out that a client has gone. A core without a clock: `now` is an argument.

use std::time::Duration;

use tokio::time::Instant;

use crate::Heartbeat as HeartbeatOptions;

/// The heartbeat of one connection.
#[derive(Debug)]
pub(crate) struct Heartbeat {
    state: State,
    /// When the state is looked at again.
    due: Instant,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum State {
    /// No ping is open.
    Idle,
    /// The ping with this timestamp has not been answered.
    Pinged(u64, Option<Queued>),
    Answered,
}

/// A ping that is queued behind other output.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Queued {
    /// The bytes of the connection that are written before it.
    position: u64,
    /// The bytes that were written when this was last looked at.
    written: u64,
}

/// The output of a connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Output {
    /// Bytes that the client's socket has taken.
    pub(crate) written: u64,
    /// Bytes that are encoded and not written.
    pub(crate) unsent: u64,
}

/// What is to be done now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Beat {
    Wait,
    /// Send a ping with this timestamp.
    Ping(u64),
    /// The client has not answered in time.
    Missed,
}

impl Heartbeat {
    pub(crate) fn new(options: &HeartbeatOptions, connected: Instant) -> Self {
        Self { state: State::Idle, due: add(connected, options.interval) }
    }

    /// The client has answered a ping. A timestamp that is older than that of the last ping does not count.
    pub(crate) fn pong(&mut self, timestamp: f64) {
        if let State::Pinged(at, _) = self.state {
            #[expect(clippy::cast_precision_loss, reason = "milliseconds are exact in a double for 285 000 years")]
            let is_answer = timestamp >= at as f64;
            if is_answer {
                self.state = State::Answered;
            }
        }
    }

    /// What is to be done at `now`; `timestamp` is the time for a ping. The timeout of a ping that is queued behind other output starts
    /// when that output has been written, as long as the client takes some of it within each timeout.
    pub(crate) fn beat(&mut self, options: &HeartbeatOptions, now: Instant, timestamp: u64, output: Output) -> Beat {
        let interval = options.interval;
        let timeout = options.timeout.min(interval);
        if now < self.due {
            return Beat::Wait;
        }
        match &mut self.state {
            State::Pinged(_, queued) => {
                let Some(Queued { position, .. }) = queued.filter(|queued| output.written > queued.written) else {
                    return Beat::Missed;
                };
                let still_queued = output.written <= position;
                *queued = still_queued.then_some(Queued { position, written: output.written });
                self.due = add(now, timeout);
                Beat::Wait
            }
            State::Answered if timeout < interval => {
                self.state = State::Idle;
                self.due = add(self.due, interval.saturating_sub(timeout));
                Beat::Wait
            }
            State::Answered | State::Idle => {
                let Output { written, unsent } = output;
                let queued = (unsent > 0).then_some(Queued { position: written + unsent, written });
                self.state = State::Pinged(timestamp, queued);
                self.due = add(now, timeout);
                Beat::Ping(timestamp)
            }
        }
    }

    /// How long nothing is to be done.
    pub(crate) fn rest(&self, now: Instant) -> Duration {
        self.due.saturating_duration_since(now)
    }
}

/// The delay in place of one that would overflow an [`Instant`].
const MAX_DELAY: Duration = Duration::from_hours(24 * 365);

fn add(instant: Instant, delay: Duration) -> Instant {
    instant.checked_add(delay).unwrap_or(instant + MAX_DELAY)
}
