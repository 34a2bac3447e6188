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
    /// From the beginning to the first whole frame, whatever its size. Default: 10 s, because an honest client sends something
    /// when it connects; one that only listens is rare.
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
    /// Closes the connection after this time in which the peer took no byte of the output. Bytes that a stream buffers, such as
    /// TLS, count as taken. Default: 30 s, longer than a network takes to recover from packet loss.
    pub write_stall: Option<Duration>,
    /// Closes the connection of a peer that has closed its side, after this time in which it took no byte: it may be gone. A
    /// peer that reads gets all its replies. Default: 30 s, as `write_stall`.
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

    /// Whether it matters when the peer was last heard.
    pub(crate) fn needs_hearing(&self) -> bool {
        self.idle.is_some() || self.heartbeat.is_some()
    }
}

/// Which of the [`Timeouts`] ended a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Timeout {
    /// No first frame came.
    FirstFrame,
    /// A frame was begun and not finished.
    Frame,
    /// The peer was silent.
    Idle,
    /// The peer did not read.
    WriteStall,
    /// The peer had closed its side, and its replies took too long.
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
            Self::FirstFrame => "the peer sent no first frame in time",
            Self::Frame => "the peer did not finish a frame in time",
            Self::Idle => "the peer was silent for too long",
            Self::WriteStall => "the peer did not read for too long",
            Self::HalfClosed => "the peer had closed its side, and its replies took too long",
        })
    }
}

/// What is to be done at a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Due {
    Heartbeat { silent: Duration },
    Tick,
    End(Timeout),
}

/// What a connection waits for, and since when. Rarely used instants are boxed.
#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
pub(crate) struct Watch {
    /// For the first frame, from the beginning.
    pub(crate) first_frame: bool,
    /// For the rest of a frame.
    pub(crate) frame: Option<Instant>,
    /// For the rest of a message that comes in several frames, which has this name.
    pub(crate) assembling: Option<Box<(u64, Instant)>>,
    /// For the peer to read.
    pub(crate) stalled: Option<Instant>,
    /// For replies to a peer that has closed its side.
    pub(crate) half_closed: Option<Box<Instant>>,
    /// The alarm went off, and the connection has not been idle since.
    pub(crate) had_alarm: bool,
    /// When it was last heard, or could not be, for want of reading.
    pub(crate) heard: Instant,
    /// When it was last asked for a sign of life.
    pub(crate) asked: Instant,
    /// Whether what the peer says would be heard, and it is expected to speak.
    pub(crate) listening: bool,
    /// Whether a sign of life may be asked for: all is written, so it would be the next thing that the peer reads.
    pub(crate) may_ask: bool,
}

impl Watch {
    pub(crate) fn new(now: Instant) -> Self {
        Self {
            first_frame: true,
            frame: None,
            assembling: None,
            stalled: None,
            half_closed: None,
            had_alarm: false,
            heard: now,
            asked: now,
            listening: true,
            may_ask: true,
        }
    }

    /// What comes next, and when, for a connection that began then and whose next tick comes at `tick`.
    pub(crate) fn next(&self, timeouts: &Timeouts, began: Instant, tick: Option<Instant>) -> Option<(Instant, Due)> {
        // A time-out that no clock has never comes.
        let after = |since: Option<Instant>, timeout: Option<Duration>| since?.checked_add(timeout?);
        let listening = self.listening.then_some(self.heard);
        let quiet = self.may_ask.then(|| self.heard.max(self.asked));
        let heartbeat = timeouts.heartbeat.map(|heartbeat| heartbeat.max(Duration::from_millis(1)));
        let next = [
            after(self.first_frame.then_some(began), timeouts.first_frame)
                .map(|at| (at, Due::End(Timeout::FirstFrame))),
            after(self.frame, timeouts.frame).map(|at| (at, Due::End(Timeout::Frame))),
            after(self.assembling.as_ref().map(|assembling| assembling.1), timeouts.frame)
                .map(|at| (at, Due::End(Timeout::Frame))),
            after(self.stalled, timeouts.write_stall).map(|at| (at, Due::End(Timeout::WriteStall))),
            after(self.half_closed.as_deref().copied(), timeouts.half_closed)
                .map(|at| (at, Due::End(Timeout::HalfClosed))),
            after(listening, timeouts.idle).map(|at| (at, Due::End(Timeout::Idle))),
            after(quiet, heartbeat).map(|at| (at, Due::Heartbeat { silent: at - self.heard })),
        ]
        .into_iter()
        .flatten()
        .min_by_key(|(at, _)| *at);
        // Not among the others, so that those who have none do not pay for it.
        let Some(tick) = tick else { return next };
        Some(next.filter(|(at, _)| *at <= tick).unwrap_or((tick, Due::Tick)))
    }
}
