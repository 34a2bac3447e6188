//! Programmatic queries: queries implemented in code by the embedding program, computed again when a bucket that they read changes.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;

use bytes::Bytes;
use serde_json::{Map, Value as Json};
use tidewire_store::system::BUCKETS;
use tidewire_store::{Commit, FollowError, Follower, Position, Store};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use super::subscription::{QuerySource, Subscription};
use super::view::View;
use crate::session::caller::Caller;
use crate::{Code, RequestError};

/// A query that is implemented in code by the embedding program.
///
/// It runs on threads that may block. If it panics, the subscription for which it ran ends with an error.
pub trait ProgrammaticQuery: Send + Sync + std::fmt::Debug + 'static {
    /// Returns the buckets that the query reads. The query is computed again when a commit changes one of them. Called once, when the
    /// server starts.
    fn buckets(&self) -> Vec<String>;

    /// Computes the result from a view of the rows that the subscriber may see. It must be deterministic: the same data must yield
    /// the same result.
    fn compute(&self, view: &View<'_>, params: &Map<String, Json>) -> Result<Json, RequestError>;
}

impl<Q: ProgrammaticQuery + ?Sized> ProgrammaticQuery for Arc<Q> {
    fn buckets(&self) -> Vec<String> {
        (**self).buckets()
    }

    fn compute(&self, view: &View<'_>, params: &Map<String, Json>) -> Result<Json, RequestError> {
        (**self).compute(view, params)
    }
}

/// The result of a programmatic query.
#[derive(Debug, Clone)]
pub(crate) struct ComputedResult {
    pub(crate) json: Bytes,
    /// The position of the last commit that is included.
    position: Position,
}

impl ComputedResult {
    /// Returns the position as it is sent to clients. Programmatic queries have no history, so a subscription cannot resume from it.
    pub(crate) fn position(&self) -> String {
        format!("{:016x}{:016x}", self.position.epoch, self.position.sequence)
    }
}

/// The programmatic queries of a server, and their subscriptions.
#[derive(Debug)]
pub(crate) struct ProgrammaticQueries {
    shared: Arc<QueriesShared>,
    /// The thread that follows the commits of the store. It ends when the sender is dropped.
    thread: Option<(oneshot::Sender<()>, JoinHandle<()>)>,
}

#[derive(Debug)]
struct QueriesShared {
    store: Store,
    queries: BTreeMap<String, RegisteredQuery>,
    /// By subscription number.
    subscribers: Mutex<HashMap<u64, Subscriber>>,
}

#[derive(Debug)]
struct RegisteredQuery {
    query: Arc<dyn ProgrammaticQuery>,
    buckets: Vec<String>,
}

#[derive(Debug)]
struct Subscriber {
    subscription: Weak<Subscription>,
    caller: Caller,
    /// The number of changes of the caller so far.
    login_generation: u64,
    /// Whether a computation is scheduled that has not started.
    is_scheduled: bool,
    /// Held while a result is computed and passed to the subscription, so that results arrive in order. The subscription can still
    /// end concurrently.
    computing: Arc<Mutex<()>>,
}

impl ProgrammaticQueries {
    /// Starts the thread that follows the commits of the store, if there are queries.
    pub(crate) fn start(
        store: &Store,
        queries: &BTreeMap<String, Arc<dyn ProgrammaticQuery>>,
        runtime: &Handle,
    ) -> std::io::Result<Self> {
        let register =
            |query: &Arc<dyn ProgrammaticQuery>| RegisteredQuery { query: Arc::clone(query), buckets: query.buckets() };
        let registered = queries.iter().map(|(name, query)| (name.clone(), register(query))).collect();
        let shared =
            Arc::new(QueriesShared { store: store.clone(), queries: registered, subscribers: Mutex::default() });
        if queries.is_empty() {
            return Ok(Self { shared, thread: None });
        }
        let (_, follower) = store.follow();
        let for_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("tidewire-queries".to_owned());
        let (stop, stopped) = oneshot::channel();
        let runtime = runtime.clone();
        let thread = thread.spawn(move || for_thread.run(follower, stopped, &runtime))?;
        Ok(Self { shared, thread: Some((stop, thread)) })
    }

    /// Returns the buckets that a programmatic query reads; `None` if it does not exist.
    pub(crate) fn buckets(&self, name: &str) -> Option<&[String]> {
        self.shared.queries.get(name).map(|query| &*query.buckets)
    }

    /// Returns whether a programmatic query with this name exists.
    pub(crate) fn contains(&self, name: &str) -> bool {
        self.shared.queries.contains_key(name)
    }

    /// Computes a query for a caller. May block.
    pub(crate) fn compute(
        &self,
        name: &str,
        params: &Map<String, Json>,
        caller: &Caller,
    ) -> Result<ComputedResult, RequestError> {
        self.shared.compute(name, params, caller)
    }

    /// Registers a subscription. From now on, its query is computed after each commit that changes one of its buckets. The caller must
    /// [compute](Self::compute_scheduled) it once more, because data may have changed since the first result.
    pub(crate) fn subscribe(&self, subscription: &Arc<Subscription>, caller: Caller) {
        let mut subscribers = self.shared.subscribers();
        subscribers.retain(|_, subscriber| subscriber.subscription.strong_count() > 0);
        let subscriber = Subscriber {
            subscription: Arc::downgrade(subscription),
            caller,
            login_generation: 0,
            is_scheduled: false,
            computing: Arc::default(),
        };
        subscribers.insert(subscription.number, subscriber);
    }

    /// Marks a computation for a subscription as scheduled. Returns false if the subscription does not exist or is already scheduled.
    pub(crate) fn schedule(&self, number: u64) -> bool {
        let mut subscribers = self.shared.subscribers();
        let Some(subscriber) = subscribers.get_mut(&number) else { return false };
        !std::mem::replace(&mut subscriber.is_scheduled, true)
    }

    /// Computes the query of a subscription for which a computation was [scheduled](Self::schedule). May block.
    pub(crate) fn compute_scheduled(&self, number: u64) {
        self.shared.compute_if_affected(number, |_| true, true);
    }

    /// Changes the caller of a subscription. Returns the generation of its login. The query must be
    /// [computed](Self::compute_scheduled) again; results for earlier generations may still arrive.
    pub(crate) fn change_caller(&self, number: u64, caller: Caller) -> Option<u64> {
        let mut subscribers = self.shared.subscribers();
        let subscriber = subscribers.get_mut(&number)?;
        (subscriber.caller, subscriber.login_generation) = (caller, subscriber.login_generation + 1);
        Some(subscriber.login_generation)
    }
}

impl Drop for ProgrammaticQueries {
    fn drop(&mut self) {
        let is_current = |thread: &JoinHandle<()>| thread.thread().id() == std::thread::current().id();
        if let Some((stop, thread)) = self.thread.take() {
            drop(stop);
            if !is_current(&thread) {
                // Joined, so that the store is released when this returns. The panic hook has already logged a panic.
                let _ = thread.join();
            }
        }
    }
}

impl QueriesShared {
    fn subscribers(&self) -> MutexGuard<'_, HashMap<u64, Subscriber>> {
        self.subscribers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Computes the queries that are affected by commits, until the sender of `stopped` is dropped.
    fn run(&self, mut follower: Follower, mut stopped: oneshot::Receiver<()>, runtime: &Handle) {
        // Only the wait runs on the runtime, because the code of a query may block.
        let mut wait = |follower: &mut Follower| {
            runtime.block_on(async {
                tokio::select! {
                    biased;
                    _ = &mut stopped => false,
                    () = follower.ready() => true,
                }
            })
        };
        loop {
            let mut changed = HashSet::new();
            let mut record =
                |commit: &Commit| changed.extend(commit.changes.iter().map(|change| change.bucket.to_string()));
            if !wait(&mut follower) {
                return;
            }
            let is_behind = match follower.try_next() {
                Ok(first) => {
                    let mut next = first;
                    // One computation covers several commits.
                    while let Some(commit) = next {
                        record(&commit);
                        next = follower.try_next().ok().flatten();
                    }
                    false
                }
                Err(FollowError::Closed) => return,
                Err(_) => {
                    follower = self.store.follow().1;
                    true
                }
            };
            let numbers: Vec<u64> = self.subscribers().keys().copied().collect();
            let is_affected = |query: &RegisteredQuery| {
                is_behind || changed.contains(BUCKETS) || query.buckets.iter().any(|bucket| changed.contains(bucket))
            };
            let affected: HashSet<&str> =
                self.queries.iter().filter(|(_, query)| is_affected(query)).map(|(name, _)| name.as_str()).collect();
            for number in numbers {
                self.compute_if_affected(number, |name| affected.contains(name), false);
            }
        }
    }

    fn compute_if_affected(&self, number: u64, is_affected: impl Fn(&str) -> bool, is_scheduled: bool) {
        let mut subscribers = self.subscribers();
        let Some(subscriber) = subscribers.get(&number) else { return };
        let Some(subscription) = subscriber.subscription.upgrade() else {
            subscribers.remove(&number);
            return;
        };
        let computing = Arc::clone(&subscriber.computing);
        drop(subscribers);
        let QuerySource::Programmatic { name, params } = &subscription.source else { return };
        if !is_affected(name) {
            return;
        }
        let _computing = computing.lock().unwrap_or_else(PoisonError::into_inner);
        // The caller is read under the lock: a result for the previous login must not follow one for the current login.
        let start = |subscriber: &mut Subscriber| {
            // Reset only now, so that at most one scheduled computation waits for the lock.
            subscriber.is_scheduled &= !is_scheduled;
            (subscriber.caller.clone(), subscriber.login_generation)
        };
        let caller = self.subscribers().get_mut(&number).map(start);
        if let Some((caller, login_generation)) = caller.filter(|_| !subscription.has_ended()) {
            subscription.accept_result(login_generation, self.compute(name, params, &caller));
        }
    }

    fn compute(&self, name: &str, params: &Map<String, Json>, caller: &Caller) -> Result<ComputedResult, RequestError> {
        let registered = self
            .queries
            .get(name)
            .ok_or_else(|| RequestError::new(Code::QueryNotDefined, format!("query \"{name}\" is not defined")))?;
        let snapshot = self.store.snapshot();
        let view = View { snapshot: &snapshot, now: self.store.now(), caller, name };
        let result =
            catch_unwind(AssertUnwindSafe(|| registered.query.compute(&view, params))).unwrap_or_else(|_| {
                tracing::error!(query = name, "programmatic query panicked");
                Err(RequestError::new(Code::InternalError, "Internal server error"))
            })?;
        Ok(ComputedResult { json: Bytes::from(result.to_string()), position: snapshot.position })
    }
}
