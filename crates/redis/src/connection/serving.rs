//! An open connection: pending requests are written together, and replies go to their requests in order.
//!
//! At most half of the requests in flight are answered at a time. If all callers were answered at once, all would send their next
//! request at once: client and server would take turns, each idle while the other works. With half of them, one half is on the
//! server while the tasks of the other half run. Before the actor takes new requests it yields once, so that requests of tasks
//! that were woken together are written together. With a single task it does not yield.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::BytesMut;
use tokio::io::AsyncWrite;
use tokio::time::{Instant, Sleep, sleep_until};

use super::batch::{Batch, MAX_IDLE_BUFFER_BYTES};
use super::clock::{after, later};
use super::gate::Permit;
use super::output::Output;
use super::request::{PendingRequest, ReplySender};
use super::shared::ConnectionShared;
use super::status::ConnectionState;
use super::transport::{Established, Stream};
use crate::observe::{ConnectionStats, LatencyGroup};
use crate::resp::{Decoder, Message, encode_command};
use crate::{ConnectionError, Error, RequestOutcome, RequestPhase, Value, WhileDown};

/// With more unwritten bytes than this, no requests are taken from the queue.
const MAX_UNWRITTEN_BYTES: usize = 256 * 1024;
/// Limit of one read, unless a reply is longer.
const MAX_READ_BYTES: usize = 128 * 1024;
/// Minimum capacity that is allocated for the input.
const MIN_INPUT_BYTES: usize = 16 * 1024;
/// Minimum free capacity of the input before a read.
const MIN_READ_BYTES: usize = 1024;
/// Requests that are answered together, even if they are more than half of those in flight. Fewer are not worth a write.
const MIN_ANSWERED: usize = 16;
/// The capacity for requests that is kept while the connection is idle.
const MAX_IDLE_REQUESTS: usize = 1024;
/// Maximum iterations per poll before the actor yields.
const MAX_TURNS: usize = 32;

/// Why an open connection has ended.
pub(super) enum ServingEnd {
    Lost(ConnectionError),
    Closed,
}

/// An open connection.
#[expect(clippy::struct_excessive_bools, reason = "they are independent facts")]
pub(super) struct Serving {
    stream: Stream,
    shared: Arc<ConnectionShared>,
    decoder: Decoder,
    input: BytesMut,
    /// The length of the last read.
    last_read: usize,
    output: Output,
    /// The requests in the output or on the wire, in order.
    in_flight: VecDeque<InFlight>,
    /// The number of requests at the end of `in_flight` that are not completely written.
    unwritten: usize,
    /// The requests taken from the queue. Empty between polls; kept to reuse its allocation.
    taken: Batch,
    /// The requests whose last reply has come. Empty between polls, for its capacity.
    answered: Vec<(ReplySender, Value)>,
    /// Fires at the earliest deadline, or before it.
    timer: Option<Pin<Box<Sleep>>>,
    /// When the server must have sent something: a reply is overdue, and a probe was sent.
    probe_deadline: Option<Instant>,
    /// When the connection must have ended, if it is closing.
    closing: Option<Instant>,
    /// Whether the connection stays open until then.
    is_held: bool,
    /// Whether several tasks use the connection at the same time.
    is_busy: bool,
    /// Whether the actor has yielded since it last took requests.
    has_yielded: bool,
    stats: ConnectionStats,
    /// Whether `stats` have changed since they were published.
    has_new_stats: bool,
}

/// A request in the output or on the wire.
struct InFlight {
    request: PendingRequest,
    /// The position of its first byte in the output.
    start: u64,
    /// When it was taken from the queue, or when it was written, once it is.
    since: Instant,
}

impl InFlight {
    fn end(&self) -> u64 {
        self.start + self.request.len as u64
    }
}

impl Serving {
    pub(super) fn new(established: Established, shared: Arc<ConnectionShared>) -> Self {
        let Established { stream, input, decoder, .. } = established;
        let stats = shared.counters.connection();
        Self {
            stream,
            shared,
            decoder,
            input,
            last_read: 0,
            output: Output::default(),
            in_flight: VecDeque::new(),
            unwritten: 0,
            taken: Batch::default(),
            answered: Vec::new(),
            timer: None,
            probe_deadline: None,
            closing: None,
            is_held: false,
            is_busy: false,
            has_yielded: false,
            stats,
            has_new_stats: false,
        }
    }

    /// Serves until the connection is lost or closed. All requests taken from the queue have ended then, or have returned to it
    /// because another connection may send them.
    pub(super) async fn run(mut self) -> ServingEnd {
        // A reply after those of the handshake belongs to no request.
        let ended = match self.deliver() {
            Ok(_) => std::future::poll_fn(|context| self.poll(context)).await,
            Err(error) => Err(error),
        };
        self.close_cache();
        // Replies that were read are delivered, even if the socket has failed.
        while let Ok(1..) = self.deliver() {}
        self.has_new_stats = true;
        self.publish_stats();
        match ended {
            Ok(()) => {
                self.fail_all(|_, outcome| Error::Closed { outcome });
                // Nothing is lost if it fails: all requests have ended. It is tried once, because TLS would wait for the socket.
                let _ = std::future::poll_fn(|context| Poll::Ready(Pin::new(&mut self.stream).poll_shutdown(context)))
                    .await;
                ServingEnd::Closed
            }
            Err(lost) => {
                let unsent = self.take_unsent();
                self.fail_all(|index, outcome| match &lost {
                    // The reply that cannot be decoded belongs to the oldest request.
                    ConnectionError::Protocol(error) if index == 0 => Error::Protocol(*error),
                    lost => Error::Lost { outcome, source: lost.clone() },
                });
                self.requeue_or_fail(unsent, &lost);
                ServingEnd::Lost(lost)
            }
        }
    }

    /// Empties the cache, before a caller can know that the connection has ended.
    fn close_cache(&self) {
        if let Some(cache) = &self.shared.cache {
            cache.close();
        }
    }

    /// Ends all requests in flight. The error is made from the index of the request and its outcome.
    fn fail_all(&mut self, error: impl Fn(usize, RequestOutcome) -> Error) {
        let written = self.output.written();
        for (index, sent) in std::mem::take(&mut self.in_flight).into_iter().enumerate() {
            let outcome = if sent.start < written { RequestOutcome::MaybeExecuted } else { RequestOutcome::NeverSent };
            self.shared.fail(sent.request, error(index, outcome));
        }
    }

    /// Returns unsent requests to the queue, if they may wait for the next connection, and fails the others.
    fn requeue_or_fail(&self, mut unsent: Batch, lost: &ConnectionError) {
        let requeues = self.shared.options.while_down == WhileDown::Queue && self.shared.options.reconnect;
        for request in unsent.remove(|request| !requeues || !request.has_caller()) {
            self.shared.fail(request, Error::Lost { outcome: RequestOutcome::NeverSent, source: lost.clone() });
        }
        self.shared.queue.put_back(unsent);
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<(), ConnectionError>> {
        for _ in 0..MAX_TURNS {
            // The first of the tasks that were answered together wakes the actor. The actor lets the others run before it takes
            // their requests, and writes all of them together.
            let is_turn = std::mem::take(&mut self.has_yielded) || !self.is_busy;
            if is_turn {
                self.write(context)?;
                self.take_pending(context);
                self.write(context)?;
                if self.closing.is_some() && !self.is_held && self.in_flight.is_empty() && self.output.is_empty() {
                    return Poll::Ready(Ok(()));
                }
            }
            match self.read(context)? {
                // The other replies are delivered after the next write, so that the server has work meanwhile.
                Some(1..) if self.is_busy => break,
                Some(_) => {}
                None if is_turn => return self.wait(context),
                None => break,
            }
        }
        self.has_yielded = true;
        context.waker().wake_by_ref();
        // Check deadlines even under constant load.
        self.wait(context)
    }

    /// Takes the pending requests, unless enough bytes are unwritten.
    fn take_pending(&mut self, context: &Context<'_>) {
        let takes_more = self.output.unwritten().len() < MAX_UNWRITTEN_BYTES;
        let signals = self.shared.queue.poll_take(takes_more.then_some(&mut self.taken), context);
        self.is_held = signals.is_held;
        if let Some(deadline) = signals.closing {
            if self.closing.is_none() {
                self.shared.status.set_state(ConnectionState::Closing);
            }
            self.closing = signals.closing;
            self.wake_by(deadline);
        }
        if let Some(deadline) = signals.earliest_deadline {
            self.wake_by(deadline);
        }
        if signals.should_reclaim && self.shared.queue.reclaim() {
            self.remove_unsent(|request| !request.has_caller() && request.reply.is_some());
        }
        if self.taken.requests.is_empty() {
            return;
        }
        // Read the clock once for all requests.
        let now = Instant::now();
        for request in self.taken.remove(|request| request.deadline <= now || !request.has_caller()) {
            self.shared.time_out(request, RequestPhase::Queued);
        }
        self.is_busy = self.taken.requests.len() > 1;
        self.has_new_stats = true;
        for request in &self.taken.requests {
            self.stats.queue_latency.record(now.saturating_duration_since(request.submitted));
        }
        if let Some(deadline) = self.taken.earliest_deadline() {
            self.wake_by(deadline);
        }
        let mut taken = std::mem::take(&mut self.taken);
        self.send(&mut taken, now);
        self.taken = taken;
    }

    /// Moves the requests of a batch to the output.
    fn send(&mut self, batch: &mut Batch, now: Instant) {
        let mut start = self.output.end();
        self.output.put(&mut batch.bytes);
        self.unwritten += batch.requests.len();
        for request in batch.requests.drain(..) {
            let len = request.len as u64;
            self.in_flight.push_back(InFlight { request, start, since: now });
            start += len;
        }
    }

    /// Returns the index of the first request of which no byte was written.
    fn first_unsent(&self) -> usize {
        let written = self.output.written();
        self.in_flight.partition_point(|sent| sent.start < written)
    }

    /// Takes the requests of which no byte was written back out of the output.
    fn take_unsent(&mut self) -> Batch {
        let first = self.first_unsent();
        let start = self.in_flight.get(first).map_or(self.output.end(), |unsent| unsent.start);
        let requests: VecDeque<_> = self.in_flight.drain(first..).map(|unsent| unsent.request).collect();
        self.unwritten -= requests.len();
        Batch { requests, bytes: self.output.cut(start) }
    }

    /// Removes the requests for which the predicate holds and of which no byte was written.
    fn remove_unsent(&mut self, is_removed: impl Fn(&PendingRequest) -> bool) {
        if !self.in_flight.range(self.first_unsent()..).any(|unsent| is_removed(&unsent.request)) {
            return;
        }
        let mut unsent = self.take_unsent();
        for request in unsent.remove(is_removed) {
            self.shared.time_out(request, RequestPhase::Queued);
        }
        self.send(&mut unsent, Instant::now());
    }

    /// Sets the timer to this deadline, unless it already fires earlier.
    fn wake_by(&mut self, deadline: Instant) {
        if self.timer.as_ref().is_none_or(|timer| timer.deadline() > deadline) {
            self.timer = Some(Box::pin(sleep_until(deadline)));
        }
    }

    /// Writes until all bytes are written or the socket is full.
    fn write(&mut self, context: &mut Context<'_>) -> Result<(), ConnectionError> {
        while !self.output.is_empty() {
            match Pin::new(&mut self.stream).poll_write(context, self.output.unwritten()) {
                Poll::Pending => break,
                Poll::Ready(Ok(0)) => return Err(io::Error::from(io::ErrorKind::WriteZero).into()),
                Poll::Ready(Ok(count)) => {
                    self.output.flush(count);
                    self.stats.bytes_out += count as u64;
                    self.has_new_stats = true;
                    self.note_written();
                }
                Poll::Ready(Err(error)) => {
                    self.output.flush(self.stream.sent_by_failed_write(self.output.unwritten().len()));
                    return Err(error.into());
                }
            }
        }
        // TLS may have bytes that the socket has not taken yet.
        if let Poll::Ready(Err(error)) = Pin::new(&mut self.stream).poll_flush(context) {
            return Err(error.into());
        }
        Ok(())
    }

    /// Counts the requests that have been written completely.
    fn note_written(&mut self) {
        let (written, now) = (self.output.written(), Instant::now());
        let (first, mut latencies) = (self.in_flight.len() - self.unwritten, LatencyGroup::default());
        for sent in self.in_flight.range_mut(first..).take_while(|sent| sent.end() <= written) {
            if !sent.request.is_own() {
                self.stats.requests += 1;
                latencies.add(sent.since, now, &mut self.stats.write_latency);
            }
            sent.since = now;
            self.unwritten -= 1;
        }
        latencies.finish(now, &mut self.stats.write_latency);
    }

    /// Delivers replies that were read before, or else reads once. Returns the number of requests answered, or `None` if there is
    /// nothing to read.
    fn read(&mut self, context: &mut Context<'_>) -> Result<Option<usize>, ConnectionError> {
        if !self.input.is_empty() {
            let answered = self.deliver()?;
            if answered > 0 {
                return Ok(Some(answered));
            }
        }
        self.reserve_input();
        match tokio_util::io::poll_read_buf(Pin::new(&mut self.stream), context, &mut self.input) {
            Poll::Pending => Ok(None),
            Poll::Ready(Ok(0)) => Err(ConnectionError::EndOfStream),
            Poll::Ready(Ok(count)) => {
                self.last_read = count;
                self.stats.bytes_in += count as u64;
                self.has_new_stats = true;
                self.probe_deadline = None;
                self.deliver().map(Some)
            }
            Poll::Ready(Err(error)) => Err(error.into()),
        }
    }

    /// Reserves twice the length of the last read. A buffer that has grown for a large reply is freed.
    fn reserve_input(&mut self) {
        let wanted = (2 * self.last_read).clamp(MIN_READ_BYTES, MAX_READ_BYTES);
        if self.input.capacity() - self.input.len() >= wanted {
            return;
        }
        let was_empty = self.input.is_empty();
        self.input.reserve(wanted.max(MIN_INPUT_BYTES));
        if was_empty && self.input.capacity() > MAX_IDLE_BUFFER_BYTES && !self.decoder.is_midway(&self.input) {
            self.input = BytesMut::with_capacity(wanted.max(MIN_INPUT_BYTES));
        }
    }

    /// Delivers replies to at most half of the requests in flight, see the module. Returns the number of requests answered.
    fn deliver(&mut self) -> Result<usize, ConnectionError> {
        let limit = (self.in_flight.len() / 2).max(MIN_ANSWERED);
        let (mut released, mut latencies, now) = (Permit::default(), LatencyGroup::default(), Instant::now());
        let decoded = self.decode(limit, |sent, stats| {
            released.add(sent.request.permit);
            if !sent.request.is_own() {
                latencies.add(sent.since, now, &mut stats.reply_latency);
            }
        });
        latencies.finish(now, &mut self.stats.reply_latency);
        // Before the replies, so that a caller that sends again at once finds a permit.
        self.shared.queue.release(released);
        let answered = self.answered.len();
        self.is_busy |= answered > 1;
        for (reply, value) in self.answered.drain(..) {
            reply.finish(value);
        }
        decoded.map(|()| answered)
    }

    /// Decodes replies until `limit` requests are answered, and calls `on_answered` for each.
    fn decode(
        &mut self,
        limit: usize,
        mut on_answered: impl FnMut(&InFlight, &mut ConnectionStats),
    ) -> Result<(), ConnectionError> {
        let written = self.output.written();
        while self.answered.len() < limit
            && let Some(message) = self.decoder.decode(&mut self.input)?
        {
            let value = match message {
                Message::Reply(value) => value,
                Message::Push(push) => {
                    self.stats.pushes += 1;
                    if let Some(cache) = &self.shared.cache {
                        cache.handle_push(&push);
                    }
                    continue;
                }
            };
            self.stats.replies += 1;
            let oldest = self.in_flight.front_mut().filter(|oldest| oldest.start < written);
            let Some(sent) = oldest else { return Err(ConnectionError::UnexpectedReply) };
            let request = &mut sent.request;
            request.replies_left -= 1;
            if request.replies_left > 0 {
                if let Some(reply) = &mut request.reply {
                    reply.push(value);
                }
                continue;
            }
            if let Some(reply) = request.reply.take() {
                self.answered.push((reply, value));
            }
            on_answered(sent, &mut self.stats);
            self.in_flight.pop_front();
            // A server may answer before it has read the whole request.
            self.unwritten = self.unwritten.min(self.in_flight.len());
        }
        Ok(())
    }

    fn publish_stats(&mut self) {
        if std::mem::take(&mut self.has_new_stats) {
            self.shared.counters.publish(&self.stats);
        }
    }

    /// Publishes statistics and waits for the timer, which ends requests at their deadlines.
    fn wait(&mut self, context: &mut Context<'_>) -> Poll<Result<(), ConnectionError>> {
        self.publish_stats();
        if self.in_flight.is_empty() && self.in_flight.capacity() > MAX_IDLE_REQUESTS {
            self.in_flight.shrink_to(MAX_IDLE_REQUESTS);
            self.taken.requests.shrink_to(MAX_IDLE_REQUESTS);
            self.answered.shrink_to(MAX_IDLE_REQUESTS);
        }
        loop {
            let Some(timer) = &mut self.timer else { return Poll::Pending };
            ready!(timer.as_mut().poll(context));
            let now = Instant::now();
            if self.closing.is_some_and(|deadline| deadline <= now) {
                return Poll::Ready(Ok(()));
            }
            if self.probe_deadline.is_some_and(|deadline| deadline <= now) {
                return Poll::Ready(Err(ConnectionError::Unresponsive));
            }
            if self.expire(now) {
                // The probe is written by the next poll.
                context.waker().wake_by_ref();
            }
        }
    }

    /// Ends requests whose deadline has passed. The replies to those that were sent will be dropped, and the others are not sent.
    /// Returns whether it has sent a probe, because a reply is overdue.
    fn expire(&mut self, now: Instant) -> bool {
        let (expired, next_pending) = self.shared.queue.take_expired(now);
        for request in expired {
            self.shared.time_out(request, RequestPhase::Queued);
        }
        self.remove_unsent(|request| request.deadline <= now);
        let written = self.output.written();
        let mut is_overdue = false;
        for sent in &mut self.in_flight {
            if sent.request.deadline > now {
                continue;
            }
            let phase = if sent.end() <= written { RequestPhase::Waiting } else { RequestPhase::Writing };
            if let Some(reply) = sent.request.reply.take() {
                is_overdue = true;
                if !sent.request.is_own() {
                    self.shared.counters.count_timeout(phase);
                }
                reply.fail(Error::TimedOut { phase });
            }
        }
        let sends_probe = is_overdue && self.probe_deadline.is_none();
        if sends_probe {
            self.probe_deadline = Some(after(self.shared.options.connect_timeout));
            self.send(&mut probe(now), now);
        }
        let deadlines = self.in_flight.iter().filter(|sent| sent.request.reply.is_some());
        let next_sent = deadlines.map(|sent| sent.request.deadline).min();
        let next = [next_sent, next_pending, self.probe_deadline, self.closing].into_iter().flatten().min();
        self.timer = next.map(|next| Box::pin(sleep_until(next)));
        sends_probe
    }
}

/// Ends all requests and returns their permits, even if the task of the connection was aborted.
impl Drop for Serving {
    fn drop(&mut self) {
        self.close_cache();
        self.fail_all(|_, outcome| Error::Closed { outcome });
    }
}

/// A `PING` that shows whether the server is alive.
fn probe(now: Instant) -> Batch {
    let mut batch = Batch::default();
    encode_command(&["PING"], &mut batch.bytes);
    batch.requests.push_back(PendingRequest::own(batch.bytes.len(), now, later(now, Duration::MAX), None));
    batch
}
