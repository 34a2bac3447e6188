//! An actor with nothing to do: it releases its buffers, watches its timeouts, and runs ticks.

use bytes::BytesMut;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::Instant;

use super::{Actor, Progress};
use crate::codec::Codec;
use crate::timeouts::Due;
use crate::{CloseReason, Protocol, Tick};

impl<P: Protocol, S: AsyncRead + AsyncWrite + Unpin> Actor<P, S> {
    /// Prepares to wait. Returns whether there is something to do after all, because a timeout or tick was due.
    pub(super) fn idle(&mut self) -> Progress<P> {
        self.context.publish();
        self.replies.shrink();
        self.queues.shrink();
        // An idle connection holds no buffers.
        if self.input.bytes.is_empty() {
            self.input.bytes = BytesMut::new();
        }
        if self.batch.is_empty() {
            self.batch.shrink();
        }
        if self.lifecycle.is_abandoned()
            && let Some(reason) = self.lifecycle.take_reason()
        {
            return Err(reason);
        }
        self.take_alarm();
        let had_alarm = std::mem::take(&mut self.watch.had_alarm);
        self.watch_peer();
        let Some((at, due)) = self.watch.next(&self.shared.timeouts, self.context.since(), self.context.tick_at())
        else {
            return Ok(false);
        };
        // After an alarm the runtime has polled the sockets before it read the clock, so input that has arrived counts first.
        if had_alarm && at <= Instant::now() {
            return self.time_out(due);
        }
        self.set_alarm(at);
        Ok(false)
    }

    /// Records whether the alarm has fired.
    fn take_alarm(&mut self) {
        if self.queues.mailbox.take_alarm() {
            self.alarm = None;
            self.watch.had_alarm = true;
        }
    }

    /// Runs a tick that is due on a connection that is never idle.
    #[cold]
    pub(super) fn tick_while_busy(&mut self) {
        self.take_alarm();
        if self.watch.had_alarm && self.context.tick_at().is_some_and(|at| at <= Instant::now()) {
            self.tick();
        }
        if let Some(at) = self.context.tick_at() {
            self.set_alarm(at);
        }
    }

    fn tick(&mut self) {
        self.context.tick = None;
        if !self.lifecycle.is_serving() {
            return;
        }
        self.context.unsent_bytes = self.batch.len();
        match self.shared.protocol.on_tick(&mut self.context) {
            Tick::Next { frame, after } => {
                self.context.tick_within(after);
                match frame {
                    Some(frame) if self.holds_pushes() => self.queues.outbox().push_own(frame),
                    Some(frame) => self.send_whole(frame),
                    None => {}
                }
            }
            Tick::Close(last) => {
                self.close_with(last, CloseReason::Handler);
                self.lifecycle.abandon();
            }
            Tick::Stop => {}
        }
    }

    /// Updates the events that the connection waits for, and since when.
    fn watch_peer(&mut self) {
        let is_serving = self.lifecycle.is_serving();
        let has_left = self.input.has_ended || self.codec.is_closing();
        let is_reading = self.may_read_more();
        let has_partial_frame =
            is_reading && !self.input.may_have_frame && self.codec.has_partial_frame(&self.input.bytes);
        let partial_message = self.codec.partial_message().filter(|_| is_reading);
        let is_written = self.is_written();
        let is_answered = self.replies.is_empty() && self.input.parked.is_empty();
        let expects = is_reading && is_written && (is_answered || self.shared.timeouts.heartbeat.is_some());
        let may_ping = is_serving && is_written && !self.holds_pushes();
        let watch = &mut self.watch;
        let mut now = None;
        let mut since = |waits: bool, since: Option<Instant>| {
            waits.then(|| since.unwrap_or_else(|| *now.get_or_insert_with(Instant::now)))
        };
        watch.first_frame &= is_reading && !self.input.may_have_frame;
        let known = watch.partial_message.as_deref().filter(|(known, _)| Some(*known) == partial_message);
        watch.partial_message =
            partial_message.zip(since(partial_message.is_some(), known.map(|(_, since)| *since))).map(Box::new);
        watch.frame = since(has_partial_frame, watch.frame);
        watch.stalled = since(!is_written, watch.stalled);
        watch.half_closed = since(is_serving && has_left, watch.half_closed.as_deref().copied()).map(Box::new);
        if expects && !watch.expects_input {
            watch.last_input = Instant::now();
        }
        watch.expects_input = expects;
        watch.may_ping = may_ping;
    }

    fn time_out(&mut self, due: Due) -> Progress<P> {
        match due {
            Due::Heartbeat { silent } => {
                self.watch.last_ping = Instant::now();
                if let Some(frame) = self.shared.protocol.on_idle(silent, &mut self.context) {
                    self.send_whole(frame);
                }
            }
            Due::Tick => self.tick(),
            // The peer has not read the output, so a last frame would not reach it either.
            Due::Close(timeout) if !self.lifecycle.is_serving() || !self.is_written() => {
                return Err(CloseReason::TimedOut(timeout));
            }
            Due::Close(timeout) => self.close(CloseReason::TimedOut(timeout)),
        }
        Ok(true)
    }

    /// Sets an alarm, unless an earlier one is set.
    pub(super) fn set_alarm(&mut self, at: Instant) {
        if self.alarm.is_none_or(|alarm| at < alarm) {
            self.shared.alarms.set(self.context.id(), self.alarm, at);
            self.alarm = Some(at);
        }
    }
}
