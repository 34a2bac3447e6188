//! An idle actor: releasing buffers, timeouts and ticks, and the end of the stream.
//!
//! A connection that ends lingers half-closed until the peer closes its side or [`Timeouts::linger`](crate::Timeouts::linger) has
//! passed: a socket that is closed with unread bytes resets, and the peer may lose the last frames. The protocol learns of the
//! end before that.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::BytesMut;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::Instant;

use super::{Actor, Progress, TURNS};
use crate::batch::Batch;
use crate::supervisor::Phase;
use crate::timeouts::{Due, MAX_DISCARDED_BYTES, later};
use crate::{CloseReason, Codec, Protocol, Tick};

/// The end of a stream.
#[derive(Debug)]
pub(super) struct Parting {
    /// So long the peer is waited for.
    until: Instant,
    /// Our side is closed.
    is_shut: bool,
    /// So many bytes came that nobody will handle.
    discarded: usize,
}

impl<P: Protocol, S: AsyncRead + AsyncWrite + Unpin> Actor<P, S> {
    /// The connection has ended, but for the end of its stream.
    pub(super) fn part(&mut self) {
        self.batch = Batch::default();
        self.release();
        self.record_held();
        let until = later(Instant::now(), self.shared.timeouts.linger);
        self.parting = Some(Box::new(Parting { until, is_shut: false, discarded: 0 }));
        self.set_alarm(until);
    }

    /// Nothing moves. Returns whether something does after all, because it was time for it.
    pub(super) fn rest(&mut self) -> Progress<P> {
        self.context.publish();
        self.replies.rest();
        self.queues.rest();
        // An idle connection holds no buffers.
        if self.input.is_empty() {
            self.input = BytesMut::new();
        }
        if self.batch.is_empty() {
            self.batch.shrink();
        }
        if self.state.given_up
            && let Some(reason) = self.ending.take()
        {
            return Err(*reason);
        }
        self.hear_alarm();
        let is_rung = std::mem::take(&mut self.watch.rung);
        self.wait_for_peer();
        let Some((at, due)) = self.watch.next(&self.shared.timeouts, self.context.since(), self.context.tick_at())
        else {
            return Ok(false);
        };
        // Only then has the runtime looked at the sockets before it looked at the clock.
        if is_rung && at <= Instant::now() {
            return self.time_out(due);
        }
        self.set_alarm(at);
        Ok(false)
    }

    /// Notes whether the alarm went off, which it does once.
    fn hear_alarm(&mut self) {
        if self.queues.mailbox.take_alarm() {
            self.alarm = None;
            self.watch.rung = true;
        }
    }

    /// It does not rest, and has had all its turns. If it is time for a tick, that comes all the same.
    #[cold]
    pub(super) fn tick_unrested(&mut self) {
        self.hear_alarm();
        if self.watch.rung && self.context.tick_at().is_some_and(|at| at <= Instant::now()) {
            self.tick();
        }
        if let Some(at) = self.context.tick_at() {
            self.set_alarm(at);
        }
    }

    fn tick(&mut self) {
        self.context.tick = None;
        if self.ending.is_some() {
            return;
        }
        self.context.unsent_bytes = self.batch.len();
        match self.shared.protocol.on_tick(&mut self.context) {
            Tick::Next { frame, after } => {
                self.context.tick_within(after);
                match frame {
                    Some(frame) if self.holds() => self.queues.outbox().push_own(frame),
                    Some(frame) => self.send_whole(frame),
                    None => {}
                }
            }
            Tick::Close(last) => {
                self.state.given_up = true;
                match last {
                    Some(last) => {
                        self.send_whole(last);
                        self.end_silently(CloseReason::Handler);
                    }
                    None => self.end(CloseReason::Handler),
                }
            }
            Tick::Stop => {}
        }
    }

    /// Notes what it waits for, from now on or still.
    pub(super) fn wait_for_peer(&mut self) {
        let serves = self.ending.is_none();
        let has_left = self.state.heard_out || self.codec.is_leaving();
        let listens = self.is_listening();
        let is_midway = listens && !self.state.backlog && self.codec.is_midway(&self.input);
        let assembling = self.codec.assembling().filter(|_| listens);
        let is_written = self.is_written();
        let is_answered = self.replies.is_empty() && self.parked.is_empty();
        let expects = listens && is_written && (is_answered || self.shared.timeouts.heartbeat.is_some());
        let may_ask = serves && is_written && !self.holds();
        let watch = &mut self.watch;
        let mut now = None;
        let mut since = |waits: bool, since: Option<Instant>| {
            waits.then(|| since.unwrap_or_else(|| *now.get_or_insert_with(Instant::now)))
        };
        watch.first_frame &= listens && !self.state.backlog;
        let known = watch.assembling.as_deref().filter(|(known, _)| Some(*known) == assembling);
        watch.assembling = assembling.zip(since(assembling.is_some(), known.map(|(_, since)| *since))).map(Box::new);
        watch.frame = since(is_midway, watch.frame);
        watch.stalled = since(!is_written, watch.stalled);
        watch.half_closed = since(serves && has_left, watch.half_closed.as_deref().copied()).map(Box::new);
        if expects && !watch.listening {
            watch.heard = Instant::now();
        }
        watch.listening = expects;
        watch.may_ask = may_ask;
    }

    pub(super) fn time_out(&mut self, due: Due) -> Progress<P> {
        match due {
            Due::Heartbeat { silent } => {
                self.watch.asked = Instant::now();
                if let Some(frame) = self.shared.protocol.on_idle(silent, &mut self.context) {
                    self.send_whole(frame);
                }
            }
            Due::Tick => self.tick(),
            Due::End(timeout) => match self.ending.take() {
                // It had its last words, and did not read them.
                Some(reason) => return Err(*reason),
                None if !self.is_written() => return Err(CloseReason::TimedOut(timeout)),
                None => self.end(CloseReason::TimedOut(timeout)),
            },
        }
        Ok(true)
    }

    /// Sets an alarm, unless an earlier one is set already.
    pub(super) fn set_alarm(&mut self, at: Instant) {
        if self.alarm.is_none_or(|alarm| at < alarm) {
            self.shared.alarms.set(self.context.id(), self.alarm, at);
            self.alarm = Some(at);
        }
    }

    /// Ends the stream in order. A socket that is closed with unread bytes resets, and the peer may lose our last words; so
    /// what still comes is thrown away, until the peer closes its side or the time for it is over.
    pub(super) fn poll_linger(&mut self, context: &mut Context<'_>) -> Poll<()> {
        self.register(context);
        let Some(mut parting) = self.parting.take() else { return Poll::Ready(()) };
        let polled = self.poll_parting(&mut parting, context);
        self.parting = Some(parting);
        polled
    }

    pub(super) fn poll_parting(&mut self, parting: &mut Parting, context: &mut Context<'_>) -> Poll<()> {
        let Parting { until, is_shut, discarded } = parting;
        // Whether shutting it down succeeds or not, the socket is dropped in the end.
        *is_shut = *is_shut || Pin::new(&mut self.socket).poll_shutdown(context).is_ready();
        if self.queues.mailbox.take_alarm() {
            self.alarm = None;
            if Instant::now() >= *until {
                return Poll::Ready(());
            }
            self.set_alarm(*until);
        }
        for _ in 0..TURNS {
            let is_over = *is_shut && self.state.heard_out || *discarded > MAX_DISCARDED_BYTES;
            if is_over || self.shared.phase.get() == Phase::Aborted {
                return Poll::Ready(());
            }
            if self.state.heard_out {
                return Poll::Pending;
            }
            self.input.clear();
            match ready!(self.poll_read(context)) {
                Ok(1..) => *discarded += self.input.len(),
                Ok(0) | Err(_) => self.state.heard_out = true,
            }
        }
        context.waker().wake_by_ref();
        Poll::Pending
    }
}
