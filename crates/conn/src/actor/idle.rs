//! An idle actor: releases its buffers, checks its timeouts, and runs ticks.

use bytes::BytesMut;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::Instant;

use super::{Actor, Progress};
use crate::codec::Codec;
use crate::timeouts::AlarmAction;
use crate::{CloseReason, Protocol, Tick};

impl<P: Protocol, S: AsyncRead + AsyncWrite + Unpin> Actor<P, S> {
    /// Prepares to wait for an event: releases buffers, and sets the alarm. If an alarm has fired and a timeout, heartbeat or tick has
    /// been reached, runs it and returns true.
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
        self.update_watch();
        let Some((at, action)) = self.watch.next(&self.shared.timeouts, self.context.since(), self.context.tick_at())
        else {
            return Ok(false);
        };
        // The runtime has polled the sockets before it fired the alarm, so input that arrived in time has been read.
        if had_alarm && at <= Instant::now() {
            return self.run_action(action);
        }
        self.set_alarm(at);
        Ok(false)
    }

    /// Takes the signal of the alarm, and records it in `watch.had_alarm`.
    fn take_alarm(&mut self) {
        if self.queues.mailbox.take_alarm() {
            self.alarm = None;
            self.watch.had_alarm = true;
        }
    }

    /// Runs a tick whose time has come, on a connection that is never idle.
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

    /// Calls [`Protocol::on_tick`], and applies its result.
    fn tick(&mut self) {
        self.context.next_tick_millis = None;
        if !self.lifecycle.is_serving() {
            return;
        }
        self.context.unsent_bytes = self.batch.len();
        match self.shared.protocol.on_tick(&mut self.context) {
            Tick::Next { frame, after } => {
                self.context.tick_within(after);
                match frame {
                    Some(frame) if self.holds_pushes() => self.queues.outbox().push_tick_frame(frame),
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

    /// Updates the events that the connection waits for, and the times at which the waits began.
    fn update_watch(&mut self) {
        let is_serving = self.lifecycle.is_serving();
        let peer_has_closed = self.input.has_ended || self.codec.is_closing();
        let is_reading = self.may_read_more();
        let has_partial_frame =
            is_reading && !self.input.may_have_frame && self.codec.has_partial_frame(&self.input.bytes);
        let partial_message = self.codec.partial_message().filter(|_| is_reading);
        let is_written = self.is_written();
        let is_answered = self.replies.is_empty() && self.input.parked.is_empty();
        let expects_input = is_reading && is_written && (is_answered || self.shared.timeouts.heartbeat.is_some());
        let may_ping = is_serving && is_written && !self.holds_pushes();
        let watch = &mut self.watch;
        let mut now = None;
        let mut since = |is_waiting: bool, since: Option<Instant>| {
            is_waiting.then(|| since.unwrap_or_else(|| *now.get_or_insert_with(Instant::now)))
        };
        watch.awaits_first_frame &= is_reading && !self.input.may_have_frame;
        let known = watch.partial_message.as_deref().filter(|(known, _)| Some(*known) == partial_message);
        watch.partial_message =
            partial_message.zip(since(partial_message.is_some(), known.map(|(_, since)| *since))).map(Box::new);
        watch.frame_since = since(has_partial_frame, watch.frame_since);
        watch.stalled_since = since(!is_written, watch.stalled_since);
        watch.half_closed_since =
            since(is_serving && peer_has_closed, watch.half_closed_since.as_deref().copied()).map(Box::new);
        if expects_input && !watch.expects_input {
            watch.last_input = Instant::now();
        }
        watch.expects_input = expects_input;
        watch.may_ping = may_ping;
    }

    /// Runs an action whose time has come.
    fn run_action(&mut self, action: AlarmAction) -> Progress<P> {
        match action {
            AlarmAction::Heartbeat { silent } => {
                self.watch.last_ping = Instant::now();
                if let Some(frame) = self.shared.protocol.on_idle(silent, &mut self.context) {
                    self.send_whole(frame);
                }
            }
            AlarmAction::Tick => self.tick(),
            // The peer has not read the output, so a last frame would not reach it either.
            AlarmAction::Close(timeout) if !self.lifecycle.is_serving() || !self.is_written() => {
                return Err(CloseReason::TimedOut(timeout));
            }
            AlarmAction::Close(timeout) => self.close(CloseReason::TimedOut(timeout)),
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
