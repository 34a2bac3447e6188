//! The state of a connection, independent of its transport.

use std::fmt;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::{Value as Json, json};

use super::caller::Login;
use crate::protocol::disconnect::Disconnect;
use crate::push::sink::PushSink;
use crate::push::subscription::Subscription;
use crate::state::{LOCAL_CLIENT_BASE, ServerState};
use crate::{Code, RequestError};

/// The expiry of a session that does not expire.
const NEVER: u64 = u64::MAX;

/// A connected client: over a socket or in-process.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) server: Arc<ServerState>,
    /// Unique among all connections of the server.
    pub(crate) number: u64,
    pub(crate) address: IpAddr,
    connected_at: u64,
    pub(crate) sink: Arc<dyn PushSink>,
    /// The number of its subscriptions. Shared with their permits.
    pub(crate) subscription_count: Arc<AtomicUsize>,
    /// The expiry of the session on which the subscriptions depend, in milliseconds since 1970.
    session_expires_at: AtomicU64,
    state: Mutex<ConnectionState>,
}

#[derive(Debug, Default)]
struct ConnectionState {
    login: Option<Arc<Login>>,
    /// Sorted by number. A vector, because most connections have only one or two, and a B-tree node has space for eleven.
    subscriptions: Vec<Arc<Subscription>>,
    closed: Option<Disconnect>,
}

impl ConnectionState {
    /// Returns the index of a subscription, or the index at which to insert it.
    fn index_of(&self, number: u64) -> Result<usize, usize> {
        self.subscriptions.binary_search_by_key(&number, |subscription| subscription.number)
    }

    fn remove(&mut self, number: u64) -> Option<Arc<Subscription>> {
        let index = self.index_of(number).ok()?;
        let removed = self.subscriptions.remove(index);
        self.subscriptions.shrink_to_fit();
        Some(removed)
    }
}

impl Connection {
    pub(crate) fn new(server: &Arc<ServerState>, number: u64, address: IpAddr, sink: Arc<dyn PushSink>) -> Self {
        Self {
            server: Arc::clone(server),
            number,
            address,
            connected_at: server.store.now(),
            sink,
            subscription_count: Arc::default(),
            session_expires_at: AtomicU64::new(NEVER),
            state: Mutex::default(),
        }
    }

    /// Returns whether this is an in-process client.
    pub(crate) fn is_local(&self) -> bool {
        self.number >= LOCAL_CLIENT_BASE
    }

    fn state(&self) -> MutexGuard<'_, ConnectionState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn login(&self) -> Option<Arc<Login>> {
        self.state().login.clone()
    }

    /// Returns the login, or an error if the connection is closed.
    pub(crate) fn login_if_open(&self) -> Result<Option<Arc<Login>>, RequestError> {
        let state = self.state();
        match state.closed {
            None => Ok(state.login.clone()),
            Some(reason) => Err(closed_error(reason)),
        }
    }

    /// Replaces the login, unless the connection is closed.
    pub(crate) fn set_login(&self, login: Option<Arc<Login>>) {
        self.set_session_expiry(login.as_deref());
        let mut state = self.state();
        if state.closed.is_none() {
            state.login = login;
        }
    }

    /// Sets the session on which the subscriptions depend. They end when it expires.
    fn set_session_expiry(&self, login: Option<&Login>) {
        // If no login is required, subscriptions outlive the session.
        let expires_at = login.filter(|_| self.server.requires_auth()).and_then(|login| login.session.expires_at);
        self.session_expires_at.store(expires_at.unwrap_or(NEVER), Relaxed);
    }

    /// Returns whether the session on which the subscriptions depend has expired.
    pub(crate) fn is_session_expired(&self, now: impl FnOnce() -> u64) -> bool {
        let expires_at = self.session_expires_at.load(Relaxed);
        expires_at != NEVER && expires_at <= now()
    }

    pub(crate) fn subscriptions(&self) -> Vec<Arc<Subscription>> {
        self.state().subscriptions.clone()
    }

    pub(crate) fn subscription(&self, number: u64) -> Option<Arc<Subscription>> {
        let state = self.state();
        state.index_of(number).ok().map(|index| Arc::clone(&state.subscriptions[index]))
    }

    /// Adds a subscription, unless the connection is closed.
    pub(crate) fn add_subscription(&self, subscription: &Arc<Subscription>) -> Result<(), RequestError> {
        let mut state = self.state();
        if let Some(reason) = state.closed {
            return Err(closed_error(reason));
        }
        if let Err(index) = state.index_of(subscription.number) {
            state.subscriptions.reserve_exact(1);
            state.subscriptions.insert(index, Arc::clone(subscription));
        }
        Ok(())
    }

    /// Ends a subscription at the request of the client. Returns whether it existed.
    pub(crate) fn unsubscribe(&self, number: u64) -> bool {
        let subscription = self.state().remove(number);
        let Some(subscription) = subscription else { return false };
        subscription.cancel();
        self.sink.discard_unsent(number);
        // The pusher may be waiting for the newest result of the subscription, and an in-process client for its next push.
        self.sink.wake(number);
        true
    }

    /// Removes a subscription that has ended.
    pub(crate) fn remove_subscription(&self, number: u64) {
        // Dropped after the lock is released.
        let subscription = self.state().remove(number);
        drop(subscription);
    }

    /// Returns the error for requests if the connection is closed.
    pub(crate) fn closed_error(&self) -> Option<RequestError> {
        self.state().closed.map(closed_error)
    }

    /// Closes the connection and cancels its subscriptions. Returns whether it was open.
    pub(crate) fn close(&self, reason: Disconnect) -> bool {
        self.close_if(reason, |_| true)
    }

    /// Closes the connection because its session is revoked, if `login` is still current. Returns whether it was closed.
    pub(crate) fn revoke(&self, login: &Arc<Login>) -> bool {
        let is_current =
            |state: &ConnectionState| state.login.as_ref().is_some_and(|current| Arc::ptr_eq(current, login));
        self.close_if(Disconnect::SESSION_REVOKED, is_current)
    }

    fn close_if(&self, reason: Disconnect, condition: impl FnOnce(&ConnectionState) -> bool) -> bool {
        let mut state = self.state();
        if state.closed.is_some() || !condition(&state) {
            return false;
        }
        (state.closed, state.login) = (Some(reason), None);
        let subscriptions = std::mem::take(&mut state.subscriptions);
        drop(state);
        for subscription in subscriptions {
            subscription.cancel();
            self.sink.discard_unsent(subscription.number);
        }
        self.sink.close(reason);
        true
    }

    pub(crate) fn info(&self) -> ConnectionInfo {
        let login = self.login();
        let session = login.as_ref().map(|login| &login.session);
        ConnectionInfo {
            connection_id: self.to_string(),
            remote_address: self.address,
            connected_at: self.connected_at,
            user_id: session.map(|session| session.user_id.clone()),
            roles: session.map(|session| session.roles.clone()).unwrap_or_default(),
            store_subscriptions: self.subscription_count.load(SeqCst),
        }
    }
}

impl fmt::Display for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.number.checked_sub(LOCAL_CLIENT_BASE) {
            Some(number) => write!(f, "local-{number}"),
            None => write!(f, "conn-{}", self.number),
        }
    }
}

fn closed_error(reason: Disconnect) -> RequestError {
    match reason {
        Disconnect::SESSION_REVOKED => {
            RequestError::new(Code::SessionRevoked, "the sessions of this user were revoked")
        }
        Disconnect::SERVER_SHUTDOWN => RequestError::shutting_down(),
        _ => RequestError::new(Code::ShuttingDown, "the connection is closed"),
    }
}

/// Information about a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConnectionInfo {
    /// The connection id: `conn-` and a number, or `local-` and a number for an in-process client.
    pub connection_id: String,
    /// The address of the client.
    pub remote_address: IpAddr,
    /// When it was opened, in milliseconds since 1970.
    pub connected_at: u64,
    /// The user who is logged in, if any.
    pub user_id: Option<String>,
    /// The roles of the user.
    pub roles: Vec<String>,
    /// The number of subscriptions.
    pub store_subscriptions: usize,
}

impl ConnectionInfo {
    pub(crate) fn to_json(&self) -> Json {
        json!({
            "connectionId": self.connection_id,
            "remoteAddress": self.remote_address.to_string(),
            "connectedAt": self.connected_at,
            "authenticated": self.user_id.is_some(),
            "userId": self.user_id,
            "roles": self.roles,
            "storeSubscriptionCount": self.store_subscriptions,
            "rulesSubscriptionCount": 0,
        })
    }
}
