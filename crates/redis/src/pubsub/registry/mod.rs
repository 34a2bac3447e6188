//! The subscriptions of a client, and which of their channels are subscribed on the server.
//!
//! It has no socket and no clock. Subscriptions join and leave at any time. The connection asks for the
//! [next command](Registry::next_command) and reports each response, which belongs to the oldest command in flight: the server
//! executes the commands in order, and answers each with exactly one confirmation or error, because each names one channel.
//!
//! A channel has at most one command in flight. When its response has come, the channel is compared with what the subscriptions want,
//! and gets another command if they differ. So whatever joins and leaves meanwhile, the channels on the server become those
//! that are wanted. After a reconnect no channel is subscribed, and the same comparison restores all of them.
//!
//! What has to be done outside of the critical section, such as waking a caller, is collected as [`Effect`]s.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::task::Waker;

use bytes::Bytes;
use tokio::sync::oneshot;

use super::inbox::Inbox;
use crate::connection::Backoff;
use crate::{ConnectionError, Error, RequestOutcome, ServerError, WhileDown};

/// The kinds of names that can be subscribed to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Kind {
    Channel,
    Pattern,
    Shard,
}

/// A change of the subscriptions on the server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Change {
    pub(super) subscribes: bool,
    pub(super) kind: Kind,
    pub(super) name: Bytes,
}

#[derive(Default)]
pub(super) struct Registry {
    /// The wanted channels, and those that are subscribed on the server, by kind.
    channels: [HashMap<Bytes, Channel>; 3],
    subscribers: HashMap<u64, Subscriber>,
    next_id: u64,
    /// The channels that need a command, in order. Each is in it at most once.
    due: BTreeMap<u64, (Kind, Bytes)>,
    next_due: u64,
    in_flight: VecDeque<InFlight>,
    link: Link,
    generation: u64,
    /// Channels that have to be restored before the connection is open.
    restoring: usize,
    /// Who has a gap once the connection is open.
    interrupted: Vec<Arc<Inbox>>,
    /// Why there is no open connection, if it was lost or an attempt has failed.
    last_error: Option<ConnectionError>,
    pub(super) backoff: Backoff,
    has_actor: bool,
    is_closed: bool,
    /// Wakes the actor.
    waker: Option<Waker>,
    effects: Vec<Effect>,
}

/// The state of the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Link {
    #[default]
    Down,
    Connecting,
    Restoring,
    Open,
}

/// A channel, pattern or shard channel.
#[derive(Default)]
struct Channel {
    state: ChannelState,
    /// The actor clones it to deliver a message, so it is rarely copied to change it.
    listeners: Arc<Vec<Listener>>,
    /// Its key in `due`.
    due: Option<u64>,
    /// Whether the connection is not open before it is restored.
    is_restoring: bool,
    /// Whether the server had ended the subscription.
    was_interrupted: bool,
}

/// What the server was asked last and has answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum ChannelState {
    #[default]
    Absent,
    Subscribing,
    Subscribed,
    Unsubscribing,
}

#[derive(Clone)]
pub(super) struct Listener {
    id: u64,
    pub(super) inbox: Arc<Inbox>,
}

struct Subscriber {
    inbox: Arc<Inbox>,
    kind: Kind,
    /// Without duplicates.
    names: Box<[Bytes]>,
    /// Until all channels are confirmed.
    pending: Option<Pending>,
}

struct Pending {
    unconfirmed: usize,
    confirmation: oneshot::Sender<Result<(), Error>>,
}

/// A command without a response.
enum InFlight {
    Change(Change),
    Ping,
    Auth,
}

/// What the server has replied to, besides changes.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Replied {
    Ping,
    Auth,
}

/// What is done outside of the critical section.
pub(super) enum Effect {
    Confirm(oneshot::Sender<Result<(), Error>>, Result<(), Error>),
    Gap(Arc<Inbox>, u64),
    End(Arc<Inbox>, Option<Error>),
}

impl Effect {
    pub(super) fn run(self) {
        match self {
            // Fails if the caller has gone away.
            Self::Confirm(confirmation, result) => drop(confirmation.send(result)),
            Self::Gap(inbox, generation) => inbox.push_gap(generation),
            Self::End(inbox, error) => inbox.end(error),
        }
    }
}

/// The subscriptions and channels now.
pub(super) struct Census {
    pub(super) subscriptions: usize,
    pub(super) channels: usize,
    pub(super) is_open: bool,
    pub(super) generation: u64,
}

/// Subscriptions.
impl Registry {
    /// Adds a subscription, which is confirmed once all its channels are. Returns its ID, and whether the actor has to be started.
    pub(super) fn join(
        &mut self,
        kind: Kind,
        names: Box<[Bytes]>,
        inbox: Arc<Inbox>,
        confirmation: oneshot::Sender<Result<(), Error>>,
        while_down: WhileDown,
    ) -> Result<(u64, bool), Error> {
        if self.is_closed {
            return Err(Error::Closed { outcome: RequestOutcome::NeverSent });
        }
        let is_rejected = match self.link {
            Link::Down => self.has_actor && while_down != WhileDown::Queue,
            Link::Connecting | Link::Restoring => while_down == WhileDown::Fail,
            Link::Open => false,
        };
        if let Some(source) = self.last_error.as_ref().filter(|_| is_rejected) {
            return Err(Error::Lost { outcome: RequestOutcome::NeverSent, source: source.clone() });
        }
        let id = self.next_id;
        self.next_id += 1;
        let mut unconfirmed = 0;
        for name in &names {
            let channel = self.channels[kind as usize].entry(name.clone()).or_default();
            Arc::make_mut(&mut channel.listeners).push(Listener { id, inbox: Arc::clone(&inbox) });
            unconfirmed += usize::from(channel.state != ChannelState::Subscribed);
            self.reconcile(kind, name);
        }
        let pending = Some(Pending { unconfirmed, confirmation });
        self.subscribers.insert(id, Subscriber { inbox, kind, names, pending });
        if unconfirmed == 0 {
            self.confirm(id);
        }
        Ok((id, !std::mem::replace(&mut self.has_actor, true)))
    }

    /// Removes a subscription whose subscriber has gone away.
    pub(super) fn abandon(&mut self, id: u64) {
        self.end_pending_with(id, Error::Closed { outcome: RequestOutcome::MaybeExecuted }, None);
    }

    /// Removes a subscription, if it has not ended before.
    fn leave(&mut self, id: u64) -> Option<Left> {
        let Subscriber { inbox, kind, names, pending } = self.subscribers.remove(&id)?;
        for name in &names {
            if let Some(channel) = self.channels[kind as usize].get_mut(name) {
                let listeners = Arc::make_mut(&mut channel.listeners);
                if let Some(index) = listeners.iter().position(|listener| listener.id == id) {
                    listeners.swap_remove(index);
                }
            }
            self.reconcile(kind, name);
        }
        Some(Left { inbox, pending })
    }

    /// Ends all subscriptions, and rejects new ones.
    pub(super) fn close(&mut self) {
        self.is_closed = true;
        let outcome = if self.is_connected() { RequestOutcome::MaybeExecuted } else { RequestOutcome::NeverSent };
        for id in self.ids() {
            self.end_pending_with(id, Error::Closed { outcome }, None);
        }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.is_closed
    }

    pub(super) fn census(&self) -> Census {
        Census {
            subscriptions: self.subscribers.len(),
            channels: self.channels.iter().map(HashMap::len).sum(),
            is_open: self.link == Link::Open,
            generation: self.generation,
        }
    }

    pub(super) fn take_effects(&mut self) -> Vec<Effect> {
        std::mem::take(&mut self.effects)
    }

    pub(super) fn take_waker(&mut self) -> Option<Waker> {
        self.waker.take()
    }

    /// Sets the waker of the actor. Returns the one before, to be dropped outside of the critical section.
    pub(super) fn set_waker(&mut self, waker: Waker) -> Option<Waker> {
        self.waker.replace(waker)
    }

    fn ids(&self) -> Vec<u64> {
        self.subscribers.keys().copied().collect()
    }

    fn confirm(&mut self, id: u64) {
        let Some(subscriber) = self.subscribers.get_mut(&id) else { return };
        if let Some(pending) = subscriber.pending.take() {
            subscriber.inbox.start();
            self.effects.push(Effect::Confirm(pending.confirmation, Ok(())));
        }
    }

    /// Ends a subscription. The error goes to the caller that waits for the confirmation, or else is the last event.
    fn end(&mut self, id: u64, error: &Error) {
        self.end_pending_with(id, error.clone(), Some(error.clone()));
    }

    fn end_pending_with(&mut self, id: u64, pending_error: Error, last: Option<Error>) {
        let Some(left) = self.leave(id) else { return };
        self.effects.push(match left.pending {
            Some(pending) => Effect::Confirm(pending.confirmation, Err(pending_error)),
            None => Effect::End(left.inbox, last),
        });
        // After its end, so that it has no gap.
        self.open_if_restored();
    }
}

/// A subscription that was removed.
pub(super) struct Left {
    inbox: Arc<Inbox>,
    pending: Option<Pending>,
}

/// The connection.
impl Registry {
    /// Begins an attempt to connect. Returns false if there is no subscription, or the client is closed: then the actor has ended.
    pub(super) fn begin_attempt(&mut self) -> bool {
        self.has_actor = !self.is_closed && !self.subscribers.is_empty();
        if self.has_actor {
            self.link = Link::Connecting;
        } else {
            self.last_error = None;
        }
        self.has_actor
    }

    /// Ends the actor if there is no channel, and returns whether it has ended.
    pub(super) fn end_if_unused(&mut self) -> bool {
        let ends = self.has_no_channels();
        if ends {
            self.link = Link::Down;
            self.has_actor = false;
        }
        ends
    }

    /// The actor has ended because the client is closed.
    pub(super) fn closed(&mut self) {
        self.link = Link::Down;
        self.has_actor = false;
        self.in_flight.clear();
        self.due.clear();
        for channels in &mut self.channels {
            channels.clear();
        }
    }

    pub(super) fn has_no_channels(&self) -> bool {
        self.channels.iter().all(HashMap::is_empty)
    }

    /// A new connection is there, without any subscription.
    pub(super) fn connected(&mut self) {
        self.link = Link::Restoring;
        self.in_flight.clear();
        let started = self.subscribers.values().filter(|subscriber| subscriber.pending.is_none());
        self.interrupted = started.map(|subscriber| Arc::clone(&subscriber.inbox)).collect();
        for kind in [Kind::Channel, Kind::Pattern, Kind::Shard] {
            let names: Vec<_> = self.channels[kind as usize].keys().cloned().collect();
            for name in names {
                if let Some(channel) = self.channels[kind as usize].get_mut(&name) {
                    channel.is_restoring =
                        channel.listeners.iter().any(|listener| is_started(&self.subscribers, listener));
                    self.restoring += usize::from(channel.is_restoring);
                }
                self.reconcile(kind, &name);
            }
        }
        self.open_if_restored();
    }

    /// The connection was lost, or there is none. If it is final, all subscriptions end with the error. Otherwise those that are not
    /// confirmed yet do, unless they may wait for another connection.
    pub(super) fn lost(&mut self, error: &ConnectionError, is_final: bool, while_down: WhileDown) {
        let outcome = if self.is_connected() { RequestOutcome::MaybeExecuted } else { RequestOutcome::NeverSent };
        self.link = Link::Down;
        self.in_flight.clear();
        self.due.clear();
        self.interrupted.clear();
        self.restoring = 0;
        for channels in &mut self.channels {
            channels.retain(|_, channel| !channel.listeners.is_empty());
            for channel in channels.values_mut() {
                *channel = Channel { listeners: Arc::clone(&channel.listeners), ..Channel::default() };
            }
        }
        let lost = Error::Lost { outcome, source: error.clone() };
        for id in self.ids() {
            match self.subscribers.get_mut(&id) {
                Some(Subscriber { names, pending: Some(pending), .. })
                    if while_down == WhileDown::Queue && !is_final =>
                {
                    pending.unconfirmed = names.len();
                }
                Some(subscriber) if is_final || subscriber.pending.is_some() => self.end(id, &lost),
                _ => {}
            }
        }
        self.last_error = (!is_final).then(|| error.clone());
        self.has_actor &= !is_final;
    }

    /// Takes the next command, unless this number are in flight.
    pub(super) fn next_command(&mut self, max_in_flight: usize) -> Option<Change> {
        if !self.is_connected() || self.in_flight.len() >= max_in_flight {
            return None;
        }
        let (_, (kind, name)) = self.due.pop_first()?;
        let channel = self.channels[kind as usize].get_mut(&name)?;
        channel.due = None;
        let subscribes = channel.state == ChannelState::Absent;
        channel.state = if subscribes { ChannelState::Subscribing } else { ChannelState::Unsubscribing };
        let change = Change { subscribes, kind, name };
        self.in_flight.push_back(InFlight::Change(change.clone()));
        Some(change)
    }

    /// Records that a `PING` is sent.
    pub(super) fn ping(&mut self) {
        self.in_flight.push_back(InFlight::Ping);
    }

    /// Records that an `AUTH` is sent. Returns false if there is one in flight already.
    pub(super) fn authenticate(&mut self) -> bool {
        let may_send = !self.in_flight.iter().any(|command| matches!(command, InFlight::Auth));
        if may_send {
            self.in_flight.push_back(InFlight::Auth);
        }
        may_send
    }

    /// The server has answered a `PING` or an `AUTH`.
    pub(super) fn replied(&mut self) -> Result<Replied, ConnectionError> {
        match self.in_flight.pop_front() {
            Some(InFlight::Ping) => Ok(Replied::Ping),
            Some(InFlight::Auth) => Ok(Replied::Auth),
            _ => Err(ConnectionError::UnexpectedReply),
        }
    }

    /// The server has confirmed a change, or has ended a subscription of its own accord.
    pub(super) fn confirmed(&mut self, subscribes: bool, kind: Kind, name: &[u8]) -> Result<(), ConnectionError> {
        let is_answer = matches!(
            self.in_flight.front(),
            Some(InFlight::Change(change)) if change.subscribes == subscribes && change.kind == kind && change.name == name
        );
        if is_answer {
            self.in_flight.pop_front();
        } else if subscribes {
            return Err(ConnectionError::UnexpectedReply);
        }
        let Some((name, channel)) = self.channels[kind as usize].get_key_value(name) else { return Ok(()) };
        let (name, state) = (name.clone(), channel.state);
        if subscribes {
            self.subscribed(kind, &name);
        } else if is_answer {
            self.channel(kind, &name).state = ChannelState::Absent;
        } else if state == ChannelState::Subscribed {
            // A cluster does this when it moves the slot of a shard channel. The attempt to subscribe again shows where it is.
            let channel = self.channel(kind, &name);
            channel.state = ChannelState::Absent;
            channel.was_interrupted = true;
            for Listener { id, .. } in &*Arc::clone(&channel.listeners) {
                if let Some(Subscriber { pending: Some(pending), .. }) = self.subscribers.get_mut(id) {
                    pending.unconfirmed += 1;
                }
            }
        }
        self.reconcile(kind, &name);
        self.open_if_restored();
        Ok(())
    }

    /// The server has answered with an error.
    pub(super) fn refused(&mut self, error: ServerError) -> Result<(), ConnectionError> {
        let Change { subscribes, kind, name } = match self.in_flight.pop_front() {
            Some(InFlight::Change(change)) => change,
            Some(InFlight::Ping | InFlight::Auth) => return Ok(()),
            None => return Err(ConnectionError::UnexpectedReply),
        };
        let Some(channel) = self.channels[kind as usize].get_mut(&name) else { return Ok(()) };
        let was_started = channel.listeners.iter().any(|listener| is_started(&self.subscribers, listener));
        if !subscribes || was_started && error.code.is_temporary() {
            return Err(ConnectionError::Subscriptions(Box::new(error)));
        }
        channel.state = ChannelState::Absent;
        let ids: Vec<_> = channel.listeners.iter().map(|listener| listener.id).collect();
        let error = Error::Server(ServerError { message: named(&error.message, &name), code: error.code });
        for id in ids {
            self.end(id, &error);
        }
        self.reconcile(kind, &name);
        self.open_if_restored();
        Ok(())
    }

    /// Returns the name of a channel and its listeners.
    pub(super) fn listeners(&self, kind: Kind, name: &[u8]) -> Option<(Bytes, Arc<Vec<Listener>>)> {
        let (name, channel) = self.channels[kind as usize].get_key_value(name)?;
        Some((name.clone(), Arc::clone(&channel.listeners)))
    }

    /// Whether the next reply is that to an `AUTH`.
    pub(super) fn is_authenticating(&self) -> bool {
        matches!(self.in_flight.front(), Some(InFlight::Auth))
    }

    pub(super) fn is_connected(&self) -> bool {
        matches!(self.link, Link::Restoring | Link::Open)
    }

    fn channel(&mut self, kind: Kind, name: &Bytes) -> &mut Channel {
        self.channels[kind as usize].entry(name.clone()).or_default()
    }

    fn subscribed(&mut self, kind: Kind, name: &Bytes) {
        let channel = self.channel(kind, name);
        channel.state = ChannelState::Subscribed;
        let was_restoring = std::mem::take(&mut channel.is_restoring);
        let was_interrupted = std::mem::take(&mut channel.was_interrupted);
        let listeners = Arc::clone(&channel.listeners);
        self.restoring -= usize::from(was_restoring);
        for Listener { id, inbox } in &*listeners {
            match self.subscribers.get_mut(id).map(|subscriber| &mut subscriber.pending) {
                Some(Some(pending)) => {
                    pending.unconfirmed -= 1;
                    if pending.unconfirmed == 0 {
                        self.confirm(*id);
                    }
                }
                Some(None) if was_interrupted => self.effects.push(Effect::Gap(Arc::clone(inbox), self.generation)),
                Some(None) | None => {}
            }
        }
    }

    /// Compares a channel on the server with what is wanted, and queues the command that it needs.
    fn reconcile(&mut self, kind: Kind, name: &Bytes) {
        let is_connected = self.is_connected();
        let Some(channel) = self.channels[kind as usize].get_mut(name) else { return };
        let needs_command = match (channel.state, channel.listeners.is_empty()) {
            (ChannelState::Absent, false) | (ChannelState::Subscribed, true) => is_connected,
            (ChannelState::Absent, true) => {
                self.restoring -= usize::from(channel.is_restoring);
                if let Some(due) = channel.due {
                    self.due.remove(&due);
                }
                self.channels[kind as usize].remove(name);
                return;
            }
            _ => false,
        };
        match (needs_command, channel.due) {
            (true, None) => {
                channel.due = Some(self.next_due);
                self.due.insert(self.next_due, (kind, name.clone()));
                self.next_due += 1;
            }
            (false, Some(due)) => {
                channel.due = None;
                self.due.remove(&due);
            }
            _ => {}
        }
    }

    /// Reports the connection as open once all channels are restored.
    fn open_if_restored(&mut self) {
        if self.link == Link::Restoring && self.restoring == 0 && !self.is_closed {
            self.link = Link::Open;
            self.last_error = None;
            self.generation += 1;
            let generation = self.generation;
            let gaps = self.interrupted.drain(..).map(|inbox| Effect::Gap(inbox, generation));
            self.effects.extend(gaps);
        }
    }
}

fn is_started(subscribers: &HashMap<u64, Subscriber>, listener: &Listener) -> bool {
    subscribers.get(&listener.id).is_some_and(|subscriber| subscriber.pending.is_none())
}

/// Adds the name of the channel to the message of an error.
fn named(message: &str, name: &[u8]) -> Box<str> {
    format!("{message} (channel \"{}\")", crate::error::shown(name)).into()
}

#[cfg(test)]
mod tests;
