//! Timeouts of a connection, and when the next one is due.

use std::fmt;
use std::time::Duration;

use tokio::time::Instant;

/// How long a connection waits for its peer. Where a field is `None`, it waits without a limit.
///
/// ```
/// use std::time::Duration;
/// use tidewire_conn::Timeouts;
///
/// let timeouts = Timeouts::default().heartbeat(Duration::from_secs(20)).idle(Duration::from_secs(60)).first_frame(None);
/// # assert_eq!((timeouts.idle, timeouts.first_frame), (Some(Duration::from_secs(60)), None));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Timeouts {
    /// From the beginning to the first complete frame, whatever its size. Default: 10 s, because clients usually send a frame when
    /// they connect, and rarely only listen.
    pub first_frame: Option<Duration>,
    /// From the first byte of a frame, or of a message of several frames, to its last byte. Default: 60 s, enough for a megabyte
    /// over a slow network, and a limit for peers that send one byte at a time.
    pub frame: Option<Duration>,
    /// Calls [`Protocol::on_idle`](crate::Protocol::on_idle) after this time without a byte from the peer, and again each time
    /// it has passed, at most once per millisecond. Default: none, because not every protocol has a ping.
    pub heartbeat: Option<Duration>,
    /// Calls [`Protocol::on_tick`](crate::Protocol::on_tick) for the first time this long after the beginning; the hook returns
    /// when the next tick comes. Default: none, because only protocols with timers of their own need it.
    pub tick: Option<Duration>,
    /// Closes the connection after this time without a byte from the peer. Without a heartbeat, a peer whose request is being
    /// answered is not idle, nor is one that has not yet read its replies: `write_stall` applies to that one. Default: none,
    /// because a subscriber may listen for hours; with a heartbeat, set two or three times the heartbeat.
    pub idle: Option<Duration>,
    /// Closes the connection after this time in which the socket accepted no byte of the output, because the peer does not read.
    /// Bytes that a stream buffers, such as TLS, count as accepted. Default: 30 s, longer than a network takes to recover from
    /// packet loss.
    pub write_stall: Option<Duration>,
    /// Closes the connection of a peer that has closed its side, after this time in which no byte was written to it: it may be
    /// gone. A peer that reads gets all its replies. Default: 30 s, as `write_stall`.
    pub half_closed: Option<Duration>,
    /// How long an ended connection waits for the peer to close its side, so that the last frames are not lost to a reset.
    /// Default: 1 s, several round trips.
    pub linger: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            first_frame: Some(Duration::from_secs(10)),
            frame: Some(Duration::from_mins(1)),
            heartbeat: None,
            tick: None,
            idle: None,
            write_stall: Some(Duration::from_secs(30)),
            half_closed: Some(Duration::from_secs(30)),
            linger: Duration::from_secs(1),
        }
    }
}

impl Timeouts {
    /// Sets [`first_frame`](#structfield.first_frame).
    #[must_use]
    pub fn first_frame(mut self, first_frame: impl Into<Option<Duration>>) -> Self {
        self.first_frame = first_frame.into();
        self
    }

    /// Sets [`frame`](#structfield.frame).
    #[must_use]
    pub fn frame(mut self, frame: impl Into<Option<Duration>>) -> Self {
        self.frame = frame.into();
        self
    }

    /// Sets [`heartbeat`](#structfield.heartbeat).
    #[must_use]
    pub fn heartbeat(mut self, heartbeat: Duration) -> Self {
        self.heartbeat = Some(heartbeat);
        self
    }

    /// Sets [`tick`](#structfield.tick).
    #[must_use]
    pub fn tick(mut self, tick: Duration) -> Self {
        self.tick = Some(tick);
        self
    }

    /// Sets [`idle`](#structfield.idle).
    #[must_use]
    pub fn idle(mut self, idle: Duration) -> Self {
        self.idle = Some(idle);
        self
    }

    /// Sets [`write_stall`](#structfield.write_stall).
    #[must_use]
    pub fn write_stall(mut self, write_stall: impl Into<Option<Duration>>) -> Self {
        self.write_stall = write_stall.into();
        self
    }

    /// Sets [`half_closed`](#structfield.half_closed).
    #[must_use]
    pub fn half_closed(mut self, half_closed: impl Into<Option<Duration>>) -> Self {
        self.half_closed = half_closed.into();
        self
    }

    /// Sets [`linger`](#structfield.linger).
    #[must_use]
    pub fn linger(mut self, linger: Duration) -> Self {
        self.linger = linger;
        self
    }

    /// Whether a timeout depends on when input last arrived.
    pub(crate) fn needs_last_input(&self) -> bool {
        self.idle.is_some() || self.heartbeat.is_some()
    }
}

/// Which of the [`Timeouts`] ended a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Timeout {
    /// No first frame arrived.
    FirstFrame,
    /// A frame or message began and was not completed.
    Frame,
    /// The peer was silent.
    Idle,
    /// The peer did not read.
    WriteStall,
    /// The peer had closed its side, and nothing was written to it for too long.
    HalfClosed,
}

impl Timeout {
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::FirstFrame => "first_frame",
            Self::Frame => "frame",
            Self::Idle => "idle",
            Self::WriteStall => "write_stall",
            Self::HalfClosed => "half_closed",
        }
    }
}

/// Limit of the bytes that an ended connection reads and discards while it lingers.
pub(crate) const MAX_DISCARDED_BYTES: usize = 1 << 20;

/// Adds a duration to an instant. The duration is limited to thirty years, so that the sum does not overflow.
pub(crate) fn later(now: Instant, duration: Duration) -> Instant {
    const MAX: Duration = Duration::from_hours(24 * 365 * 30);
    now + duration.min(MAX)
}

impl fmt::Display for Timeout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::FirstFrame => "timed out waiting for the first frame",
            Self::Frame => "timed out waiting for the rest of a frame",
            Self::Idle => "the peer was idle for too long",
            Self::WriteStall => "timed out waiting for the peer to read",
            Self::HalfClosed => "timed out answering a peer that has closed its side",
        })
    }
}

/// The action to take when a time is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Due {
    Heartbeat { silent: Duration },
    Tick,
    Close(Timeout),
}

/// The events that a connection waits for, and since when. Rarely used instants are boxed.
#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "the flags are independent")]
pub(crate) struct Watch {
    /// The first frame has not arrived.
    pub(crate) first_frame: bool,
    /// Since when the rest of a frame is missing.
    pub(crate) frame: Option<Instant>,
    /// The number of a message in several frames of which a part is missing, and since when.
    pub(crate) partial_message: Option<Box<(u64, Instant)>>,
    /// Since when the peer has not read.
    pub(crate) stalled: Option<Instant>,
    /// Since when nothing was written to a peer that has closed its side.
    pub(crate) half_closed: Option<Box<Instant>>,
    /// The alarm has fired, and the connection has not been idle since.
    pub(crate) had_alarm: bool,
    /// When input last arrived, or when the connection last did not read.
    pub(crate) last_input: Instant,
    /// When [`Protocol::on_idle`](crate::Protocol::on_idle) was last called.
    pub(crate) last_ping: Instant,
    /// The connection reads, and the peer is expected to send.
    pub(crate) expects_input: bool,
    /// A ping may be sent: all output is written, so the ping would be the next frame that the peer reads.
    pub(crate) may_ping: bool,
}

impl Watch {
    pub(crate) fn new(now: Instant) -> Self {
        Self {
            first_frame: true,
            frame: None,
            partial_message: None,
            stalled: None,
            half_closed: None,
            had_alarm: false,
            last_input: now,
            last_ping: now,
            expects_input: true,
            may_ping: true,
        }
    }

    /// Returns the next action and its time, for a connection that began at `began` and has its next tick at `tick`.
    pub(crate) fn next(&self, timeouts: &Timeouts, began: Instant, tick: Option<Instant>) -> Option<(Instant, Due)> {
        // A timeout beyond the range of the clock is never reached.
        let after = |since: Option<Instant>, timeout: Option<Duration>| since?.checked_add(timeout?);
        let expects_input = self.expects_input.then_some(self.last_input);
        let quiet = self.may_ping.then(|| self.last_input.max(self.last_ping));
        let heartbeat = timeouts.heartbeat.map(|heartbeat| heartbeat.max(Duration::from_millis(1)));
        let next = [
            after(self.first_frame.then_some(began), timeouts.first_frame)
                .map(|at| (at, Due::Close(Timeout::FirstFrame))),
            after(self.frame, timeouts.frame).map(|at| (at, Due::Close(Timeout::Frame))),
            after(self.partial_message.as_ref().map(|partial_message| partial_message.1), timeouts.frame)
                .map(|at| (at, Due::Close(Timeout::Frame))),
            after(self.stalled, timeouts.write_stall).map(|at| (at, Due::Close(Timeout::WriteStall))),
            after(self.half_closed.as_deref().copied(), timeouts.half_closed)
                .map(|at| (at, Due::Close(Timeout::HalfClosed))),
            after(expects_input, timeouts.idle).map(|at| (at, Due::Close(Timeout::Idle))),
            after(quiet, heartbeat).map(|at| (at, Due::Heartbeat { silent: at - self.last_input })),
        ]
        .into_iter()
        .flatten()
        .min_by_key(|(at, _)| *at);
        // Handled separately, so that connections without ticks do not pay for it.
        let Some(tick) = tick else { return next };
        Some(next.filter(|(at, _)| *at <= tick).unwrap_or((tick, Due::Tick)))
    }
}
