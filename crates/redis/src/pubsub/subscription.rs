//! Subscriptions: what a subscriber holds.

use std::fmt;
use std::future::poll_fn;
use std::sync::Arc;

use bytes::Bytes;

use super::inbox::Inbox;
use crate::{Client, Error};

/// A stream of the messages of some channels or patterns. Made by [`Client::subscribe`], [`Client::psubscribe`] and
/// [`Client::ssubscribe`].
///
/// It keeps the client open. Dropping it unsubscribes from the channels that no other subscription of the client has.
#[must_use = "dropping it unsubscribes"]
pub struct Subscription {
    inbox: Arc<Inbox>,
    id: u64,
    /// Dropped after the subscription has ended.
    client: Client,
}

/// What a subscription receives. `T` is the type of its messages.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event<T = Arc<Message>> {
    /// A message. All subscriptions that receive it share it.
    Message(T),
    /// The connection was replaced, or the server had ended the subscription to a channel: messages may have been missed before this
    /// event. All channels are subscribed again, so that after this event none is missed until the next gap. A program that keeps a
    /// copy of something reads it again now.
    Gap {
        /// The number of pub/sub connections so far.
        generation: u64,
    },
    /// The subscriber was too slow, and the oldest messages were dropped, as [`WhenSlow::DropOldest`] says.
    Dropped {
        /// The number of messages since the previous event of this kind.
        count: u64,
    },
}

/// A message of a channel.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Message {
    /// The channel.
    pub channel: Bytes,
    /// The pattern that the channel matches, if the subscription is one of patterns.
    pub pattern: Option<Bytes>,
    /// The payload.
    pub payload: Bytes,
}

/// The settings of a [`Subscription`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct SubscribeOptions {
    /// What happens when the subscription is full. Default: [`WhenSlow::DropOldest`], so that a slow subscriber delays no other.
    pub when_slow: WhenSlow,
    /// Messages that the subscription holds until they are taken, at least one. Default: 8192.
    pub max_messages: usize,
    /// Bytes of messages that it holds: payloads, channels, and about a hundred bytes for each. A message that is larger is held
    /// alone. Default: 16 MiB.
    pub max_bytes: usize,
}

impl Default for SubscribeOptions {
    fn default() -> Self {
        Self { when_slow: WhenSlow::default(), max_messages: 8192, max_bytes: 16 << 20 }
    }
}

impl SubscribeOptions {
    /// Sets [`when_slow`](#structfield.when_slow).
    #[must_use]
    pub fn when_slow(mut self, when_slow: WhenSlow) -> Self {
        self.when_slow = when_slow;
        self
    }

    /// Sets [`max_messages`](#structfield.max_messages).
    #[must_use]
    pub fn max_messages(mut self, max_messages: usize) -> Self {
        self.max_messages = max_messages;
        self
    }

    /// Sets [`max_bytes`](#structfield.max_bytes).
    #[must_use]
    pub fn max_bytes(mut self, max_bytes: usize) -> Self {
        self.max_bytes = max_bytes;
        self
    }
}

/// What happens when a subscription is full, because its subscriber takes messages more slowly than they arrive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum WhenSlow {
    /// The oldest messages are dropped. They are counted, and the subscriber receives [`Event::Dropped`].
    #[default]
    DropOldest,
    /// The pub/sub connection is not read until there is space. This delays all subscriptions of the client, and new ones. The server
    /// buffers meanwhile, and closes the connection at its `client-output-buffer-limit` for pubsub: 32 MiB, or 8 MiB for a minute. Then
    /// all subscriptions have a [gap](Event::Gap).
    Wait,
}

impl Subscription {
    pub(super) fn new(client: Client, inbox: Arc<Inbox>, id: u64) -> Self {
        Self { inbox, id, client }
    }

    /// Waits for the next event. Returns `None` after the client was closed, when all messages have been taken.
    ///
    /// The future is cancellation safe.
    ///
    /// # Errors
    ///
    /// Why the subscription has ended: the server has refused to restore one of its channels, or the connection is not replaced
    /// ([`Options::reconnect`](crate::Options::reconnect) is off, or the login was refused). It is the last event.
    pub async fn next(&mut self) -> Option<Result<Event, Error>> {
        // A busy channel must not keep other tasks of the thread waiting.
        tokio::task::coop::consume_budget().await;
        let (event, frees_space) = poll_fn(|context| self.inbox.poll_next(context)).await;
        if frees_space {
            self.client.shared.pubsub.wake();
        }
        event
    }

    /// Returns how many messages were dropped because the subscriber was too slow.
    pub fn dropped(&self) -> u64 {
        self.inbox.dropped()
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.client.shared.pubsub.leave(self.id);
    }
}

impl fmt::Debug for Subscription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Subscription").field("dropped", &self.dropped()).finish_non_exhaustive()
    }
}
