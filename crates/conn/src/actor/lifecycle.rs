//! The stages of a connection.
//!
//! ```text
//! Starting ─► Open ─► Draining ─► Answering ─► Flushing ─► Closing ─► Closed ─► Lingering ─► Ended
//!             └─────────────────────────────────────┘                    │                     ▲
//!                             serving                                    └── the socket failed ┘
//! ```
//!
//! A connection moves to the right only, and may skip stages.
//!
//! | stage | entered when | reads | decodes | handles | sends | left when |
//! |---|---|---|---|---|---|---|
//! | Open | the protocol is notified of the connection | yes | yes | yes | yes | the peer has closed its side and is answered |
//! | Draining | the server shuts down | no | yes | yes | yes | requests are answered and pushes are sent |
//! | Answering | the input cannot be decoded | no | no | yes | yes | requests are answered |
//! | Flushing | a handle closes the connection | no | no | no | yes | pushes are sent |
//! | Closing | there is a reason to end | no | no | no | no | the output is written |
//! | Closed | nothing is left to write, or the socket failed | no | no | no | no | the protocol is notified of the end |
//! | Lingering | our side of the socket is being closed | discards | no | no | no | the peer has closed its side, or the deadline has passed |
//!
//! **Every path reaches the end.** Every error, timeout, tick or handler that ends the connection calls [`close`](Lifecycle::close),
//! which leaves any serving stage. `Closing` is left when the output is written, the socket fails, or the peer has not read for the
//! write timeout. `Lingering` has a deadline. The deadline of a shutdown and the drop of the actor leave any stage.
//!
//! **The protocol is notified of the end exactly once.** `on_connection_closed` is called only after [`end`](Lifecycle::end) has
//! returned true. `end` returns true only in the stages after `Starting` and before `Lingering`, and leaves them. In `Starting` the
//! protocol has not been notified of the connection. The drop of the actor also calls `end`, so the notification is never missed.

use tokio::time::Instant;

/// The stage of a connection, with `R` as the reason for its end.
#[derive(Debug)]
pub(super) enum Lifecycle<R> {
    /// The protocol has not been notified of the connection.
    Starting,
    /// Input is read, requests are handled, and replies and pushes are sent.
    Open,
    /// Nothing more is read. Requests that were read are answered.
    Draining,
    /// Nothing more is decoded. Requests that were decoded are answered, and then the connection closes for this reason.
    Answering(Box<R>),
    /// Nothing more is handled. Pushes are sent.
    Flushing,
    /// Nothing more is sent, and the output is written. If `waits_for_peer` is false, output that the socket does not accept at once is
    /// dropped.
    Closing { reason: Box<R>, waits_for_peer: bool },
    /// Nothing more is written.
    Closed,
    /// The protocol has been notified of the end. The peer may not have closed its side.
    Lingering(Box<Linger>),
    /// Nothing is left to do.
    Ended,
}

/// The wait for the peer to close its side.
#[derive(Debug)]
pub(super) struct Linger {
    pub(super) deadline: Instant,
    /// Our side is closed.
    pub(super) is_shut_down: bool,
    /// Bytes that were read and discarded.
    pub(super) discarded: usize,
}

impl<R> Lifecycle<R> {
    pub(super) fn may_read(&self) -> bool {
        matches!(self, Self::Open)
    }

    pub(super) fn may_decode(&self) -> bool {
        matches!(self, Self::Open | Self::Draining)
    }

    pub(super) fn may_handle(&self) -> bool {
        matches!(self, Self::Open | Self::Draining | Self::Answering(_))
    }

    /// Whether replies and pushes may be sent.
    pub(super) fn is_serving(&self) -> bool {
        matches!(self, Self::Open | Self::Draining | Self::Answering(_) | Self::Flushing)
    }

    /// Whether the connection is closing and does not wait for the peer.
    pub(super) fn is_abandoned(&self) -> bool {
        matches!(self, Self::Closing { waits_for_peer: false, .. })
    }

    pub(super) fn is_lingering(&self) -> bool {
        matches!(self, Self::Lingering(_))
    }

    /// `Starting` → `Open`. Returns whether the protocol must be notified of the connection. Returns true once.
    pub(super) fn start(&mut self) -> bool {
        self.advance_if(matches!(self, Self::Starting), Self::Open)
    }

    /// The server shuts down: `Open` → `Draining`.
    pub(super) fn drain(&mut self) {
        self.advance_if(self.may_read(), Self::Draining);
    }

    /// The input cannot be decoded: `Open`, `Draining` → `Answering`.
    pub(super) fn stop_decoding(&mut self, reason: R) {
        self.advance_if(self.may_decode(), Self::Answering(Box::new(reason)));
    }

    /// A handle closes the connection: `Open`, `Draining`, `Answering` → `Flushing`. Returns whether the stage changed.
    pub(super) fn flush(&mut self) -> bool {
        self.advance_if(self.may_handle(), Self::Flushing)
    }

    /// Everything is answered: `Answering` → `Flushing`. Returns the reason to close the connection, or `None` in any other stage.
    pub(super) fn take_decode_error(&mut self) -> Option<R> {
        if matches!(self, Self::Answering(_))
            && let Self::Answering(reason) = std::mem::replace(self, Self::Flushing)
        {
            return Some(*reason);
        }
        None
    }

    /// There is a reason to end: any serving stage → `Closing`.
    pub(super) fn close(&mut self, reason: R) {
        self.advance_if(self.is_serving(), Self::Closing { reason: Box::new(reason), waits_for_peer: true });
    }

    /// Stops waiting for the peer, if the connection is `Closing`.
    pub(super) fn abandon(&mut self) {
        if let Self::Closing { waits_for_peer, .. } = self {
            *waits_for_peer = false;
        }
    }

    /// `Closing` → `Closed`. Returns the reason for the end, or `None` in any other stage.
    pub(super) fn take_reason(&mut self) -> Option<R> {
        if matches!(self, Self::Closing { .. })
            && let Self::Closing { reason, .. } = std::mem::replace(self, Self::Closed)
        {
            return Some(*reason);
        }
        None
    }

    /// Any stage → `Lingering` or `Ended`. Returns whether the protocol must be notified of the end. Returns true at most once.
    #[must_use]
    pub(super) fn end(&mut self, linger: Option<Linger>) -> bool {
        let next = linger.map_or(Self::Ended, |linger| Self::Lingering(Box::new(linger)));
        !matches!(std::mem::replace(self, next), Self::Starting | Self::Lingering(_) | Self::Ended)
    }

    fn advance_if(&mut self, condition: bool, next: Self) -> bool {
        if condition {
            *self = next;
        }
        condition
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn linger() -> Linger {
        Linger { deadline: Instant::now(), is_shut_down: false, discarded: 0 }
    }

    /// Every stage, from left to right.
    fn stages() -> [Lifecycle<&'static str>; 9] {
        [
            Lifecycle::Starting,
            Lifecycle::Open,
            Lifecycle::Draining,
            Lifecycle::Answering(Box::new("decode")),
            Lifecycle::Flushing,
            Lifecycle::Closing { reason: Box::new("peer"), waits_for_peer: true },
            Lifecycle::Closed,
            Lifecycle::Lingering(Box::new(linger())),
            Lifecycle::Ended,
        ]
    }

    fn position(stage: &Lifecycle<&'static str>) -> usize {
        stages().iter().position(|other| std::mem::discriminant(other) == std::mem::discriminant(stage)).unwrap()
    }

    type Transition = fn(&mut Lifecycle<&'static str>);

    /// Every transition except the end.
    const TRANSITIONS: [Transition; 8] = [
        |stage| {
            stage.start();
        },
        |stage| stage.drain(),
        |stage| stage.stop_decoding("decode"),
        |stage| {
            stage.flush();
        },
        |stage| {
            stage.take_decode_error();
        },
        |stage| stage.close("handler"),
        |stage| stage.abandon(),
        |stage| {
            stage.take_reason();
        },
    ];

    #[test]
    fn no_transition_leads_to_an_earlier_stage() {
        for transition in TRANSITIONS {
            for mut stage in stages() {
                let before = position(&stage);
                transition(&mut stage);
                assert!(position(&stage) >= before, "{before} became {stage:?}");
            }
        }
    }

    #[test]
    fn later_stages_permit_no_more_than_earlier_ones() {
        for may in [
            Lifecycle::may_read,
            Lifecycle::may_decode,
            Lifecycle::may_handle,
            Lifecycle::is_serving as fn(&Lifecycle<&'static str>) -> bool,
        ] {
            let [starting, serving @ ..] = stages();
            assert!(!may(&starting), "the protocol has not been notified of the connection");
            assert!(may(&serving[0]));
            assert!(serving.iter().map(may).is_sorted_by(|earlier, later| earlier >= later));
        }
    }

    #[test]
    fn protocol_is_notified_of_the_end_once() {
        // Every sequence of four transitions, with an end before each of them, followed by the drop of the actor.
        for sequence in 0..TRANSITIONS.len().pow(4) {
            for end_before in 0..=4 {
                let mut stage = Lifecycle::Starting;
                assert!(stage.start() && !stage.start());
                let mut notified = 0;
                for step in 0..4 {
                    if step == end_before {
                        notified += usize::from(stage.end((sequence % 2 == 0).then(linger)));
                    }
                    TRANSITIONS[sequence >> (3 * step) & 7](&mut stage);
                }
                notified += usize::from(stage.end(None));
                assert_eq!(notified, 1, "sequence {sequence:o}, ended before {end_before}");
            }
        }
    }

    #[test]
    fn connection_that_has_not_started_has_no_end() {
        let mut stage = Lifecycle::<&str>::Starting;
        assert!(!stage.end(None));
        assert!(!stage.start());
    }

    #[test]
    fn first_close_reason_is_kept() {
        let mut stage = Lifecycle::Open;
        stage.close("timeout");
        stage.close("handler");
        assert!(!stage.is_abandoned());
        stage.abandon();
        assert!(stage.is_abandoned());
        assert_eq!(stage.take_reason(), Some("timeout"));
        assert_eq!(stage.take_reason(), None);
        assert!(matches!(stage, Lifecycle::Closed));
    }

    #[test]
    fn close_by_handle_overrides_shutdown_and_decode_error() {
        let mut stage = Lifecycle::Open;
        stage.drain();
        assert!(stage.may_decode() && !stage.may_read());
        stage.stop_decoding("decode");
        stage.drain();
        assert!(stage.may_handle() && !stage.may_decode());
        assert!(stage.flush());
        assert!(stage.is_serving() && !stage.may_handle());
        stage.drain();
        stage.stop_decoding("decode");
        assert!(!stage.flush() && matches!(stage, Lifecycle::Flushing));
        assert_eq!(stage.take_decode_error(), None);
    }
}
