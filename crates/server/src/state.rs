//! What all connections of a server share.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use serde_json::{Value as Json, json};
use tidewire_live::{Live, LiveOptions};
use tidewire_store::Store;
use tokio::runtime::Handle;

use crate::auth::{Revocations, Session};
use crate::metrics::counters::Counters;
use crate::ops::store_reads;
use crate::push::programmatic::Host;
use crate::session::connection::{Connection, ConnectionInfo};
use crate::session::rate_limit::RateLimiter;
use crate::{Auth, ServerOptions};

/// What all connections of a server share.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) options: ServerOptions,
    pub(crate) auth: Option<Arc<Auth>>,
    pub(crate) store: Store,
    pub(crate) live: Live,
    /// Queries that are code of the host.
    pub(crate) host: Host,
    pub(crate) rate: Option<RateLimiter>,
    pub(crate) revocations: Revocations,
    pub(crate) counters: Counters,
    pub(crate) started: Instant,
    /// Where connections live.
    pub(crate) runtime: Handle,
    subscriptions: AtomicU64,
    connections: Mutex<BTreeMap<u64, Arc<Connection>>>,
}

impl Core {
    pub(crate) fn new(store: Store, options: ServerOptions) -> std::io::Result<Self> {
        let mut live = LiveOptions::default();
        live.max_subscriptions = options.connection_limits.max_total_subscriptions;
        Ok(Self {
            auth: options.auth.clone().map(Arc::new),
            live: Live::with_options(store.clone(), live),
            host: Host::start(&store, &options.queries)?,
            rate: options.rate_limit.map(RateLimiter::new),
            revocations: Revocations::new(options.revocation_ttl),
            counters: Counters::default(),
            started: Instant::now(),
            runtime: Handle::current(),
            subscriptions: AtomicU64::new(0),
            connections: Mutex::default(),
            store,
            options,
        })
    }

    fn connections(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<Connection>>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn connected(&self, connection: &Arc<Connection>) {
        self.connections().insert(connection.number, Arc::clone(connection));
    }

    pub(crate) fn disconnected(&self, connection: &Connection) {
        let gone = self.connections().remove(&connection.number);
        drop(gone);
    }

    pub(crate) fn all_connections(&self) -> Vec<Arc<Connection>> {
        self.connections().values().cloned().collect()
    }

    pub(crate) fn connection_count(&self) -> usize {
        self.connections().len()
    }

    /// The number of the next subscription.
    pub(crate) fn next_subscription(&self) -> u64 {
        self.subscriptions.fetch_add(1, Relaxed) + 1
    }

    /// Whether clients have to log in.
    pub(crate) fn requires_auth(&self) -> bool {
        self.auth.as_ref().is_some_and(|auth| auth.required)
    }

    /// Ends the connections of these sessions; their users may not log in for a while. Returns how many there were.
    pub(crate) fn revoke(&self, is_meant: impl Fn(&Session) -> bool) -> usize {
        let now = self.store.now();
        let revoke = |connection: &Arc<Connection>| {
            while let Some(login) = connection.login().filter(|login| is_meant(&login.session)) {
                // Before its client hears of it, and tries again.
                self.revocations.revoke(&login.session.user_id, now);
                // If another has logged in there just now, they may be meant as well.
                if connection.revoke(&login) {
                    return true;
                }
            }
            false
        };
        let count = self.all_connections().iter().filter(|connection| revoke(connection)).count();
        self.counters.revoked.fetch_add(count as u64, Relaxed);
        count
    }

    /// Every connection, in the order of coming.
    pub(crate) fn rows(&self) -> Vec<ConnectionInfo> {
        self.all_connections().iter().map(|connection| connection.row()).collect()
    }

    pub(crate) fn store_stats(&self) -> Json {
        let subscriptions = self.counters.subscriptions.load(SeqCst);
        let snapshot = self.store.snapshot();
        let programmatic =
            self.options.queries.keys().filter(|name| snapshot.state.query_config(name).is_err()).count();
        store_reads::store_stats(&self.options.name, &self.store.stats(), programmatic, subscriptions)
    }

    /// The named queries, and how many follow each.
    pub(crate) fn queries(&self) -> Json {
        let mut following = BTreeMap::<String, usize>::new();
        for connection in self.all_connections() {
            for forward in connection.subscriptions() {
                if let Some(name) = forward.source.name() {
                    *following.entry(name.to_owned()).or_default() += 1;
                }
            }
        }
        let count = |name: &str| following.get(name).copied().unwrap_or_default();
        let snapshot = self.store.snapshot();
        // A name of the host's stands for the host's query.
        let queries = snapshot.state.queries().filter(|(name, _)| !self.host.has(name));
        let declarative = queries.map(|(name, config)| {
            json!({"name": name, "type": "declarative", "activeSubscriptions": count(&name), "config": config})
        });
        let programmatic = self
            .options
            .queries
            .keys()
            .map(|name| json!({"name": name, "type": "programmatic", "activeSubscriptions": count(name)}));
        json!({"queries": declarative.chain(programmatic).collect::<Vec<_>>()})
    }

    pub(crate) fn server_stats(&self) -> Json {
        let rows = self.rows();
        let authenticated = rows.iter().filter(|row| row.user_id.is_some()).count();
        let subscriptions: usize = rows.iter().map(|row| row.store_subscriptions).sum();
        json!({
            "name": self.options.name,
            "connectionCount": rows.len(),
            "authEnabled": self.auth.is_some(),
            "rateLimitEnabled": self.rate.is_some(),
            "rulesEnabled": false,
            "connections": {
                "active": rows.len(),
                "authenticated": authenticated,
                "totalStoreSubscriptions": subscriptions,
                "totalRulesSubscriptions": 0,
            },
            "store": self.store_stats(),
            "rules": null,
        })
    }
}
