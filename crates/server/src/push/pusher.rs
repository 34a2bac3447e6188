//! Moves pushes from the subscriptions of a connection to its WebSocket.
//!
//! A [`Pusher`] belongs to the actor of the connection, and all its work is done on the actor's task. Other threads reach it only
//! through the [`SocketSink`], which notes the subscriptions to be polled and wakes the actor.

use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;

use tidewire_conn::websocket::Message;
use tidewire_conn::{MemoryHold, PushError, PushHandle, PushPolicy, PushPriority, ReplyTicket, Slot};
use tidewire_live::Mode;
use tokio::time::Instant;

use super::flow::{Buffer, Decision, Flow, Health};
use super::sink::PushSink;
use super::subscription::Subscription;
use crate::protocol::disconnect::Disconnect;
use crate::protocol::{notice, push};
use crate::session::connection::Connection;

/// The sink of a connection over a WebSocket.
#[derive(Debug)]
pub(crate) struct SocketSink {
    handle: PushHandle<Message>,
    /// Subscriptions to be polled, each once.
    ready: Mutex<Vec<u64>>,
}

impl SocketSink {
    pub(crate) fn new(handle: PushHandle<Message>) -> Self {
        Self { handle, ready: Mutex::default() }
    }

    fn ready(&self) -> MutexGuard<'_, Vec<u64>> {
        self.ready.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives an empty list back, so that the next wake need not allocate one.
    fn recycle(&self, empty: Vec<u64>) {
        let mut ready = self.ready();
        if ready.capacity() == 0 {
            *ready = empty;
        }
    }

    /// Bytes of pushes that wait to be sent.
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

    fn take_back(&self, subscription: u64) -> bool {
        self.handle.clear_slot(Slot(subscription))
    }

    fn hold(&self, bytes: usize) -> Option<MemoryHold> {
        self.handle.account().map(|account| account.hold(bytes))
    }

    fn close(&self, disconnect: Disconnect) {
        if disconnect == Disconnect::SESSION_REVOKED {
            // If there is no room for the notice, the close code still says why.
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
    /// Bytes of pushes that may wait.
    limit: usize,
    /// The last messages of subscriptions that have ended, which the buffer has no room for. One per subscription at most.
    ends: VecDeque<Message>,
    /// The last request that may have caused pushes, until it is answered: its reply comes before them.
    ///
    /// Replies and pushes reach the actor by different paths. But a request is handled before its effect is visible, so every push
    /// that shows the effect finds the ticket here. A push may also wait for a write that did not cause it. That delays it a little,
    /// and no commit has to be traced back to its connection.
    cause: Option<ReplyTicket>,
}

impl Pusher {
    pub(crate) fn new(sink: Arc<SocketSink>, limit: usize) -> Self {
        Self { sink, flow: Flow::default(), limit, ends: VecDeque::new(), cause: None }
    }

    pub(crate) fn queued_bytes(&self) -> usize {
        self.sink.queued_bytes()
    }

    /// Lets pushes wait for the reply to this request.
    pub(crate) fn tie(&mut self, ticket: ReplyTicket) {
        self.cause = Some(ticket);
    }

    /// The request whose reply pushes wait for.
    pub(crate) fn cause(&self) -> Option<ReplyTicket> {
        self.cause
    }

    /// Lets pushes wait no longer.
    pub(crate) fn untie(&mut self) {
        self.cause = None;
    }

    fn buffer(&self, sent: u64) -> Buffer {
        Buffer { queued: self.sink.queued_bytes(), limit: self.limit, sent }
    }

    /// Polls the subscriptions that are ready, and pushes what they have. `sent` are the bytes that the client has taken so far.
    /// Returns whether the client reads, as [`check`](Self::check) does.
    pub(crate) fn deliver(&mut self, connection: &Connection, sent: u64) -> Health {
        let mut ready = std::mem::take(&mut *self.sink.ready());
        for number in ready.drain(..) {
            match connection.subscription(number) {
                Some(subscription) => self.deliver_from(connection, &subscription, sent),
                None => self.flow.remove(number),
            }
        }
        self.sink.recycle(ready);
        if self.flow.is_open() && self.ends.is_empty() {
            return Health::Reading;
        }
        self.refresh(connection, sent);
        self.check(connection, sent, Instant::now())
    }

    fn deliver_from(&mut self, connection: &Connection, subscription: &Arc<Subscription>, sent: u64) {
        let number = subscription.number;
        loop {
            match subscription.poll_push(connection) {
                Poll::Pending => return,
                Poll::Ready(Ok(body)) => {
                    let is_delta = subscription.mode == Mode::Delta;
                    let others = if is_delta { self.queued_bytes() } else { self.queued_bytes_besides(number) };
                    let decision = self.flow.offer(number, body.body().len(), others, self.limit);
                    if decision == Decision::Push {
                        match self.push(subscription, push::message(number, body)) {
                            Ok(()) => continue,
                            Err(PushError::QueueFull) => {}
                            Err(_) => return,
                        }
                    }
                    connection.server.counters.held_back.fetch_add(1, Relaxed);
                    self.flow.pause(number, self.buffer(sent), Instant::now());
                    // Polled once more, so that it wakes this connection when it is refreshed or ends.
                    subscription.pause();
                }
                Poll::Ready(Err(error)) => {
                    self.flow.remove(number);
                    connection.forget(number);
                    // An older result must not come after the end.
                    self.sink.take_back(number);
                    if subscription.is_extended {
                        let body = push::end_body(&error, connection.server.options.expose_error_details);
                        self.ends.push_back(push::message(number, body));
                        self.push_ends();
                    }
                    return;
                }
            }
        }
    }

    /// Pushes the last messages of subscriptions that have ended, as far as there is room.
    fn push_ends(&mut self) {
        while let Some(message) = self.ends.pop_front() {
            if self.push_end(message.clone()) == Err(PushError::QueueFull) {
                return self.ends.push_front(message);
            }
        }
    }

    /// Bytes that wait to be sent, but for the unsent result of a subscription.
    fn queued_bytes_besides(&self, number: u64) -> usize {
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
    fn push_end(&self, message: Message) -> Result<(), PushError> {
        let (priority, policy) = (PushPriority::Low, PushPolicy::ReturnErrorIfFull);
        match self.cause {
            Some(ticket) => self.sink.handle.after(ticket).try_push(message, priority, policy),
            None => self.sink.handle.try_push(message, priority, policy),
        }
    }

    /// Pushes what has waited for room: the newest result of a subscription that is behind.
    pub(crate) fn refresh(&mut self, connection: &Connection, sent: u64) {
        self.push_ends();
        while let Some(number) = self.flow.next_refresh(self.buffer(sent)) {
            match connection.subscription(number) {
                Some(subscription) => return subscription.refresh(&connection.server),
                None => self.flow.remove(number),
            }
        }
    }

    /// Looks whether the client reads. Disconnects one that does not.
    pub(crate) fn check(&mut self, connection: &Connection, sent: u64, now: Instant) -> Health {
        let health = self.flow.check(self.buffer(sent), now);
        if health == Health::Stalled {
            self.disconnect_slow(connection);
        }
        health
    }

    fn disconnect_slow(&self, connection: &Connection) {
        let buffered_bytes = self.queued_bytes();
        if connection.close(Disconnect::SLOW_CONSUMER) {
            connection.server.counters.slow_consumers.fetch_add(1, Relaxed);
            tracing::info!(%connection, buffered_bytes, "slow consumer disconnected");
        }
    }
}
