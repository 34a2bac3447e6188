//! Moves pushes from the subscriptions of a connection to its WebSocket.
//!
//! A [`Pusher`] is owned by the actor of the connection and runs on its task. Other threads reach it only through the
//! [`SocketSink`], which collects the subscriptions to be polled and wakes the actor.

use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;

use tidewire_conn::websocket::Message;
use tidewire_conn::{MemoryHold, PushError, PushHandle, PushPolicy, PushPriority, ReplyTicket, Slot};
use tidewire_live::Mode;
use tokio::time::Instant;

use super::flow::{Buffer, ConsumerHealth, Flow, PushDecision};
use super::sink::PushSink;
use super::subscription::Subscription;
use crate::protocol::disconnect::Disconnect;
use crate::protocol::{notice, push};
use crate::session::connection::Connection;

/// The sink of a connection over a WebSocket.
#[derive(Debug)]
pub(crate) struct SocketSink {
    handle: PushHandle<Message>,
    /// The subscriptions to be polled, without duplicates.
    ready: Mutex<Vec<u64>>,
}

impl SocketSink {
    pub(crate) fn new(handle: PushHandle<Message>) -> Self {
        Self { handle, ready: Mutex::default() }
    }

    fn ready(&self) -> MutexGuard<'_, Vec<u64>> {
        self.ready.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores an empty vector for reuse, so that the next wake-up does not allocate.
    fn recycle(&self, empty: Vec<u64>) {
        let mut ready = self.ready();
        if ready.capacity() == 0 {
            *ready = empty;
        }
    }

    /// Returns the bytes of queued pushes.
    pub(crate) fn queued_bytes(&self) -> usize {
        self.handle.queued_bytes()
    }
}

impl PushSink for SocketSink {
    fn wake(&self, subscription: u64) {
        let mut ready = self.ready();
        if !ready.contains(&subscription) {
            ready.push(subscription);
        }
        drop(ready);
        self.handle.wake();
    }

    fn discard_unsent(&self, subscription: u64) -> bool {
        self.handle.clear_slot(Slot(subscription))
    }

    fn hold(&self, bytes: usize) -> Option<MemoryHold> {
        self.handle.account().map(|account| account.hold(bytes))
    }

    fn close(&self, disconnect: Disconnect) {
        if disconnect == Disconnect::SESSION_REVOKED {
            // If the queue is full, the close code still has the reason.
            let _ = self.handle.try_push(notice::session_revoked(), PushPriority::High, PushPolicy::DropIfFull);
        }
        self.handle.close(Some(disconnect.frame()));
    }
}

/// Moves pushes from the subscriptions of a connection to its WebSocket.
#[derive(Debug)]
pub(crate) struct Pusher {
    sink: Arc<SocketSink>,
    flow: Flow,
    /// Limit of the bytes of queued pushes.
    limit: usize,
    /// The last messages of ended subscriptions that do not fit in the buffer. At most one per subscription.
    end_messages: VecDeque<Message>,
    /// The last unanswered request that may cause pushes. Its reply is sent before them.
    ///
    /// Replies and pushes reach the actor on different paths. A request is handled before its effect is visible, so every push that
    /// contains the effect finds the ticket here. A push may also wait for a write that did not cause it. This short delay avoids
    /// tracing each commit back to its connection.
    cause: Option<ReplyTicket>,
}

impl Pusher {
    pub(crate) fn new(sink: Arc<SocketSink>, limit: usize) -> Self {
        Self { sink, flow: Flow::default(), limit, end_messages: VecDeque::new(), cause: None }
    }

    pub(crate) fn queued_bytes(&self) -> usize {
        self.sink.queued_bytes()
    }

    /// Delays pushes until the reply to this request is sent.
    pub(crate) fn hold_until_reply(&mut self, ticket: ReplyTicket) {
        self.cause = Some(ticket);
    }

    /// Returns the request whose reply is sent before pushes.
    pub(crate) fn cause(&self) -> Option<ReplyTicket> {
        self.cause
    }

    /// Stops delaying pushes.
    pub(crate) fn release(&mut self) {
        self.cause = None;
    }

    fn buffer(&self, sent: u64) -> Buffer {
        Buffer { queued: self.sink.queued_bytes(), limit: self.limit, sent }
    }

    /// Polls the ready subscriptions and pushes their results. `sent` is the number of bytes sent to the client so far. Returns
    /// whether the client reads, like [`check`](Self::check).
    pub(crate) fn deliver(&mut self, connection: &Connection, sent: u64) -> ConsumerHealth {
        let mut ready = std::mem::take(&mut *self.sink.ready());
        for number in ready.drain(..) {
            match connection.subscription(number) {
                Some(subscription) => self.deliver_subscription(connection, &subscription, sent),
                None => self.flow.remove(number),
            }
        }
        self.sink.recycle(ready);
        if self.flow.is_caught_up() && self.end_messages.is_empty() {
            return ConsumerHealth::Reading;
        }
        self.refresh(connection, sent);
        self.check(connection, sent, Instant::now())
    }

    fn deliver_subscription(&mut self, connection: &Connection, subscription: &Arc<Subscription>, sent: u64) {
        let number = subscription.number;
        loop {
            match subscription.poll_push(connection) {
                Poll::Pending => return,
                Poll::Ready(Ok(body)) => {
                    let is_delta = subscription.mode == Mode::Delta;
                    let others = if is_delta { self.queued_bytes() } else { self.queued_bytes_except(number) };
                    let decision = self.flow.offer(number, body.body().len(), others, self.limit);
                    if decision == PushDecision::Push {
                        match self.push(subscription, push::message(number, body)) {
                            Ok(()) => continue,
                            Err(PushError::QueueFull) => {}
                            Err(_) => return,
                        }
                    }
                    connection.server.counters.held_back.fetch_add(1, Relaxed);
                    self.flow.pause(number, self.buffer(sent), Instant::now());
                    // The loop polls the subscription once more, so that it wakes this connection when it is refreshed or ends.
                    subscription.pause();
                }
                Poll::Ready(Err(error)) => {
                    self.flow.remove(number);
                    connection.remove_subscription(number);
                    // An older result must not follow the end message.
                    self.sink.discard_unsent(number);
                    if subscription.is_extended {
                        let body = push::end_body(&error, connection.server.options.expose_error_details);
                        self.end_messages.push_back(push::message(number, body));
                        self.push_end_messages();
                    }
                    return;
                }
            }
        }
    }

    /// Pushes the last messages of ended subscriptions until the queue is full.
    fn push_end_messages(&mut self) {
        while let Some(message) = self.end_messages.pop_front() {
            if self.push_end_message(message.clone()) == Err(PushError::QueueFull) {
                return self.end_messages.push_front(message);
            }
        }
    }

    /// Returns the bytes of queued pushes, without the unsent result of a subscription.
    fn queued_bytes_except(&self, number: u64) -> usize {
        self.sink.handle.queued_bytes_except(Slot(number))
    }

    fn push(&self, subscription: &Subscription, message: Message) -> Result<(), PushError> {
        let (handle, slot) = (&self.sink.handle, Slot(subscription.number));
        match (self.cause, subscription.mode) {
            (Some(ticket), Mode::Delta) => handle.after(ticket).push_next(slot, message),
            (None, Mode::Delta) => handle.push_next(slot, message),
            (Some(ticket), _) => handle.after(ticket).push_latest(slot, message),
            (None, _) => handle.push_latest(slot, message),
        }
    }

    /// Pushes the last message of a subscription.
    fn push_end_message(&self, message: Message) -> Result<(), PushError> {
        let (priority, policy) = (PushPriority::Low, PushPolicy::ReturnErrorIfFull);
        match self.cause {
            Some(ticket) => self.sink.handle.after(ticket).try_push(message, priority, policy),
            None => self.sink.handle.try_push(message, priority, policy),
        }
    }

    /// Pushes pending end messages, and requests the newest result of a subscription that is behind, if the buffer has drained.
    pub(crate) fn refresh(&mut self, connection: &Connection, sent: u64) {
        self.push_end_messages();
        while let Some(number) = self.flow.next_refresh(self.buffer(sent)) {
            match connection.subscription(number) {
                Some(subscription) => return subscription.refresh(&connection.server),
                None => self.flow.remove(number),
            }
        }
    }

    /// Checks whether the client reads, and disconnects a slow consumer.
    pub(crate) fn check(&mut self, connection: &Connection, sent: u64, now: Instant) -> ConsumerHealth {
        let health = self.flow.check(self.buffer(sent), now);
        if health == ConsumerHealth::Stalled {
            self.disconnect_slow_consumer(connection);
        }
        health
    }

    fn disconnect_slow_consumer(&self, connection: &Connection) {
        let buffered_bytes = self.queued_bytes();
        if connection.close(Disconnect::SLOW_CONSUMER) {
            connection.server.counters.slow_consumers.fetch_add(1, Relaxed);
            tracing::info!(%connection, buffered_bytes, "slow consumer disconnected");
        }
    }
}
