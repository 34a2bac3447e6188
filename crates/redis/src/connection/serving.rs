//! One connection while it is open: what is queued is written in one go, replies go to who waits for them, in order.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Buf, BytesMut};
use tokio::io::AsyncWrite;
use tokio::time::{Instant, Sleep, sleep_until};

use super::clock::after;
use super::queue::Shared;
use super::submission::{Submission, befallen};
use super::transport::{Entered, Stream, lost};
use crate::stats::Tally;
use crate::{Decoder, Error, Fault, Message, Outcome, Phase, State, WhileDown, encode_command};

/// How much is gathered before it is written.
const BATCH: usize = 256 * 1024;
/// The bytes of a `PING`.
const PING: usize = "*1\r\n$4\r\nPING\r\n".len();
/// How much is read at a time, at least.
const READ: usize = 16 * 1024;
/// After so many turns other tasks have theirs.
const TURNS: usize = 32;

/// Why a connection is open no longer.
pub(super) enum End {
    Lost(Error),
    Closed,
}

/// A connection while it is open.
pub(super) struct Serving {
    stream: Stream,
    shared: Arc<Shared>,
    decoder: Decoder,
    input: BytesMut,
    output: BytesMut,
    /// What was taken from the queue and did not fit into the output.
    next: VecDeque<Submission>,
    /// What is in the output or was sent, in order.
    awaiting: VecDeque<Awaiting>,
    /// How many bytes were put into the output, and how many of them were written.
    gathered: u64,
    written: u64,
    /// When the first deadline may be.
    alarm: Option<Pin<Box<Sleep>>>,
    /// By when the server has to say something: a reply is overdue, and it was asked for a sign of life.
    probe: Option<Instant>,
    is_closing: bool,
    /// It has let others go first.
    has_waited: bool,
    /// What is counted, and whether there is something to tell.
    tally: Tally,
    is_news: bool,
}

/// A request that waits for its reply.
struct Awaiting {
    request: Option<Submission>,
    /// How many replies it has still to get, if nobody waits for them any more.
    swallow: usize,
    /// Where it begins in the stream.
    start: u64,
    /// When it was taken from the queue.
    taken: Instant,
}

impl Serving {
    pub(super) fn new(entered: Entered, shared: Arc<Shared>) -> Self {
        let Entered { stream, input, decoder } = entered;
        let tally = *shared.tally();
        Self {
            stream,
            shared,
            decoder,
            input,
            output: BytesMut::new(),
            next: VecDeque::new(),
            awaiting: VecDeque::new(),
            gathered: 0,
            written: 0,
            alarm: None,
            probe: None,
            is_closing: false,
            has_waited: false,
            tally,
            is_news: false,
        }
    }

    /// Serves until the connection is lost or closed. All that was asked has ended then, but for what may be sent on another one.
    pub(super) async fn run(mut self) -> End {
        // What came with the last word of the handshake is nobody's reply.
        let ended = match self.dispatch() {
            Ok(()) => std::future::poll_fn(|context| self.poll(context)).await,
            Err(error) => Err(error),
        };
        self.is_news = true;
        self.publish(0);
        match ended {
            Ok(()) => {
                for waiting in std::mem::take(&mut self.awaiting) {
                    if let Some(request) = waiting.request {
                        let outcome = outcome(waiting.start, self.written);
                        request.close(outcome);
                    }
                }
                for request in std::mem::take(&mut self.next) {
                    request.close(Outcome::NeverSent);
                }
                // It has been told all that it was to be told.
                let _ = std::future::poll_fn(|context| Pin::new(&mut self.stream).poll_shutdown(context)).await;
                End::Closed
            }
            Err(error) => {
                self.fail(&error);
                End::Lost(error)
            }
        }
    }

    /// The connection is lost: whoever waits is told what may have become of their request.
    fn fail(&mut self, error: &Error) {
        let keeps = self.shared.options.while_down == WhileDown::Queue && self.shared.options.reconnect;
        let mut unsent = VecDeque::new();
        for (index, waiting) in std::mem::take(&mut self.awaiting).into_iter().enumerate() {
            let Some(request) = waiting.request else { continue };
            let outcome = outcome(waiting.start, self.written);
            if outcome == Outcome::NeverSent && keeps {
                unsent.push_back(request);
            } else if index == 0 && outcome == Outcome::MaybeExecuted && matches!(error, Error::Protocol(_)) {
                // It is the reply to this one that cannot be read.
                request.fail(error.clone());
            } else {
                request.fail(befallen(error, outcome));
            }
        }
        unsent.append(&mut self.next);
        if keeps {
            self.shared.put_back(unsent);
        } else {
            for request in unsent {
                request.fail(befallen(error, Outcome::NeverSent));
            }
        }
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Error>> {
        // Whoever queues first wakes the actor, which would run before the others that were woken with it have queued as well. So
        // they are let go first, and all that they ask is written together.
        if self.shared.has_news() && !std::mem::replace(&mut self.has_waited, true) {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        self.has_waited = false;
        for _ in 0..TURNS {
            self.shared.register(context.waker());
            self.gather();
            let mut progress = self.write(context)?;
            progress |= self.read(context)?;
            if self.is_closing {
                let is_done = self.awaiting.is_empty() && self.next.is_empty() && self.output.is_empty();
                let is_late = self.shared.closing().is_some_and(|by| by <= Instant::now());
                if is_done || is_late {
                    return Poll::Ready(Ok(()));
                }
            }
            if !progress {
                return self.rest(context);
            }
        }
        // There may be no rest for long, and deadlines are kept nevertheless.
        context.waker().wake_by_ref();
        self.rest(context)
    }

    /// Takes what is queued.
    fn gather(&mut self) {
        if let Some(by) = self.shared.closing() {
            if !self.is_closing {
                self.is_closing = true;
                self.shared.enter(State::Closing);
            }
            self.wake_by(by);
        }
        if self.next.is_empty() {
            self.shared.take_into(&mut self.next);
            self.is_news |= !self.next.is_empty();
        } else {
            let mut taken = self.shared.take();
            self.is_news |= !taken.is_empty();
            self.next.append(&mut taken);
        }
        // One look at the clock for all that is taken together.
        let mut now = None;
        while self.output.len() < BATCH
            && let Some(request) = self.next.pop_front()
        {
            if request.is_abandoned() {
                continue;
            }
            let now = *now.get_or_insert_with(Instant::now);
            self.tally.requests += 1;
            self.tally.queue_latency.record(now.saturating_duration_since(request.submitted));
            self.wake_by(request.deadline);
            self.output.extend_from_slice(&request.bytes);
            let start = self.gathered;
            self.gathered += request.bytes.len() as u64;
            self.awaiting.push_back(Awaiting { request: Some(request), swallow: 0, start, taken: now });
        }
    }

    /// Looks at deadlines then, if not before.
    fn wake_by(&mut self, deadline: Instant) {
        if self.alarm.as_ref().is_none_or(|alarm| alarm.deadline() > deadline) {
            self.alarm = Some(Box::pin(sleep_until(deadline)));
        }
    }

    fn write(&mut self, context: &mut Context<'_>) -> Result<bool, Error> {
        let mut progress = false;
        while !self.output.is_empty() {
            match Pin::new(&mut self.stream).poll_write(context, &self.output) {
                Poll::Pending => break,
                Poll::Ready(Ok(0)) => return Err(lost(io::Error::from(io::ErrorKind::WriteZero))),
                Poll::Ready(Ok(count)) => {
                    self.output.advance(count);
                    self.written += count as u64;
                    self.tally.bytes_out += count as u64;
                    self.is_news = true;
                    progress = true;
                }
                Poll::Ready(Err(error)) => return Err(lost(error)),
            }
        }
        Ok(progress)
    }

    fn read(&mut self, context: &mut Context<'_>) -> Result<bool, Error> {
        self.input.reserve(READ);
        match tokio_util::io::poll_read_buf(Pin::new(&mut self.stream), context, &mut self.input) {
            Poll::Pending => Ok(false),
            Poll::Ready(Ok(0)) => Err(lost(Fault::EndOfStream)),
            Poll::Ready(Ok(count)) => {
                self.tally.bytes_in += count as u64;
                self.is_news = true;
                self.probe = None;
                self.dispatch()?;
                Ok(true)
            }
            Poll::Ready(Err(error)) => Err(lost(error)),
        }
    }

    /// Gives each reply to whoever it is for.
    fn dispatch(&mut self) -> Result<(), Error> {
        let mut now = None;
        while let Some(message) = self.decoder.decode(&mut self.input)? {
            let Message::Reply(value) = message else {
                self.tally.pushes += 1;
                continue;
            };
            self.tally.replies += 1;
            let asked = self.awaiting.front_mut().filter(|first| first.start < self.written);
            let Some(first) = asked else {
                return Err(lost(Fault::StrayReply));
            };
            let is_over = if let Some(request) = first.request.take() {
                first.request = request.answer(value);
                if first.request.is_none() {
                    let now = *now.get_or_insert_with(Instant::now);
                    self.tally.reply_latency.record(now.saturating_duration_since(first.taken));
                }
                first.request.is_none()
            } else {
                first.swallow -= 1;
                first.swallow == 0
            };
            if is_over {
                self.awaiting.pop_front();
            }
        }
        Ok(())
    }

    /// Tells what was counted.
    fn publish(&mut self, next: usize) {
        if std::mem::take(&mut self.is_news) {
            self.tally.next = next;
            *self.shared.tally() = self.tally;
        }
    }

    /// Nothing moves: looks at deadlines, and waits.
    fn rest(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Error>> {
        self.publish(self.next.len());
        loop {
            let Some(alarm) = &mut self.alarm else { return Poll::Pending };
            ready!(alarm.as_mut().poll(context));
            let now = Instant::now();
            if self.shared.closing().is_some_and(|by| by <= now) {
                return Poll::Ready(Ok(()));
            }
            if self.probe.is_some_and(|probe| probe <= now) {
                return Poll::Ready(Err(lost(Fault::Silent)));
            }
            if self.expire(now) {
                // What it asks for is written in another turn.
                context.waker().wake_by_ref();
            }
        }
    }

    /// Ends what has taken too long. Its replies are still to come, and are nobody's. Returns whether the server is asked for a
    /// sign of life, because a reply is overdue.
    fn expire(&mut self, now: Instant) -> bool {
        let mut next = None::<Instant>;
        let mut is_overdue = false;
        for waiting in &mut self.awaiting {
            let Some(request) = waiting.request.take_if(|request| request.deadline <= now) else {
                if let Some(request) = &waiting.request {
                    next = Some(next.map_or(request.deadline, |next| next.min(request.deadline)));
                }
                continue;
            };
            waiting.swallow = request.left();
            let is_sent = waiting.start < self.written;
            is_overdue |= is_sent;
            self.shared.time_out(request, if is_sent { Phase::Waiting } else { Phase::Writing });
        }
        for request in std::mem::take(&mut self.next) {
            if request.deadline <= now {
                self.shared.time_out(request, Phase::Queued);
            } else {
                next = Some(next.map_or(request.deadline, |next| next.min(request.deadline)));
                self.next.push_back(request);
            }
        }
        let asks = is_overdue && self.probe.is_none();
        if asks {
            self.probe = Some(after(self.shared.options.connect_timeout));
            encode_command(&["PING"], &mut self.output);
            self.awaiting.push_back(Awaiting { request: None, swallow: 1, start: self.gathered, taken: now });
            self.gathered += PING as u64;
        }
        let next = [next, self.probe, self.shared.closing()].into_iter().flatten().min();
        self.alarm = next.map(|next| Box::pin(sleep_until(next)));
        asks
    }
}

/// What may have become of a request that begins there.
fn outcome(start: u64, written: u64) -> Outcome {
    if start < written { Outcome::MaybeExecuted } else { Outcome::NeverSent }
}
