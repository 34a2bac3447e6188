//! Keyspace notifications: what happens to keys, as messages.

use std::collections::HashMap;

use bytes::Bytes;

use super::{Event, Message, SubscribeOptions, Subscription};
use crate::{Client, Command, Error, ErrorCode};

/// The parameter of the server that turns notifications on.
const PARAMETER: &str = "notify-keyspace-events";
/// The classes of events that `A` stands for.
const ALL_CLASSES: &str = "g$lshzxetd";

/// Which notifications are subscribed.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct KeyspaceOptions {
    /// The keys or events.
    filter: Filter,
    /// The database. Default: none, which means that of the client.
    pub database: Option<u32>,
    /// The settings of the subscription. Default: [`SubscribeOptions::default`].
    pub subscribe: SubscribeOptions,
}

#[derive(Debug, Clone)]
enum Filter {
    Keys(Vec<u8>),
    Events(Vec<String>),
}

impl KeyspaceOptions {
    /// All events of the keys that match a pattern, such as `user:*`.
    pub fn keys(pattern: impl AsRef<[u8]>) -> Self {
        Self::new(Filter::Keys(pattern.as_ref().to_vec()))
    }

    /// These events of all keys, such as `expired` and `del`.
    pub fn events(events: impl IntoIterator<Item: Into<String>>) -> Self {
        Self::new(Filter::Events(events.into_iter().map(Into::into).collect()))
    }

    fn new(filter: Filter) -> Self {
        Self { filter, database: None, subscribe: SubscribeOptions::default() }
    }

    /// Sets [`database`](#structfield.database).
    #[must_use]
    pub fn database(mut self, database: u32) -> Self {
        self.database = Some(database);
        self
    }

    /// Sets [`subscribe`](#structfield.subscribe).
    #[must_use]
    pub fn subscribe(mut self, subscribe: SubscribeOptions) -> Self {
        self.subscribe = subscribe;
        self
    }
}

/// An event of a key.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct KeyEvent {
    /// The key.
    pub key: Bytes,
    /// The name of the event, such as `set`, `del` or `expired`.
    pub event: Bytes,
}

/// Why there are no notifications.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum KeyspaceError {
    /// The server does not send them.
    #[error(
        "the server does not send these notifications: `{PARAMETER}` is \"{current}\", but must contain \"{missing}\"; set it with \
         CONFIG SET {PARAMETER}, or in its configuration file"
    )]
    Disabled {
        /// The setting of the server.
        current: Box<str>,
        /// The flags that are missing.
        missing: Box<str>,
    },
    /// The subscription failed.
    #[error(transparent)]
    Subscribe(#[from] Error),
}

/// A stream of the events of keys. Made by [`keyspace`].
#[derive(Debug)]
#[must_use = "dropping it unsubscribes"]
pub struct KeyspaceSubscription {
    subscription: Subscription,
    /// The beginning of each channel, before the key or the event.
    prefix: String,
    /// Whether the key is in the channel, and the event in the payload.
    is_by_key: bool,
}

/// Subscribes to keyspace notifications.
///
/// They are ordinary messages, so that events are missed while the connection is down: [`Event::Gap`] says so. In a cluster, each node
/// sends only those of its own keys.
///
/// # Errors
///
/// If `notify-keyspace-events` of the server is not set for them. If the server does not permit `CONFIG GET`, this is not checked.
pub async fn keyspace(client: &Client, options: KeyspaceOptions) -> Result<KeyspaceSubscription, KeyspaceError> {
    let KeyspaceOptions { filter, database, subscribe } = options;
    check_setting(client, &filter).await?;
    let is_by_key = matches!(filter, Filter::Keys(_));
    let database = database.unwrap_or(client.options().database);
    let prefix = format!("__{}@{database}__:", if is_by_key { "keyspace" } else { "keyevent" });
    let channel = |name: &[u8]| [prefix.as_bytes(), name].concat();
    let subscription = match filter {
        Filter::Keys(pattern) => client.psubscribe_with([channel(&pattern)], subscribe).await?,
        Filter::Events(events) => {
            client.subscribe_with(events.iter().map(|event| channel(event.as_bytes())), subscribe).await?
        }
    };
    Ok(KeyspaceSubscription { subscription, prefix, is_by_key })
}

async fn check_setting(client: &Client, filter: &Filter) -> Result<(), KeyspaceError> {
    let request = Command::new("CONFIG").arg("GET").arg(PARAMETER);
    let settings: HashMap<String, String> = match client.send(request).await {
        Ok(settings) => settings,
        // The user has no permission, or the command is renamed.
        Err(Error::Server(error)) if matches!(error.code, ErrorCode::NoPermission | ErrorCode::Err) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    let Some(current) = settings.get(PARAMETER) else { return Ok(()) };
    match missing_flags(current, filter) {
        None => Ok(()),
        Some(missing) => Err(KeyspaceError::Disabled { current: current.as_str().into(), missing: missing.into() }),
    }
}

/// Returns the flags that the setting has to have in addition.
fn missing_flags(current: &str, filter: &Filter) -> Option<String> {
    let has = |flag: char| current.contains(flag) || current.contains('A') && ALL_CLASSES.contains(flag);
    let has_class = current.chars().any(|flag| !matches!(flag, 'K' | 'E'));
    let mut missing = String::new();
    let mut require = |is_set: bool, flag: char| {
        if !is_set && !missing.contains(flag) {
            missing.push(flag);
        }
    };
    match filter {
        Filter::Keys(_) => {
            require(has('K'), 'K');
            require(has_class, 'A');
        }
        Filter::Events(events) => {
            require(has('E'), 'E');
            for event in events {
                match &**event {
                    "expired" => require(has('x'), 'x'),
                    "evicted" => require(has('e'), 'e'),
                    // `A` does not include these two.
                    "keymiss" => require(has('m'), 'm'),
                    "new" => require(has('n'), 'n'),
                    _ => require(has_class, 'A'),
                }
            }
        }
    }
    (!missing.is_empty()).then_some(missing)
}

impl KeyspaceSubscription {
    /// Waits for the next event, as [`Subscription::next`] does. The future is cancellation safe.
    pub async fn next(&mut self) -> Option<Result<Event<KeyEvent>, Error>> {
        loop {
            return Some(match self.subscription.next().await? {
                Ok(Event::Message(message)) => match self.key_event(&message) {
                    Some(event) => Ok(Event::Message(event)),
                    // Redis sends only channels that match.
                    None => continue,
                },
                Ok(Event::Gap { generation }) => Ok(Event::Gap { generation }),
                Ok(Event::Dropped { count }) => Ok(Event::Dropped { count }),
                Err(error) => Err(error),
            });
        }
    }

    /// Returns how many events were dropped because the subscriber was too slow.
    pub fn dropped(&self) -> u64 {
        self.subscription.dropped()
    }

    fn key_event(&self, message: &Message) -> Option<KeyEvent> {
        let (channel, payload) = (&message.channel, message.payload.clone());
        let rest = channel.strip_prefix(self.prefix.as_bytes()).map(|rest| channel.slice_ref(rest))?;
        Some(if self.is_by_key {
            KeyEvent { key: rest, event: payload }
        } else {
            KeyEvent { key: payload, event: rest }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_flags_are_named() {
        let (keys, events) = (Filter::Keys(b"*".to_vec()), |events: &[&str]| {
            Filter::Events(events.iter().map(|event| (*event).to_owned()).collect())
        });
        for (current, filter, missing) in [
            ("", keys.clone(), Some("KA")),
            ("AE", keys.clone(), Some("K")),
            ("K", keys.clone(), Some("A")),
            ("Kg", keys, None),
            ("", events(&["expired", "expired", "del"]), Some("ExA")),
            ("Ex", events(&["expired"]), None),
            ("AE", events(&["expired", "evicted", "del", "set"]), None),
            ("AKE", events(&["keymiss", "new"]), Some("mn")),
            ("KEn$m", events(&["keymiss", "new", "set"]), None),
        ] {
            assert_eq!(missing_flags(current, &filter).as_deref(), missing, "{current} {filter:?}");
        }
    }
}
