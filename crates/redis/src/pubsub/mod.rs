//! Pub/sub: subscriptions to channels, patterns and shard channels.
//!
//! ```
//! use tidewire_redis::pubsub::Event;
//! use tidewire_redis::{Client, Options, commands};
//!
//! # #[tokio::main]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let redis = tidewire_testkit::RedisServer::start();
//! # let client = Client::start(Options::default().address(redis.addr()));
//! let mut news = client.subscribe(["news"]).await?;
//! client.send(commands::publish("news", "high tide")).await?;
//! if let Some(Event::Message(message)) = news.next().await.transpose()? {
//!     assert_eq!(message.payload, "high tide");
//! }
//! # Ok(())
//! # }
//! ```
//!
//! All subscriptions of a client share one connection, which is separate from that of the commands: the server ends a connection
//! whose unread messages exceed its `client-output-buffer-limit` for pubsub (32 MiB by default), and commands must not end with it. It
//! is opened for the first subscription, and closed a second after the last one. A channel that several subscriptions have is
//! subscribed once, and they share its messages.
//!
//! - **At most once.** A message is received once or not at all. The server keeps none for a subscriber that is not connected.
//! - **Order.** Messages of one publisher arrive in the order in which it sent them.
//! - **Reconnects.** A lost connection is replaced, with the delays of [`Options`](crate::Options), and all subscriptions are
//!   restored. Then each of them receives [`Event::Gap`].
//! - **Bounds.** A [`Subscription`] holds a limited number of messages and bytes. [`WhenSlow`] says what happens beyond.

mod actor;
mod inbox;
mod keyspace;
mod registry;
mod serving;
mod slot;
mod subscription;

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::Waker;

use bytes::Bytes;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};

use self::actor::Actor;
use self::inbox::Inbox;
pub use self::keyspace::{KeyEvent, KeyspaceError, KeyspaceOptions, KeyspaceSubscription, keyspace};
use self::registry::{Kind, Listener, Registry};
pub use self::subscription::{Event, Message, SubscribeOptions, Subscription, WhenSlow};
use crate::command::{CommandError, ToArgument};
use crate::connection::after;
use crate::observe::PubSubStats;
use crate::sync::{Mutex, lock};
use crate::{Client, Command, Error, RequestOutcome, RequestPhase};

/// The subscriptions of a client.
#[derive(Default)]
pub(crate) struct PubSub {
    registry: Mutex<Registry>,
    counters: Counters,
}

#[derive(Default)]
struct Counters {
    connect_attempts: AtomicU64,
    connections_lost: AtomicU64,
    messages: AtomicU64,
    dropped: AtomicU64,
}

impl PubSub {
    /// Changes the registry, and wakes the actor.
    fn change<T>(&self, change: impl FnOnce(&mut Registry) -> T) -> T {
        let (result, waker) = self.update(|registry| (change(registry), registry.take_waker()));
        wake(waker);
        result
    }

    /// Changes the registry, without waking the actor.
    fn update<T>(&self, change: impl FnOnce(&mut Registry) -> T) -> T {
        let (result, effects) = {
            let mut registry = lock(&self.registry);
            let result = change(&mut registry);
            (result, registry.take_effects())
        };
        for effect in effects {
            effect.run();
        }
        result
    }

    /// Returns the name of a channel and its listeners.
    fn listeners(&self, kind: Kind, name: &[u8]) -> Option<(Bytes, Arc<Vec<Listener>>)> {
        lock(&self.registry).listeners(kind, name)
    }

    fn is_unused(&self) -> bool {
        lock(&self.registry).has_no_channels()
    }

    /// Wakes the actor.
    fn wake(&self) {
        let waker = lock(&self.registry).take_waker();
        wake(waker);
    }

    /// Ends a subscription, if it has not ended before.
    fn leave(&self, id: u64) {
        self.change(|registry| registry.abandon(id));
    }

    /// Ends all subscriptions and the connection, and rejects new subscriptions.
    pub(crate) fn close(&self) {
        self.change(Registry::close);
    }

    pub(crate) fn stats(&self) -> PubSubStats {
        let census = lock(&self.registry).census();
        PubSubStats {
            subscriptions: census.subscriptions,
            channels: census.channels,
            is_open: census.is_open,
            generation: census.generation,
            connect_attempts: self.counters.connect_attempts.load(Relaxed),
            connections_lost: self.counters.connections_lost.load(Relaxed),
            messages: self.counters.messages.load(Relaxed),
            dropped: self.counters.dropped.load(Relaxed),
        }
    }
}

fn wake(waker: Option<Waker>) {
    if let Some(waker) = waker {
        waker.wake();
    }
}

impl Client {
    /// Subscribes to channels. Returns once the server has confirmed each of them.
    ///
    /// The connection for subscriptions is opened if there is none. While it is down, [`Options::while_down`](crate::Options::while_down)
    /// applies. See [`pubsub`](crate::pubsub).
    ///
    /// # Errors
    ///
    /// If a channel is refused, which the error names, or the timeout passes. Then no channel stays subscribed.
    ///
    /// # Cancellation
    ///
    /// Dropping the future unsubscribes.
    pub async fn subscribe(&self, channels: impl IntoIterator<Item: ToArgument>) -> Result<Subscription, Error> {
        self.subscribe_with(channels, SubscribeOptions::default()).await
    }

    /// [Subscribes](Self::subscribe) to channels, with options.
    pub async fn subscribe_with(
        &self,
        channels: impl IntoIterator<Item: ToArgument>,
        options: SubscribeOptions,
    ) -> Result<Subscription, Error> {
        self.join(Kind::Channel, names(channels)?, options).await
    }

    /// [Subscribes](Self::subscribe) to all channels that match a pattern, such as `news.*`. A message whose channel matches two of the
    /// patterns is received twice.
    pub async fn psubscribe(&self, patterns: impl IntoIterator<Item: ToArgument>) -> Result<Subscription, Error> {
        self.psubscribe_with(patterns, SubscribeOptions::default()).await
    }

    /// [Subscribes](Self::psubscribe) to patterns, with options.
    pub async fn psubscribe_with(
        &self,
        patterns: impl IntoIterator<Item: ToArgument>,
        options: SubscribeOptions,
    ) -> Result<Subscription, Error> {
        self.join(Kind::Pattern, names(patterns)?, options).await
    }

    /// [Subscribes](Self::subscribe) to shard channels, whose messages are sent with
    /// [`spublish`](crate::commands::spublish). Since Redis 7.
    ///
    /// If a cluster moves their slot to another node, the subscription ends with the `MOVED` error of the server.
    ///
    /// # Errors
    ///
    /// Also if the channels are in different hash slots, which are on different nodes of a cluster.
    pub async fn ssubscribe(&self, channels: impl IntoIterator<Item: ToArgument>) -> Result<Subscription, Error> {
        self.ssubscribe_with(channels, SubscribeOptions::default()).await
    }

    /// [Subscribes](Self::ssubscribe) to shard channels, with options.
    pub async fn ssubscribe_with(
        &self,
        channels: impl IntoIterator<Item: ToArgument>,
        options: SubscribeOptions,
    ) -> Result<Subscription, Error> {
        let channels = names(channels)?;
        check_slots(&channels)?;
        self.join(Kind::Shard, channels, options).await
    }

    async fn join(&self, kind: Kind, names: Box<[Bytes]>, options: SubscribeOptions) -> Result<Subscription, Error> {
        let deadline = after(self.timeout);
        let timed_out = |phase| {
            self.shared.connection.counters.count_timeout(phase);
            Err(Error::TimedOut { phase })
        };
        if deadline <= Instant::now() {
            return timed_out(RequestPhase::Queued);
        }
        let pubsub = &self.shared.pubsub;
        let inbox = Arc::new(Inbox::new(options));
        let (sender, confirmation) = oneshot::channel();
        let while_down = self.options().while_down;
        let (id, starts_actor) =
            pubsub.change(|registry| registry.join(kind, names, Arc::clone(&inbox), sender, while_down))?;
        // It unsubscribes if the confirmation does not come, or the caller goes away.
        let subscription = Subscription::new(self.clone(), inbox, id);
        if starts_actor {
            let actor = Actor::new(Arc::clone(&self.shared));
            // If the driver has ended, the actor is dropped, which closes the registry.
            self.shared.tasks.spawn(actor.run());
        }
        match timeout_at(deadline, confirmation).await {
            Ok(Ok(confirmed)) => confirmed.map(|()| subscription),
            Ok(Err(_)) => Err(Error::Closed { outcome: RequestOutcome::MaybeExecuted }),
            Err(_) => {
                let is_connected = lock(&pubsub.registry).is_connected();
                timed_out(if is_connected { RequestPhase::Waiting } else { RequestPhase::Connecting })
            }
        }
    }
}

/// Returns the channels without duplicates, if there are any and servers accept them.
fn names(channels: impl IntoIterator<Item: ToArgument>) -> Result<Box<[Bytes]>, CommandError> {
    let (mut names, mut seen) = (Vec::new(), HashSet::new());
    for channel in channels {
        Command::new("SUBSCRIBE").arg(&channel).check_encoding()?;
        let name = channel.with_bytes(Bytes::copy_from_slice);
        if seen.insert(name.clone()) {
            names.push(name);
        }
    }
    if names.is_empty() { Err(CommandError::NoChannels) } else { Ok(names.into()) }
}

fn check_slots(channels: &[Bytes]) -> Result<(), CommandError> {
    let Some((first, rest)) = channels.split_first() else { return Ok(()) };
    match rest.iter().find(|channel| slot::hash_slot(channel) != slot::hash_slot(first)) {
        Some(second) => {
            let channels = Box::new([first, second].map(|name| crate::error::shown(name).to_string()));
            Err(CommandError::ShardChannelSlots { channels })
        }
        None => Ok(()),
    }
}
