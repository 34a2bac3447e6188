//! The state shared by all connections of a server.

use std::collections::BTreeMap;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use serde_json::Value as Json;
use tidewire_conn::MemoryLimit;
use tidewire_live::{Live, LiveOptions};
use tidewire_store::Store;
use tokio::runtime::Handle;

use crate::auth::{Auth, TokenValidator};
use crate::auth::{ReloadableValidator, Revocations, Session};
use crate::metrics::counters::Counters;
use crate::metrics::operations::OperationMetrics;
use crate::ops::table::Capabilities;
use crate::protocol::disconnect::Disconnect;
use crate::push::programmatic::ProgrammaticQueries;
use crate::session::before_login::BeforeLoginLimits;
use crate::session::connection::{Connection, ConnectionInfo};
use crate::session::login_throttle::LoginThrottle;
use crate::session::rate_limit::{RateKey, RateLimiter};
use crate::work::WorkPool;
use crate::{ServerOptions, revoked_users};

/// The state shared by all connections of a server.
#[derive(Debug)]
pub(crate) struct ServerState {
    pub(crate) options: ServerOptions,
    pub(crate) capabilities: Capabilities,
    /// The auth options. Their validator is [`Self::validator`].
    pub(crate) auth: Option<Arc<Auth>>,
    validator: Option<Arc<ReloadableValidator>>,
    pub(crate) store: Store,
    pub(crate) live: Live,
    pub(crate) work: WorkPool,
    pub(crate) programmatic: ProgrammaticQueries,
    pub(crate) rate_limiter: Option<RateLimiter>,
    /// `None` if clients need not log in.
    pub(crate) before_login: Option<BeforeLoginLimits>,
    /// `None` if auth is disabled.
    pub(crate) login_throttle: Option<LoginThrottle>,
    pub(crate) revocations: Revocations,
    pub(crate) counters: Counters,
    /// The memory limit of all socket connections.
    pub(crate) memory: MemoryLimit,
    pub(crate) operations: OperationMetrics,
    pub(crate) started: Instant,
    /// The number of subscriptions of all connections.
    pub(crate) subscriptions: AtomicUsize,
    /// Whether a backup is running. At most one runs at a time.
    pub(crate) is_backing_up: AtomicBool,
    is_stopped: AtomicBool,
    /// The runtime on which the server was started.
    pub(crate) runtime: Handle,
    last_subscription: AtomicU64,
    last_local_client: AtomicU64,
    /// Randomly seeded, so that a client cannot choose a user name whose hash collides with that of another owner.
    owner_hasher: RandomState,
    connections: Mutex<BTreeMap<u64, Arc<Connection>>>,
}

impl ServerState {
    pub(crate) fn new(store: Store, mut options: ServerOptions) -> std::io::Result<Self> {
        let live = LiveOptions::default()
            .max_subscriptions(options.connection_limits.max_total_subscriptions)
            .max_result_bytes(options.max_result_bytes)
            .evaluation_timeout(options.request_timeout);
        let mut capabilities = Capabilities::default();
        if options.auth.is_some() {
            capabilities = capabilities.with(Capabilities::AUTH);
        }
        if options.backup_dir.is_some() {
            capabilities = capabilities.with(Capabilities::BACKUP);
        }
        let validator = options.auth.as_ref().map(|auth| Arc::clone(&auth.validator));
        let validator = validator.map(|validator| Arc::new(ReloadableValidator::new(validator)));
        if let (Some(auth), Some(validator)) = (&mut options.auth, &validator) {
            auth.validator = Arc::clone(validator) as Arc<dyn TokenValidator>;
        }
        let revocations = Revocations::new(options.revocation_ttl);
        revoked_users::restore(&store, &revocations);
        let required = options.auth.as_ref().filter(|auth| auth.required);
        Ok(Self {
            capabilities,
            auth: options.auth.clone().map(Arc::new),
            validator,
            live: Live::with_options(store.clone(), live),
            work: WorkPool::start().map_err(std::io::Error::other)?,
            programmatic: ProgrammaticQueries::start(&store, &options.queries, &Handle::current())?,
            rate_limiter: options.rate_limit.map(RateLimiter::new),
            before_login: required.map(|auth| BeforeLoginLimits::new(&auth.before_login)),
            login_throttle: options.auth.as_ref().map(|auth| LoginThrottle::new(auth.login_rate_limit)),
            revocations,
            counters: Counters::default(),
            memory: MemoryLimit::new(options.memory.max_bytes),
            operations: OperationMetrics::default(),
            started: Instant::now(),
            subscriptions: AtomicUsize::new(0),
            is_backing_up: AtomicBool::new(false),
            is_stopped: AtomicBool::new(false),
            runtime: Handle::current(),
            last_subscription: AtomicU64::new(0),
            last_local_client: AtomicU64::new(0),
            owner_hasher: RandomState::new(),
            connections: Mutex::default(),
            store,
            options,
        })
    }

    /// Returns the store's owner id for the writes of a user or address. It is never 0, the owner id of the embedding program.
    pub(crate) fn hash_owner(&self, owner: RateKey<'_>) -> u64 {
        self.owner_hasher.hash_one(owner).max(1)
    }

    fn connections(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<Connection>>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add_connection(&self, connection: &Arc<Connection>) {
        self.connections().insert(connection.number, Arc::clone(connection));
    }

    pub(crate) fn remove_connection(&self, connection: &Connection) {
        // Dropped after the lock is released.
        let removed = self.connections().remove(&connection.number);
        drop(removed);
    }

    /// Returns all connections, ordered by number.
    pub(crate) fn all_connections(&self) -> Vec<Arc<Connection>> {
        self.connections().values().cloned().collect()
    }

    pub(crate) fn connection_count(&self) -> usize {
        self.connections().len()
    }

    pub(crate) fn connections_info(&self) -> Vec<ConnectionInfo> {
        self.all_connections().iter().map(|connection| connection.info()).collect()
    }

    pub(crate) fn subscription_count(&self) -> usize {
        self.subscriptions.load(SeqCst)
    }

    /// Allocates a subscription number.
    pub(crate) fn next_subscription(&self) -> u64 {
        self.last_subscription.fetch_add(1, Relaxed) + 1
    }

    /// Allocates a connection number for an in-process client. These numbers are above [`LOCAL_CLIENT_BASE`]; the numbers of socket
    /// connections start at 1.
    pub(crate) fn next_local_client(&self) -> u64 {
        LOCAL_CLIENT_BASE + self.last_local_client.fetch_add(1, Relaxed) + 1
    }

    /// Returns whether the server has stopped and no longer serves in-process clients.
    pub(crate) fn is_stopped(&self) -> bool {
        self.is_stopped.load(SeqCst)
    }

    /// Closes the in-process clients. The supervisor closes the socket connections.
    pub(crate) fn stop_local_clients(&self) {
        self.is_stopped.store(true, SeqCst);
        for connection in self.all_connections().iter().filter(|connection| connection.number > LOCAL_CLIENT_BASE) {
            connection.close(Disconnect::SERVER_SHUTDOWN);
        }
    }

    /// Returns whether clients must log in.
    pub(crate) fn requires_auth(&self) -> bool {
        self.auth.as_ref().is_some_and(|auth| auth.required)
    }

    /// Returns the number of users and addresses that the rate limiters evicted because their limit was reached.
    pub(crate) fn evicted_rate_keys(&self) -> u64 {
        self.rate_limiter.as_ref().map_or(0, RateLimiter::evicted)
            + self.before_login.as_ref().map_or(0, BeforeLoginLimits::evicted)
            + self.login_throttle.as_ref().map_or(0, LoginThrottle::evicted)
    }

    /// Returns the bucket that a named query reads.
    pub(crate) fn bucket_of_query(&self, name: &str) -> Option<String> {
        let config = self.store.snapshot().state.query_config(name).ok()?;
        config.get("bucket").and_then(Json::as_str).map(str::to_owned)
    }

    /// Schedules a computation of the programmatic query of a subscription on a blocking thread, unless one is already scheduled.
    pub(crate) fn schedule_computation(self: &Arc<Self>, subscription: u64) {
        if self.programmatic.schedule(subscription) {
            let server = Arc::clone(self);
            drop(self.runtime.spawn_blocking(move || server.programmatic.compute_scheduled(subscription)));
        }
    }

    /// Replaces the validator for later logins, and closes the connections whose session it does not accept. Their users may log in again
    /// with a token that it accepts. Returns the number of closed connections.
    pub(crate) fn replace_validator(&self, validator: Arc<dyn TokenValidator>) -> usize {
        let Some(current) = &self.validator else { return 0 };
        // Replaced before the connections are inspected: a concurrent login is either found below, or is checked by the new validator
        // before it completes.
        current.replace(validator);
        self.end_sessions(|session| !current.still_accepts(session), |_| ())
    }

    /// Closes the connections whose session is selected, and revokes their users. Returns the number of closed connections.
    pub(crate) fn revoke(&self, is_selected: impl Fn(&Session) -> bool) -> usize {
        let now = self.store.now();
        self.end_sessions(is_selected, |session| self.revocations.revoke(&session.user_id, now))
    }

    /// Closes the connections whose session is selected. Calls `prepare` before it closes each of them. Returns the number of closed
    /// connections.
    fn end_sessions(&self, is_selected: impl Fn(&Session) -> bool, prepare: impl Fn(&Session)) -> usize {
        let end = |connection: &Arc<Connection>| {
            while let Some(login) = connection.login().filter(|login| is_selected(&login.session)) {
                // Called before the connection is closed, so that the client cannot log in again in between.
                prepare(&login.session);
                // If another user has logged in concurrently, that session may be selected as well.
                if connection.revoke(&login) {
                    return true;
                }
            }
            false
        };
        let count = self.all_connections().iter().filter(|connection| end(connection)).count();
        self.counters.revoked.fetch_add(count as u64, Relaxed);
        count
    }
}

/// The connection numbers of in-process clients are greater than this.
pub(crate) const LOCAL_CLIENT_BASE: u64 = 1 << 63;
