//! A connection while it is open: queued requests are written together, and replies go to their requests in order.
//!
//! At most half of the requests in flight are answered at a time. If all tasks were answered at once, all would send their next
//! request at once: client and server would take turns, each idle while the other works. With half of them, one half is on the
//! server while the tasks of the other half run. Before the actor takes new requests it yields once, so that requests of tasks
//! that were woken together are written together. With a single task it does not yield.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::BytesMut;
use tokio::io::AsyncWrite;
use tokio::time::{Instant, Sleep, sleep_until};

use super::batch::{Batch, KEPT};
use super::budget::Weight;
use super::clock::after;
use super::output::Output;
use super::queue::Shared;
use super::submission::{Reply, Submission};
use super::transport::{Entered, Stream};
use crate::stats::{Tally, Together};
use crate::{Decoder, Error, Fault, Message, Outcome, Phase, State, Value, WhileDown, encode_command};

/// With so much to write, nothing more is taken from the queue.
const ENOUGH: usize = 256 * 1024;
/// How much is read at a time, at most, unless a reply is longer.
const MOST: usize = 128 * 1024;
/// The room that is made to read to, at least.
const ROOM: usize = 16 * 1024;
/// The room that there is to be, at least.
const LEAST: usize = 1024;
/// So many are answered together, however many wait: less is not worth a write of its own.
const FEW: usize = 16;
/// The room for requests that is kept when there are none.
const FEW_KEPT: usize = 1024;
/// After so many turns other tasks have theirs.
const TURNS: usize = 32;

/// Why a connection is open no longer.
pub(super) enum End {
    Lost(Fault),
    Closed,
}

/// A connection while it is open.
pub(super) struct Serving {
    stream: Stream,
    shared: Arc<Shared>,
    decoder: Decoder,
    input: BytesMut,
    /// How much was read last.
    last_read: usize,
    output: Output,
    /// What is in the output or was sent, in order.
    awaiting: VecDeque<Awaiting>,
    /// How many of them, from the last, are not wholly written.
    unwritten: usize,
    /// What was taken from the queue, and its room when it is empty.
    taken: Batch,
    /// What was answered, and its room when it is empty.
    answered: Vec<(Reply, Value)>,
    /// When the first deadline may be.
    alarm: Option<Pin<Box<Sleep>>>,
    /// By when the server has to say something: a reply is overdue, and it was asked for a sign of life.
    probe: Option<Instant>,
    /// By when it is to have ended, if it is to.
    closing: Option<Instant>,
    /// Several ask at the same time.
    has_company: bool,
    /// It has let others go first.
    has_waited: bool,
    /// What is counted, and whether there is something to tell.
    tally: Tally,
    is_news: bool,
}

/// A request that waits for its reply.
struct Awaiting {
    request: Submission,
    /// Where it begins in the stream.
    start: u64,
    /// When it was taken from the queue; when it was written, once it is.
    since: Instant,
}

impl Awaiting {
    fn end(&self) -> u64 {
        self.start + self.request.len as u64
    }
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
            last_read: 0,
            output: Output::default(),
            awaiting: VecDeque::new(),
            unwritten: 0,
            taken: Batch::default(),
            answered: Vec::new(),
            alarm: None,
            probe: None,
            closing: None,
            has_company: false,
            has_waited: false,
            tally,
            is_news: false,
        }
    }

    /// Serves until the connection is lost or closed. All that was asked has ended then, but for what may be sent on another one.
    pub(super) async fn run(mut self) -> End {
        // What came with the last word of the handshake is nobody's reply.
        let ended = match self.dispatch() {
            Ok(_) => std::future::poll_fn(|context| self.poll(context)).await,
            Err(fault) => Err(fault),
        };
        // What has come is given, also when nothing more can be written.
        while let Ok(1..) = self.dispatch() {}
        self.is_news = true;
        self.publish();
        match ended {
            Ok(()) => {
                self.end_all(|_, outcome| Error::Closed { outcome });
                // It has been told all that it was to be told.
                let _ = std::future::poll_fn(|context| Pin::new(&mut self.stream).poll_shutdown(context)).await;
                End::Closed
            }
            Err(fault) => {
                let unsent = self.unsent();
                self.end_all(|index, outcome| match &fault {
                    // It is the reply to the oldest that cannot be read.
                    Fault::Protocol(error) if index == 0 => Error::Protocol(*error),
                    fault => Error::Lost { outcome, source: fault.clone() },
                });
                self.refuse_or_keep(unsent, &fault);
                End::Lost(fault)
            }
        }
    }

    /// Ends all that waits for replies.
    fn end_all(&mut self, error: impl Fn(usize, Outcome) -> Error) {
        let written = self.output.written();
        for (index, waiting) in std::mem::take(&mut self.awaiting).into_iter().enumerate() {
            let outcome = if waiting.start < written { Outcome::MaybeExecuted } else { Outcome::NeverSent };
            self.shared.end(waiting.request, error(index, outcome));
        }
    }

    /// The connection is lost, and this was not sent: it is told so, or waits for the next one.
    fn refuse_or_keep(&self, mut unsent: Batch, fault: &Fault) {
        let keeps = self.shared.options.while_down == WhileDown::Queue && self.shared.options.reconnect;
        // What was asked by ourselves is of no use on another connection.
        for request in unsent.take_out(|request| keeps && request.is_wanted()) {
            self.shared.end(request, Error::Lost { outcome: Outcome::NeverSent, source: fault.clone() });
        }
        self.shared.put_back(unsent);
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Fault>> {
        for _ in 0..TURNS {
            // Whoever asks first wakes the actor, which would run before others have asked that were answered together with them. So
            // they are let go first, and all that they ask is written together.
            let is_time = std::mem::take(&mut self.has_waited) || !self.has_company;
            if is_time {
                self.write(context)?;
                self.gather(context);
                self.write(context)?;
                if self.closing.is_some() && self.awaiting.is_empty() && self.output.is_empty() {
                    return Poll::Ready(Ok(()));
                }
            }
            match self.read(context)? {
                // The rest of the replies is read after what is asked now was written: the server has something to do meanwhile.
                Some(1..) if self.has_company => break,
                Some(_) => {}
                None if is_time => return self.rest(context),
                None => break,
            }
        }
        self.has_waited = true;
        // There may be no rest for long, and deadlines are kept nevertheless.
        context.waker().wake_by_ref();
        self.rest(context)
    }

    /// Takes what is queued, and not too much of it.
    fn gather(&mut self, context: &Context<'_>) {
        let wants_more = self.output.unwritten().len() < ENOUGH;
        let look = self.shared.look(wants_more.then_some(&mut self.taken), context);
        if let Some(by) = look.closing {
            if self.closing.is_none() {
                self.shared.enter(State::Closing);
            }
            self.closing = look.closing;
            self.wake_by(by);
        }
        if let Some(first) = look.first {
            self.wake_by(first);
        }
        if look.is_to_sweep && self.shared.sweep() {
            self.drop_unsent(|request| request.is_wanted() || request.reply.is_none());
        }
        if self.taken.requests.is_empty() {
            return;
        }
        // One look at the clock for all that is taken together.
        let now = Instant::now();
        for request in self.taken.take_out(|request| request.deadline > now && request.is_wanted()) {
            self.shared.time_out(request, Phase::Queued);
        }
        self.has_company = self.taken.requests.len() > 1;
        self.is_news = true;
        for request in &self.taken.requests {
            self.tally.queue_latency.record(now.saturating_duration_since(request.submitted));
        }
        if let Some(first) = self.taken.first_deadline() {
            self.wake_by(first);
        }
        let mut taken = std::mem::take(&mut self.taken);
        self.enlist(&mut taken, now);
        self.taken = taken;
    }

    /// Puts requests into the output, and empties the batch.
    fn enlist(&mut self, batch: &mut Batch, now: Instant) {
        let mut start = self.output.end();
        self.output.put(&mut batch.bytes);
        self.unwritten += batch.requests.len();
        for request in batch.requests.drain(..) {
            let len = request.len as u64;
            self.awaiting.push_back(Awaiting { request, start, since: now });
            start += len;
        }
    }

    /// The first of which nothing was written.
    fn first_unsent(&self) -> usize {
        let written = self.output.written();
        self.awaiting.partition_point(|waiting| waiting.start < written)
    }

    /// Takes back what is in the output and of which nothing was written.
    fn unsent(&mut self) -> Batch {
        let first = self.first_unsent();
        let start = self.awaiting.get(first).map_or(self.output.end(), |waiting| waiting.start);
        let requests: VecDeque<_> = self.awaiting.drain(first..).map(|waiting| waiting.request).collect();
        self.unwritten -= requests.len();
        Batch { requests, bytes: self.output.cut(start) }
    }

    /// Takes those out of the output that are not to stay and of which nothing was written.
    fn drop_unsent(&mut self, stays: impl Fn(&Submission) -> bool) {
        if self.awaiting.range(self.first_unsent()..).all(|waiting| stays(&waiting.request)) {
            return;
        }
        let mut unsent = self.unsent();
        for request in unsent.take_out(stays) {
            self.shared.time_out(request, Phase::Queued);
        }
        self.enlist(&mut unsent, Instant::now());
    }

    /// Looks at deadlines then, if not before.
    fn wake_by(&mut self, deadline: Instant) {
        if self.alarm.as_ref().is_none_or(|alarm| alarm.deadline() > deadline) {
            self.alarm = Some(Box::pin(sleep_until(deadline)));
        }
    }

    /// Writes until all is written or the socket takes no more.
    fn write(&mut self, context: &mut Context<'_>) -> Result<(), Fault> {
        while !self.output.is_empty() {
            match Pin::new(&mut self.stream).poll_write(context, self.output.unwritten()) {
                Poll::Pending => break,
                Poll::Ready(Ok(0)) => return Err(io::Error::from(io::ErrorKind::WriteZero).into()),
                Poll::Ready(Ok(count)) => {
                    self.output.flush(count);
                    self.tally.bytes_out += count as u64;
                    self.is_news = true;
                    self.note_written();
                }
                Poll::Ready(Err(error)) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// From now on, what is wholly written waits for the server.
    fn note_written(&mut self) {
        let (written, now) = (self.output.written(), Instant::now());
        let (first, mut together) = (self.awaiting.len() - self.unwritten, Together::default());
        for waiting in self.awaiting.range_mut(first..).take_while(|waiting| waiting.end() <= written) {
            if !waiting.request.is_ours() {
                self.tally.requests += 1;
                together.add(waiting.since, now, &mut self.tally.write_latency);
            }
            waiting.since = now;
            self.unwritten -= 1;
        }
        together.end(now, &mut self.tally.write_latency);
    }

    /// Reads once, unless replies are left from the last time. Returns how many requests were answered, or nothing if there is
    /// nothing to read.
    fn read(&mut self, context: &mut Context<'_>) -> Result<Option<usize>, Fault> {
        if !self.input.is_empty() {
            let answered = self.dispatch()?;
            if answered > 0 {
                return Ok(Some(answered));
            }
        }
        self.make_room();
        match tokio_util::io::poll_read_buf(Pin::new(&mut self.stream), context, &mut self.input) {
            Poll::Pending => Ok(None),
            Poll::Ready(Ok(0)) => Err(Fault::EndOfStream),
            Poll::Ready(Ok(count)) => {
                self.last_read = count;
                self.tally.bytes_in += count as u64;
                self.is_news = true;
                self.probe = None;
                self.dispatch().map(Some)
            }
            Poll::Ready(Err(error)) => Err(error.into()),
        }
    }

    /// Makes room to read to, for twice of what came last. What was made for a large reply is not kept for ever.
    fn make_room(&mut self) {
        let wanted = (2 * self.last_read).clamp(LEAST, MOST);
        if self.input.capacity() - self.input.len() >= wanted {
            return;
        }
        let is_fresh = self.input.is_empty();
        self.input.reserve(wanted.max(ROOM));
        if is_fresh && self.input.capacity() > KEPT && !self.decoder.is_midway(&self.input) {
            self.input = BytesMut::with_capacity(wanted.max(ROOM));
        }
    }

    /// Gives each reply to whoever it is for. Returns how many requests were answered.
    ///
    /// Where many wait, it is half of them at most: what these ask next is written before the other half is answered, and so the
    /// server always has something to do while their tasks run, and they while it does.
    fn dispatch(&mut self) -> Result<usize, Fault> {
        let most = (self.awaiting.len() / 2).max(FEW);
        let (mut freed, mut together, now) = (Weight::default(), Together::default(), Instant::now());
        let decoded = self.decode(most, |waiting, tally| {
            freed += waiting.request.weight;
            if !waiting.request.is_ours() {
                together.add(waiting.since, now, &mut tally.reply_latency);
            }
        });
        together.end(now, &mut self.tally.reply_latency);
        // Before the replies: whoever has one may ask again at once, and finds the room.
        self.shared.give_back(freed);
        let count = self.answered.len();
        self.has_company |= count > 1;
        for (reply, value) in self.answered.drain(..) {
            reply.answer(value);
        }
        decoded.map(|()| count)
    }

    /// Finds out whom each reply is for, of so many at most.
    fn decode(&mut self, most: usize, mut end: impl FnMut(&Awaiting, &mut Tally)) -> Result<(), Fault> {
        let written = self.output.written();
        while self.answered.len() < most
            && let Some(message) = self.decoder.decode(&mut self.input)?
        {
            let Message::Reply(value) = message else {
                self.tally.pushes += 1;
                continue;
            };
            self.tally.replies += 1;
            let asked = self.awaiting.front_mut().filter(|first| first.start < written);
            let Some(waiting) = asked else { return Err(Fault::StrayReply) };
            let request = &mut waiting.request;
            request.left -= 1;
            if request.left > 0 {
                if let Some(reply) = &mut request.reply {
                    reply.keep(value);
                }
                continue;
            }
            if let Some(reply) = request.reply.take() {
                self.answered.push((reply, value));
            }
            end(waiting, &mut self.tally);
            self.awaiting.pop_front();
            // It may be that the server does not wait for the end of a request.
            self.unwritten = self.unwritten.min(self.awaiting.len());
        }
        Ok(())
    }

    /// Tells what was counted.
    fn publish(&mut self) {
        if std::mem::take(&mut self.is_news) {
            *self.shared.tally() = self.tally;
        }
    }

    /// Nothing moves: looks at deadlines, and waits.
    fn rest(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Fault>> {
        self.publish();
        if self.awaiting.is_empty() && self.awaiting.capacity() > FEW_KEPT {
            // After a flood.
            self.awaiting.shrink_to(FEW_KEPT);
            self.taken.requests.shrink_to(FEW_KEPT);
            self.answered.shrink_to(FEW_KEPT);
        }
        loop {
            let Some(alarm) = &mut self.alarm else { return Poll::Pending };
            ready!(alarm.as_mut().poll(context));
            let now = Instant::now();
            if self.closing.is_some_and(|by| by <= now) {
                return Poll::Ready(Ok(()));
            }
            if self.probe.is_some_and(|probe| probe <= now) {
                return Poll::Ready(Err(Fault::Silent));
            }
            if self.expire(now) {
                // What it asks for is written in another turn.
                context.waker().wake_by_ref();
            }
        }
    }

    /// Ends what has taken too long. What was sent still has its replies to come, which are nobody's; what was not is not sent any
    /// more. Returns whether the server is asked for a sign of life, because a reply is overdue.
    fn expire(&mut self, now: Instant) -> bool {
        let queued = self.shared.expire(now, Phase::Queued);
        self.drop_unsent(|request| request.deadline > now);
        let written = self.output.written();
        let mut is_overdue = false;
        for waiting in &mut self.awaiting {
            if waiting.request.deadline > now {
                continue;
            }
            let phase = if waiting.end() <= written { Phase::Waiting } else { Phase::Writing };
            if let Some(reply) = waiting.request.reply.take() {
                is_overdue = true;
                self.shared.count(|stats| stats.timeouts.count(phase));
                reply.fail(Error::TimedOut { phase });
            }
        }
        let asks = is_overdue && self.probe.is_none();
        if asks {
            self.probe = Some(after(self.shared.options.connect_timeout));
            self.enlist(&mut ping(now), now);
        }
        let deadlines = self.awaiting.iter().filter(|waiting| waiting.request.reply.is_some());
        let next = deadlines.map(|waiting| waiting.request.deadline).min();
        let next = [next, queued, self.probe, self.closing].into_iter().flatten().min();
        self.alarm = next.map(|next| Box::pin(sleep_until(next)));
        asks
    }
}

/// However it ends, also with its task: nobody waits for replies that will not come, and their room is given back.
impl Drop for Serving {
    fn drop(&mut self) {
        self.end_all(|_, outcome| Error::Closed { outcome });
    }
}

/// A question for which nobody waits but ourselves.
fn ping(now: Instant) -> Batch {
    let mut bytes = Vec::new();
    encode_command(&["PING"], &mut bytes);
    let deadline = after(std::time::Duration::MAX);
    let request =
        Submission { len: bytes.len(), left: 1, weight: Weight::default(), submitted: now, deadline, reply: None };
    Batch { requests: VecDeque::from([request]), bytes }
}
