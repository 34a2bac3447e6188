//! What all connections of a server share.

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

/// What all connections of a server share.
#[derive(Debug)]
pub(crate) struct ServerState {
    pub(crate) options: ServerOptions,
    pub(crate) capabilities: Capabilities,
    /// The settings of auth, whose validator is [`Self::validator`].
    pub(crate) auth: Option<Arc<Auth>>,
    validator: Option<Arc<ReloadableValidator>>,
    pub(crate) store: Store,
    pub(crate) live: Live,
    pub(crate) work: WorkPool,
    pub(crate) programmatic: ProgrammaticQueries,
    pub(crate) rate_limiter: Option<RateLimiter>,
    /// None if no login is required.
    pub(crate) before_login: Option<BeforeLoginLimits>,
    /// None if there are no logins.
    pub(crate) login_throttle: Option<LoginThrottle>,
    pub(crate) revocations: Revocations,
    pub(crate) counters: Counters,
    /// The limit of the memory that connections over sockets hold.
    pub(crate) memory: MemoryLimit,
    pub(crate) operations: OperationMetrics,
    pub(crate) started: Instant,
    /// Subscriptions of all connections.
    pub(crate) subscriptions: AtomicUsize,
    /// There is at most one backup at a time.
    pub(crate) is_backing_up: AtomicBool,
    is_stopped: AtomicBool,
    /// The runtime on which the server was started.
    pub(crate) runtime: Handle,
    last_subscription: AtomicU64,
    last_local_client: AtomicU64,
    /// Seeded randomly, so that no client can choose an owner with the same hash.
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

    /// Returns the number under which the store charges the writes of a user or address. It is not 0, which is the program.
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
        // It is dropped after the lock is released.
        let removed = self.connections().remove(&connection.number);
        drop(removed);
    }

    /// Every connection, in the order in which they were made.
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

    /// The number of the next subscription.
    pub(crate) fn next_subscription(&self) -> u64 {
        self.last_subscription.fetch_add(1, Relaxed) + 1
    }

    /// The number of the next in-process client. Sockets are numbered from one, these from the upper half.
    pub(crate) fn next_local_client(&self) -> u64 {
        LOCAL_CLIENTS + self.last_local_client.fetch_add(1, Relaxed) + 1
    }

    /// Whether the server has stopped: no in-process client is served any more.
    pub(crate) fn is_stopped(&self) -> bool {
        self.is_stopped.load(SeqCst)
    }

    /// Ends the in-process clients. Those over sockets are ended by their supervisor.
    pub(crate) fn stop_local_clients(&self) {
        self.is_stopped.store(true, SeqCst);
        for connection in self.all_connections().iter().filter(|connection| connection.number > LOCAL_CLIENTS) {
            connection.close(Disconnect::SERVER_SHUTDOWN);
        }
    }

    /// Whether clients have to log in.
    pub(crate) fn requires_auth(&self) -> bool {
        self.auth.as_ref().is_some_and(|auth| auth.required)
    }

    /// Users and addresses whose count in a rate limit was reset because there were too many.
    pub(crate) fn forgotten_rate_keys(&self) -> u64 {
        self.rate_limiter.as_ref().map_or(0, RateLimiter::forgotten)
            + self.before_login.as_ref().map_or(0, BeforeLoginLimits::forgotten)
            + self.login_throttle.as_ref().map_or(0, LoginThrottle::forgotten)
    }

    /// The bucket that a named query reads.
    pub(crate) fn bucket_of_query(&self, name: &str) -> Option<String> {
        let config = self.store.snapshot().state.query_config(name).ok()?;
        config.get("bucket").and_then(Json::as_str).map(str::to_owned)
    }

    /// Computes the programmatic query of a subscription on a thread that may block, unless that is scheduled already.
    pub(crate) fn compute_later(self: &Arc<Self>, subscription: u64) {
        if self.programmatic.schedule(subscription) {
            let server = Arc::clone(self);
            drop(self.runtime.spawn_blocking(move || server.programmatic.compute_scheduled(subscription)));
        }
    }

    /// Validates further logins by this validator, and ends the connections whose session it does not keep. Their users may log in
    /// again with a token that it accepts. Returns how many connections there were.
    pub(crate) fn replace_validator(&self, validator: Arc<dyn TokenValidator>) -> usize {
        let Some(current) = &self.validator else { return 0 };
        // Before the connections are looked at: a login either is seen there, or sees the new validator when it is checked again.
        current.replace(validator);
        self.end_sessions(|session| !current.keeps(session), |_| ())
    }

    /// Ends the connections whose session is selected, and revokes their users. Returns how many connections there were.
    pub(crate) fn revoke(&self, is_selected: impl Fn(&Session) -> bool) -> usize {
        let now = self.store.now();
        self.end_sessions(is_selected, |session| self.revocations.revoke(&session.user_id, now))
    }

    /// Ends the connections whose session is selected, each after `prepare`. Returns how many connections there were.
    fn end_sessions(&self, is_selected: impl Fn(&Session) -> bool, prepare: impl Fn(&Session)) -> usize {
        let end = |connection: &Arc<Connection>| {
            while let Some(login) = connection.login().filter(|login| is_selected(&login.session)) {
                // Before the client learns of it and logs in again.
                prepare(&login.session);
                // If another user has logged in meanwhile, that session may be selected as well.
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

/// The numbers of in-process clients are larger than this.
pub(crate) const LOCAL_CLIENTS: u64 = 1 << 63;
