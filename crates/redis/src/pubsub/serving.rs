//! An open pub/sub connection: it sends the commands of the registry, and delivers messages.
//!
//! Only changes of subscriptions, `PING` and `AUTH` are sent. In RESP3 confirmations and messages are pushes, in RESP2 they are arrays;
//! both are read in the same way. If a subscription with [`WhenSlow::Wait`](super::WhenSlow::Wait) is full, the connection keeps the
//! message and reads no further.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::AsyncWrite;
use tokio::time::{Instant, Sleep, sleep_until};

use super::inbox::{Inbox, Pushed};
use super::registry::{Change, Kind, Registry};
use super::{Message, PubSub};
use crate::client::ClientShared;
use crate::connection::later;
use crate::connection::transport::{Established, Stream};
use crate::resp::{self, Decoder, encode_command};
use crate::rotation::Rotation;
use crate::{ConnectionError, Login, ServerError, Value};

/// With more unwritten bytes than this, no commands are taken.
const MAX_UNWRITTEN_BYTES: usize = 64 << 10;
/// Commands that wait for their response, at most.
const MAX_IN_FLIGHT: usize = 4096;
/// Minimum free capacity of the input before a read.
const MIN_READ_BYTES: usize = 4 << 10;
/// Capacity that is allocated for the input.
const INPUT_BYTES: usize = 16 << 10;
/// The length of a message above which the input is freed after it.
const MAX_IDLE_INPUT_BYTES: usize = 1 << 20;
/// A payload from this length on is a slice of the input, and a shorter one is copied: it would keep the whole read in memory.
const MIN_SLICE_BYTES: usize = 64 << 10;
/// Maximum reads per poll before other tasks run.
const MAX_TURNS: usize = 32;
/// The time after which a connection without subscriptions is closed.
const LINGER: Duration = Duration::from_secs(1);

/// Why an open connection has ended.
pub(super) enum ServingEnd {
    Lost(ConnectionError),
    /// There were no subscriptions for the linger time.
    Unused,
    Closed,
}

pub(super) struct Serving<'a> {
    client: &'a ClientShared,
    stream: Stream,
    decoder: Decoder,
    /// Whether `AUTH` can be sent, which in RESP2 it cannot while there are subscriptions.
    is_resp3: bool,
    input: BytesMut,
    /// Whether a message was larger than an idle input may be.
    had_large_message: bool,
    output: BytesMut,
    /// The newest login that is not sent yet.
    next_login: Option<Login>,
    /// A message that some subscriptions have no space for.
    stalled: Option<Stalled>,
    /// The last time that the connection was read, or could not be read because it was stalled.
    last_heard: Instant,
    /// When the answer to a `PING` must have come.
    probe_deadline: Option<Instant>,
    /// Since when there are no subscriptions.
    unused_since: Option<Instant>,
    /// Fires at the earliest deadline, or before it.
    timer: Pin<Box<Sleep>>,
}

struct Stalled {
    message: Arc<Message>,
    inboxes: Vec<Arc<Inbox>>,
}

impl<'a> Serving<'a> {
    pub(super) fn new(established: Established, client: &'a ClientShared) -> Self {
        let Established { stream, input, decoder, is_resp3, .. } = established;
        let now = Instant::now();
        Self {
            client,
            stream,
            decoder,
            is_resp3,
            input,
            had_large_message: false,
            next_login: None,
            output: BytesMut::new(),
            stalled: None,
            last_heard: now,
            probe_deadline: None,
            unused_since: None,
            timer: Box::pin(sleep_until(now)),
        }
    }

    /// Serves until the connection is lost, unused or closed. Sends each new login of the rotation.
    pub(super) async fn run(mut self, rotation: Option<Rotation>) -> ServingEnd {
        let mut rotation = rotation.filter(|_| self.is_resp3);
        let end = loop {
            tokio::select! {
                biased;
                end = std::future::poll_fn(|context| self.poll(context)) => break end.unwrap_or_else(ServingEnd::Lost),
                login = Rotation::next(rotation.as_mut()) => self.next_login = Some(login),
            }
        };
        if let Some(Stalled { inboxes, .. }) = self.stalled.take() {
            self.pubsub().counters.dropped.fetch_add(inboxes.len() as u64, Relaxed);
            for inbox in inboxes {
                inbox.count_dropped();
            }
        }
        if !matches!(end, ServingEnd::Lost(_)) {
            // Nothing is lost if it fails: there are no subscriptions. It is tried once, because TLS would wait for the socket.
            let _ =
                std::future::poll_fn(|context| Poll::Ready(Pin::new(&mut self.stream).poll_shutdown(context))).await;
        }
        end
    }

    fn pubsub(&self) -> &'a PubSub {
        &self.client.pubsub
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<ServingEnd, ConnectionError>> {
        if self.pubsub().watch(context.waker()) {
            return Poll::Ready(Ok(ServingEnd::Closed));
        }
        for _ in 0..MAX_TURNS {
            self.take_commands();
            self.write(context)?;
            if !self.read(context)? {
                // What was delivered may allow further commands.
                self.take_commands();
                self.write(context)?;
                return self.wait(context);
            }
        }
        context.waker().wake_by_ref();
        self.wait(context)
    }

    /// Encodes commands, unless enough bytes are unwritten or enough responses are missing.
    fn take_commands(&mut self) {
        if self.next_login.is_some() && self.pubsub().update(Registry::authenticate) {
            self.output.extend(self.next_login.take().map(|login| login.auth()).into_iter().flatten());
        }
        while self.output.len() < MAX_UNWRITTEN_BYTES {
            let next = self.pubsub().update(|registry| registry.next_command(MAX_IN_FLIGHT));
            let Some(Change { subscribes, kind, name }) = next else { break };
            let verb = match (kind, subscribes) {
                (Kind::Channel, true) => "SUBSCRIBE",
                (Kind::Channel, false) => "UNSUBSCRIBE",
                (Kind::Pattern, true) => "PSUBSCRIBE",
                (Kind::Pattern, false) => "PUNSUBSCRIBE",
                (Kind::Shard, true) => "SSUBSCRIBE",
                (Kind::Shard, false) => "SUNSUBSCRIBE",
            };
            encode_command(&[verb.as_bytes(), &name], &mut self.output);
        }
    }

    fn write(&mut self, context: &mut Context<'_>) -> Result<(), ConnectionError> {
        while !self.output.is_empty() {
            match Pin::new(&mut self.stream).poll_write(context, &self.output) {
                Poll::Pending => break,
                Poll::Ready(Ok(0)) => return Err(io::Error::from(io::ErrorKind::WriteZero).into()),
                Poll::Ready(Ok(count)) => self.output.advance(count),
                Poll::Ready(Err(error)) => return Err(error.into()),
            }
        }
        // TLS may keep the end of what was written.
        if let Poll::Ready(Err(error)) = Pin::new(&mut self.stream).poll_flush(context) {
            return Err(error.into());
        }
        if self.output.is_empty() && self.output.capacity() > 2 * MAX_UNWRITTEN_BYTES {
            self.output = BytesMut::new();
        }
        Ok(())
    }

    /// Reads once and delivers. Returns false if there is nothing to read, or a subscription is full.
    fn read(&mut self, context: &mut Context<'_>) -> Result<bool, ConnectionError> {
        // Input that was left when a subscription was full, or that followed the handshake.
        if !self.deliver()? {
            return Ok(false);
        }
        if self.input.capacity() - self.input.len() < MIN_READ_BYTES {
            self.input.reserve(INPUT_BYTES);
        }
        match tokio_util::io::poll_read_buf(Pin::new(&mut self.stream), context, &mut self.input) {
            Poll::Pending => Ok(false),
            Poll::Ready(Ok(0)) => Err(ConnectionError::EndOfStream),
            Poll::Ready(Ok(_)) => {
                self.note_heard();
                self.deliver()
            }
            Poll::Ready(Err(error)) => Err(error.into()),
        }
    }

    fn note_heard(&mut self) {
        self.last_heard = Instant::now();
        self.probe_deadline = None;
    }

    /// Delivers what was read. Returns false if a subscription is full.
    fn deliver(&mut self) -> Result<bool, ConnectionError> {
        loop {
            if let Some(Stalled { message, inboxes }) = self.stalled.take() {
                self.push(&message, inboxes.iter());
                if self.stalled.is_some() {
                    return Ok(false);
                }
                // The liveness deadline begins anew, because nothing was read meanwhile.
                self.note_heard();
            }
            match self.decoder.decode(&mut self.input)? {
                Some(resp::Message::Push(items)) => self.receive(&items, true)?,
                Some(resp::Message::Reply(Value::Array(items))) => self.receive(&items, false)?,
                Some(resp::Message::Reply(reply)) => self.receive_reply(&reply)?,
                None => {
                    self.free_input();
                    return Ok(true);
                }
            }
        }
    }

    /// Frees an input that has grown for a large message. Payloads that are slices of it would keep all of it in memory.
    fn free_input(&mut self) {
        if std::mem::take(&mut self.had_large_message) && !self.decoder.is_midway(&self.input) {
            self.input = BytesMut::from(&self.input[..]);
        }
    }

    /// Takes the reply to `PING` or `AUTH`, or a refusal.
    fn receive_reply(&mut self, reply: &Value) -> Result<(), ConnectionError> {
        let error = reply.as_error().map(|text| ServerError::parse(text));
        if self.pubsub().update(|registry| registry.is_authenticating())
            && let Some(rotation) = &self.client.connection.options.rotation
        {
            rotation.count_reply(error.as_ref());
        }
        match error {
            Some(error) => self.update(|registry| registry.refused(error)),
            None => self.update(Registry::replied).map(drop),
        }
    }

    fn update<T>(&self, change: impl FnOnce(&mut Registry) -> T) -> T {
        self.pubsub().update(change)
    }

    /// Takes a confirmation or a message: a push in RESP3, an array in RESP2.
    fn receive(&mut self, items: &[Value], is_push: bool) -> Result<(), ConnectionError> {
        let mut words = items.iter().map(|item| item.as_bytes().ok_or(ConnectionError::UnexpectedReply));
        let mut next = || words.next().unwrap_or(Err(ConnectionError::UnexpectedReply));
        let word = next()?;
        let kind = match &word[..] {
            b"message" | b"subscribe" | b"unsubscribe" => Kind::Channel,
            b"pmessage" | b"psubscribe" | b"punsubscribe" => Kind::Pattern,
            b"smessage" | b"ssubscribe" | b"sunsubscribe" => Kind::Shard,
            b"pong" if !is_push => return self.update(Registry::replied).map(drop),
            // Servers may send pushes of other kinds.
            _ if is_push => return Ok(()),
            _ => return Err(ConnectionError::UnexpectedReply),
        };
        let name = next()?;
        match &word[..] {
            b"message" | b"smessage" => self.publish(kind, name, None, next()?),
            b"pmessage" => self.publish(kind, name, Some(next()?), next()?),
            _ => {
                let subscribes = !word.ends_with(b"unsubscribe");
                return self.update(|registry| registry.confirmed(subscribes, kind, name));
            }
        }
        Ok(())
    }

    /// Gives a message to all subscriptions of its channel or pattern. For a pattern, `channel` is the one that matches.
    fn publish(&mut self, kind: Kind, name: &[u8], channel: Option<&Bytes>, payload: &Bytes) {
        self.pubsub().counters.messages.fetch_add(1, Relaxed);
        // Without listeners, the server has not executed an `UNSUBSCRIBE` yet.
        let Some((name, listeners)) = self.pubsub().listeners(kind, name) else { return };
        self.had_large_message |= payload.len() > MAX_IDLE_INPUT_BYTES;
        let payload = if payload.len() < MIN_SLICE_BYTES { Bytes::copy_from_slice(payload) } else { payload.clone() };
        let message = match channel {
            Some(channel) => Message { channel: Bytes::copy_from_slice(channel), pattern: Some(name), payload },
            None => Message { channel: name, pattern: None, payload },
        };
        self.push(&Arc::new(message), listeners.iter().map(|listener| &listener.inbox));
    }

    fn push<'i>(&mut self, message: &Arc<Message>, inboxes: impl Iterator<Item = &'i Arc<Inbox>>) {
        let mut full = Vec::new();
        for inbox in inboxes {
            match inbox.push(Arc::clone(message)) {
                Pushed::Done => {}
                Pushed::Dropped(count) => {
                    self.pubsub().counters.dropped.fetch_add(count, Relaxed);
                }
                Pushed::Full(_) => full.push(Arc::clone(inbox)),
            }
        }
        if !full.is_empty() {
            self.stalled = Some(Stalled { message: Arc::clone(message), inboxes: full });
        }
    }

    /// Waits for the next deadline, and acts on those that have passed.
    fn wait(&mut self, context: &mut Context<'_>) -> Poll<Result<ServingEnd, ConnectionError>> {
        loop {
            let now = Instant::now();
            let is_unused = self.pubsub().is_unused();
            self.unused_since = is_unused.then(|| self.unused_since.unwrap_or(now));
            let linger = self.unused_since.map(|since| since + LINGER);
            if linger.is_some_and(|deadline| deadline <= now) && self.update(Registry::end_if_unused) {
                return Poll::Ready(Ok(ServingEnd::Unused));
            }
            let options = &self.client.connection.options;
            let liveness = match self.probe_deadline {
                // While the input is not read, nothing is known about the server.
                _ if self.stalled.is_some() => None,
                Some(deadline) if deadline <= now => return Poll::Ready(Err(ConnectionError::Unresponsive)),
                Some(deadline) => Some(deadline),
                None => Some(later(self.last_heard, options.pubsub_ping_after)),
            };
            if self.probe_deadline.is_none() && liveness.is_some_and(|deadline| deadline <= now) {
                self.probe_deadline = Some(later(now, options.connect_timeout));
                self.update(Registry::ping);
                encode_command(&["PING"], &mut self.output);
                self.write(context)?;
                continue;
            }
            let Some(next) = liveness.into_iter().chain(linger).min() else { return Poll::Pending };
            if self.timer.deadline() > next || self.timer.is_elapsed() {
                self.timer.as_mut().reset(next);
            }
            ready!(self.timer.as_mut().poll(context));
        }
    }
}
