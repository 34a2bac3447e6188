//! Timeouts of a connection, and the time at which the next one is reached.

use std::fmt;
use std::time::Duration;

use tokio::time::Instant;

/// The timeouts and timers of a connection. A field that is `None` is disabled.
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
    /// Limit of the time from the beginning of the connection to its first complete frame, whatever the size of the frame. Default:
    /// 10 s, because clients usually send a frame when they connect, and rarely only listen.
    pub first_frame: Option<Duration>,
    /// Limit of the time from the first byte of a frame, or of a message of several frames, to its last byte. Default: 60 s, enough
    /// for a megabyte over a slow network, and a limit for peers that send one byte at a time.
    pub frame: Option<Duration>,
    /// Interval at which [`Protocol::on_idle`](crate::Protocol::on_idle) is called while no byte arrives from the peer, at least a
    /// millisecond. Default: none, because not every protocol has a ping.
    pub heartbeat: Option<Duration>,
    /// Time from the beginning of the connection to the first call of [`Protocol::on_tick`](crate::Protocol::on_tick). The hook
    /// returns the time to the next tick. Default: none, because only protocols with timers of their own need it.
    pub tick: Option<Duration>,
    /// Closes the connection after this time without a byte from the peer. A peer that has not yet read its replies is not idle:
    /// `write_stall` applies to it. Without a heartbeat, a peer whose request is being answered is not idle either. Default: none,
    /// because a subscriber may listen for hours. With a heartbeat, set it to two or three times the heartbeat.
    pub idle: Option<Duration>,
    /// Closes the connection if there is output and the socket has accepted no byte of it for this time, because the peer does not
    /// read. Bytes that a stream buffers, such as TLS, count as accepted. Default: 30 s, longer than a network takes to recover from
    /// packet loss.
    pub write_stall: Option<Duration>,
    /// Closes the connection of a peer that has closed its side, if no byte was written to it for this time, because the peer may be
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
pub(crate) fn saturating_add(now: Instant, duration: Duration) -> Instant {
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

/// The action that the connection takes when its time is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AlarmAction {
    Heartbeat { silent: Duration },
    Tick,
    Close(Timeout),
}

/// The events that a connection waits for, and the times at which the waits began. Rarely used instants are boxed.
#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "the flags are independent")]
pub(crate) struct Watch {
    /// The first frame has not arrived.
    pub(crate) awaits_first_frame: bool,
    /// When the connection began to wait for the rest of a frame.
    pub(crate) frame_since: Option<Instant>,
    /// The number of the incomplete message in several frames, and when the connection began to wait for the rest of it.
    pub(crate) partial_message: Option<Box<(u64, Instant)>>,
    /// When the connection began to wait for the socket to accept output.
    pub(crate) stalled_since: Option<Instant>,
    /// When the connection began to wait for the next byte to be written to a peer that has closed its side.
    pub(crate) half_closed_since: Option<Box<Instant>>,
    /// The alarm has fired, and the connection has not been idle since.
    pub(crate) had_alarm: bool,
    /// When input last arrived, or when the connection last began to expect input.
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
            awaits_first_frame: true,
            frame_since: None,
            partial_message: None,
            stalled_since: None,
            half_closed_since: None,
            had_alarm: false,
            last_input: now,
            last_ping: now,
            expects_input: true,
            may_ping: true,
        }
    }

    /// Returns the next action and its time, for a connection that began at `began` and has its next tick at `tick`.
    pub(crate) fn next(
        &self,
        timeouts: &Timeouts,
        began: Instant,
        tick: Option<Instant>,
    ) -> Option<(Instant, AlarmAction)> {
        // A timeout beyond the range of the clock is never reached.
        let after = |since: Option<Instant>, timeout: Option<Duration>| since?.checked_add(timeout?);
        let expects_input = self.expects_input.then_some(self.last_input);
        let quiet = self.may_ping.then(|| self.last_input.max(self.last_ping));
        let heartbeat = timeouts.heartbeat.map(|heartbeat| heartbeat.max(Duration::from_millis(1)));
        let next = [
            after(self.awaits_first_frame.then_some(began), timeouts.first_frame)
                .map(|at| (at, AlarmAction::Close(Timeout::FirstFrame))),
            after(self.frame_since, timeouts.frame).map(|at| (at, AlarmAction::Close(Timeout::Frame))),
            after(self.partial_message.as_ref().map(|partial_message| partial_message.1), timeouts.frame)
                .map(|at| (at, AlarmAction::Close(Timeout::Frame))),
            after(self.stalled_since, timeouts.write_stall).map(|at| (at, AlarmAction::Close(Timeout::WriteStall))),
            after(self.half_closed_since.as_deref().copied(), timeouts.half_closed)
                .map(|at| (at, AlarmAction::Close(Timeout::HalfClosed))),
            after(expects_input, timeouts.idle).map(|at| (at, AlarmAction::Close(Timeout::Idle))),
            after(quiet, heartbeat).map(|at| (at, AlarmAction::Heartbeat { silent: at - self.last_input })),
        ]
        .into_iter()
        .flatten()
        .min_by_key(|(at, _)| *at);
        // Separate from the other timeouts, so that connections without ticks do not pay for it.
        let Some(tick) = tick else { return next };
        Some(next.filter(|(at, _)| *at <= tick).unwrap_or((tick, AlarmAction::Tick)))
    }
}
