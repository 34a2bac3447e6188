//! Pings and pongs, which detect dead clients. A state machine without a clock: `now` is an argument.

use std::time::Duration;

use tokio::time::Instant;

use crate::Heartbeat as HeartbeatOptions;

/// The heartbeat of one connection.
#[derive(Debug)]
pub(crate) struct Heartbeat {
    state: PingState,
    /// The time of the next action.
    next_action_at: Instant,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum PingState {
    /// No ping is outstanding.
    Idle,
    /// The ping with this timestamp has not been answered.
    Pinged(u64, Option<Queued>),
    Answered,
}

/// A ping that is queued behind other output.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Queued {
    /// The number of bytes of the connection that precede it.
    position: u64,
    /// The number of bytes that were written at the last check.
    written: u64,
}

/// The output progress of a connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Output {
    /// Bytes written to the socket.
    pub(crate) written: u64,
    /// Bytes that are encoded but not written.
    pub(crate) unsent: u64,
}

/// An action of the heartbeat.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HeartbeatAction {
    Wait,
    /// Send a ping with this timestamp.
    Ping(u64),
    /// Disconnect the client, because it has not answered within the timeout.
    TimedOut,
}

impl Heartbeat {
    pub(crate) fn new(options: &HeartbeatOptions, connected: Instant) -> Self {
        Self { state: PingState::Idle, next_action_at: saturating_add(connected, options.interval) }
    }

    /// Handles a pong. A pong that is older than the last ping is ignored.
    pub(crate) fn pong(&mut self, timestamp: f64) {
        if let PingState::Pinged(at, _) = self.state {
            #[expect(clippy::cast_precision_loss, reason = "milliseconds are exact in a double for 285 000 years")]
            let is_current = timestamp >= at as f64;
            if is_current {
                self.state = PingState::Answered;
            }
        }
    }

    /// Returns the action to take at `now`. `timestamp` is the timestamp of the ping, if the action is a ping. If a ping is queued behind
    /// other output, its timeout starts when that output has been written, as long as the client reads some of it within each timeout.
    pub(crate) fn next_action(
        &mut self,
        options: &HeartbeatOptions,
        now: Instant,
        timestamp: u64,
        output: Output,
    ) -> HeartbeatAction {
        let interval = options.interval;
        let timeout = options.timeout.min(interval);
        if now < self.next_action_at {
            return HeartbeatAction::Wait;
        }
        match &mut self.state {
            PingState::Pinged(_, queued) => {
                let Some(Queued { position, .. }) = queued.filter(|queued| output.written > queued.written) else {
                    return HeartbeatAction::TimedOut;
                };
                let still_queued = output.written <= position;
                *queued = still_queued.then_some(Queued { position, written: output.written });
                self.next_action_at = saturating_add(now, timeout);
                HeartbeatAction::Wait
            }
            PingState::Answered if timeout < interval => {
                self.state = PingState::Idle;
                self.next_action_at = saturating_add(self.next_action_at, interval.saturating_sub(timeout));
                HeartbeatAction::Wait
            }
            PingState::Answered | PingState::Idle => {
                let Output { written, unsent } = output;
                let queued = (unsent > 0).then_some(Queued { position: written + unsent, written });
                self.state = PingState::Pinged(timestamp, queued);
                self.next_action_at = saturating_add(now, timeout);
                HeartbeatAction::Ping(timestamp)
            }
        }
    }

    /// Returns the time until the next action.
    pub(crate) fn time_until_next_action(&self, now: Instant) -> Duration {
        self.next_action_at.saturating_duration_since(now)
    }
}

/// The delay used when a longer one would overflow an [`Instant`].
const MAX_DELAY: Duration = Duration::from_hours(24 * 365);

fn saturating_add(instant: Instant, delay: Duration) -> Instant {
    instant.checked_add(delay).unwrap_or(instant + MAX_DELAY)
}
