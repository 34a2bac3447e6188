//! A connection, as the server knows it.

use std::fmt;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::{Value as Json, json};
use tidewire_conn::{CloseCode, Message, PushPolicy, PushPriority};

use crate::protocol::reply;
use crate::push::outlet::Outlet;
use crate::push::subscription::Forward;
use crate::session::caller::Login;
use crate::{Code, RequestError};

/// A connection. Its actor alone makes requests of it; others may look, push and close.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) number: u64,
    pub(crate) address: IpAddr,
    connected_at: u64,
    pub(crate) outlet: Arc<Outlet>,
    /// How many subscriptions it has.
    pub(crate) subscription_count: Arc<AtomicUsize>,
    /// The subscription that is asked first when there is room for what was held back.
    turn: AtomicU64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    login: Option<Arc<Login>>,
    /// By their numbers. No map, whose smallest node has room for eleven: most connections have one or two.
    subscriptions: Vec<Arc<Forward>>,
    is_closed: bool,
}

impl State {
    /// Where the subscription of this number is, or else would be.
    fn place(&self, number: u64) -> Result<usize, usize> {
        self.subscriptions.binary_search_by_key(&number, |forward| forward.number)
    }

    fn remove(&mut self, number: u64) -> Option<Arc<Forward>> {
        let place = self.place(number).ok()?;
        Some(self.subscriptions.remove(place))
    }
}

impl Connection {
    pub(crate) fn new(number: u64, address: IpAddr, connected_at: u64, outlet: Outlet) -> Self {
        Self {
            number,
            address,
            connected_at,
            outlet: Arc::new(outlet),
            subscription_count: Arc::default(),
            turn: AtomicU64::new(0),
            state: Mutex::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Who is logged in.
    pub(crate) fn login(&self) -> Option<Arc<Login>> {
        self.state().login.clone()
    }

    /// Somebody logs in, or out.
    pub(crate) fn set_login(&self, login: Option<Arc<Login>>, is_required: bool) {
        self.owe_to(login.as_deref(), is_required);
        self.state().login = login;
    }

    /// What is followed ends with this session.
    pub(crate) fn owe_to(&self, login: Option<&Login>, is_required: bool) {
        // Where nobody has to log in, what was subscribed to goes on without.
        let expires_at = login.filter(|_| is_required).and_then(|login| login.session.expires_at);
        self.outlet.set_expiry(expires_at);
    }

    pub(crate) fn subscriptions(&self) -> Vec<Arc<Forward>> {
        self.state().subscriptions.clone()
    }

    /// Takes a subscription in, unless the connection has gone.
    pub(crate) fn keep(&self, forward: &Arc<Forward>) -> Result<(), RequestError> {
        let mut state = self.state();
        if state.is_closed {
            return Err(RequestError::new(Code::ShuttingDown, "the connection is closed"));
        }
        if let Err(place) = state.place(forward.number) {
            state.subscriptions.insert(place, Arc::clone(forward));
        }
        Ok(())
    }

    /// Ends a subscription. Returns whether it was there.
    pub(crate) fn unsubscribe(&self, number: u64) -> bool {
        let forward = self.state().remove(number);
        forward.inspect(|forward| forward.stop()).is_some()
    }

    /// A subscription has ended.
    pub(crate) fn forget(&self, number: u64) {
        // It is dropped when the lock has gone.
        let forward = self.state().remove(number);
        drop(forward);
    }

    /// There is room for what was held back.
    pub(crate) fn catch_up(&self) {
        let mut forwards = self.subscriptions();
        // Whoever had no room the last time comes first.
        let turn = self.turn.load(Relaxed);
        let first = forwards.partition_point(|forward| forward.number < turn);
        forwards.rotate_left(first);
        for forward in &forwards {
            forward.catch_up();
        }
        let next = forwards.iter().find(|forward| forward.is_behind());
        self.turn.store(next.map_or(0, |forward| forward.number), Relaxed);
    }

    /// The connection has gone.
    pub(crate) fn close(&self) {
        let mut state = self.state();
        state.is_closed = true;
        state.login = None;
        let subscriptions = std::mem::take(&mut state.subscriptions);
        drop(state);
        for forward in &subscriptions {
            forward.stop();
        }
    }

    /// Ends it because this session is revoked, if it still has it. Returns whether it had.
    pub(crate) fn revoke(&self, login: &Arc<Login>) -> bool {
        let mut state = self.state();
        if !state.login.as_ref().is_some_and(|current| Arc::ptr_eq(current, login)) {
            return false;
        }
        state.login = None;
        drop(state);
        for forward in self.subscriptions() {
            forward.stop();
        }
        let handle = &self.outlet.handle;
        // If there is no room for the notice, the close says it as well.
        let _ = handle.try_push(reply::session_revoked(), PushPriority::High, PushPolicy::DropIfFull);
        handle.close(Some(Message::close(CloseCode::new(4002), "session_revoked")));
        true
    }

    /// What the others are told of it.
    pub(crate) fn row(&self) -> ConnectionInfo {
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
        write!(f, "conn-{}", self.number)
    }
}

/// A connection, as it is listed.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConnectionInfo {
    /// Its name, `conn-` and a number.
    pub connection_id: String,
    /// Where it comes from.
    pub remote_address: IpAddr,
    /// Since when, in milliseconds since 1970.
    pub connected_at: u64,
    /// Who is logged in.
    pub user_id: Option<String>,
    /// In which roles.
    pub roles: Vec<String>,
    /// How many queries it follows.
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
