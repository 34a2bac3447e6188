//! Queries in code of the embedding program: computed again whenever a bucket that they read has changed.

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

/// A query in code of the embedding program. It runs on threads that may block. A panic ends the subscription for which it ran.
pub trait ProgrammaticQuery: Send + Sync + std::fmt::Debug + 'static {
    /// The buckets that it reads. It is computed again when a commit touches one of them. Called once, when the server starts.
    fn buckets(&self) -> Vec<String>;

    /// Computes the result. It sees what the subscriber may see, and must return the same for the same data.
    fn answer(&self, view: &View<'_>, params: &Map<String, Json>) -> Result<Json, RequestError>;
}

impl<Q: ProgrammaticQuery + ?Sized> ProgrammaticQuery for Arc<Q> {
    fn buckets(&self) -> Vec<String> {
        (**self).buckets()
    }

    fn answer(&self, view: &View<'_>, params: &Map<String, Json>) -> Result<Json, RequestError> {
        (**self).answer(view, params)
    }
}

/// The result of a programmatic query.
#[derive(Debug, Clone)]
pub(crate) struct Computed {
    pub(crate) json: Bytes,
    /// The commit that it is current to.
    position: Position,
}

impl Computed {
    /// The position that clients see. These queries have no history, so no subscription can resume from it.
    pub(crate) fn position(&self) -> String {
        format!("{:016x}{:016x}", self.position.epoch, self.position.sequence)
    }
}

/// The programmatic queries of a server, and their subscriptions.
#[derive(Debug)]
pub(crate) struct ProgrammaticQueries {
    shared: Arc<Shared>,
    /// The thread that follows the store. It ends when the sender is dropped.
    thread: Option<(oneshot::Sender<()>, JoinHandle<()>)>,
}

#[derive(Debug)]
struct Shared {
    store: Store,
    queries: BTreeMap<String, Known>,
    /// By the number of the subscription.
    subscribers: Mutex<HashMap<u64, Subscriber>>,
}

#[derive(Debug)]
struct Known {
    query: Arc<dyn ProgrammaticQuery>,
    buckets: Vec<String>,
}

#[derive(Debug)]
struct Subscriber {
    subscription: Weak<Subscription>,
    caller: Caller,
    /// The number of the login of the caller, counted from 0.
    login: u64,
    /// Whether a computation is scheduled that has not begun.
    is_scheduled: bool,
    /// Held while a result is computed and handed to the subscription, so that results come in order. The subscription can still
    /// end meanwhile.
    turn: Arc<Mutex<()>>,
}

impl ProgrammaticQueries {
    /// Starts the thread that follows the store, if there are queries.
    pub(crate) fn start(
        store: &Store,
        queries: &BTreeMap<String, Arc<dyn ProgrammaticQuery>>,
        runtime: &Handle,
    ) -> std::io::Result<Self> {
        let known = |query: &Arc<dyn ProgrammaticQuery>| Known { query: Arc::clone(query), buckets: query.buckets() };
        let known = queries.iter().map(|(name, query)| (name.clone(), known(query))).collect();
        let shared = Arc::new(Shared { store: store.clone(), queries: known, subscribers: Mutex::default() });
        if queries.is_empty() {
            return Ok(Self { shared, thread: None });
        }
        let (_, follower) = store.follow();
        let followed = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("tidewire-queries".to_owned());
        let (stop, stopped) = oneshot::channel();
        let runtime = runtime.clone();
        let thread = thread.spawn(move || followed.run(follower, stopped, &runtime))?;
        Ok(Self { shared, thread: Some((stop, thread)) })
    }

    /// The buckets that a programmatic query reads, if there is one of this name.
    pub(crate) fn buckets(&self, name: &str) -> Option<&[String]> {
        self.shared.queries.get(name).map(|known| &*known.buckets)
    }

    /// Whether there is a programmatic query of this name.
    pub(crate) fn contains(&self, name: &str) -> bool {
        self.shared.queries.contains_key(name)
    }

    /// Computes a query for a caller. May block.
    pub(crate) fn compute(
        &self,
        name: &str,
        params: &Map<String, Json>,
        caller: &Caller,
    ) -> Result<Computed, RequestError> {
        self.shared.compute(name, params, caller)
    }

    /// Computes the query of this subscription whenever something has changed from now on. Something may have changed since its
    /// first result, so it is to be [computed](Self::compute_scheduled) once more.
    pub(crate) fn subscribe(&self, subscription: &Arc<Subscription>, caller: Caller) {
        let mut subscribers = self.shared.subscribers();
        subscribers.retain(|_, subscriber| subscriber.subscription.strong_count() > 0);
        let subscriber = Subscriber {
            subscription: Arc::downgrade(subscription),
            caller,
            login: 0,
            is_scheduled: false,
            turn: Arc::default(),
        };
        subscribers.insert(subscription.number, subscriber);
    }

    /// Schedules a computation for a subscription. Returns false if there is no such subscription, or if one is scheduled already.
    pub(crate) fn schedule(&self, number: u64) -> bool {
        let mut subscribers = self.shared.subscribers();
        let Some(subscriber) = subscribers.get_mut(&number) else { return false };
        !std::mem::replace(&mut subscriber.is_scheduled, true)
    }

    /// Computes the query of a subscription for which that was [scheduled](Self::schedule). May block.
    pub(crate) fn compute_scheduled(&self, number: u64) {
        self.shared.compute_if(number, |_| true, true);
    }

    /// Changes the caller of a subscription. Returns the number of its login. The query is to be [computed](Self::compute_scheduled) again;
    /// results for earlier logins may still come.
    pub(crate) fn change_caller(&self, number: u64, caller: Caller) -> Option<u64> {
        let mut subscribers = self.shared.subscribers();
        let subscriber = subscribers.get_mut(&number)?;
        (subscriber.caller, subscriber.login) = (caller, subscriber.login + 1);
        Some(subscriber.login)
    }
}

impl Drop for ProgrammaticQueries {
    fn drop(&mut self) {
        let is_own = |thread: &JoinHandle<()>| thread.thread().id() == std::thread::current().id();
        if let Some((stop, thread)) = self.thread.take() {
            drop(stop);
            if !is_own(&thread) {
                // Joined so that the store is released when this returns. A panic was logged by the panic hook.
                let _ = thread.join();
            }
        }
    }
}

impl Shared {
    fn subscribers(&self) -> MutexGuard<'_, HashMap<u64, Subscriber>> {
        self.subscribers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Computes the queries that a commit concerns, until the sender of `stopped` is dropped.
    fn run(&self, mut follower: Follower, mut stopped: oneshot::Receiver<()>, runtime: &Handle) {
        // Only the wait runs in the runtime: the code of a query may block.
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
            let mut touched = HashSet::new();
            let mut note =
                |commit: &Commit| touched.extend(commit.changes.iter().map(|change| change.bucket.to_string()));
            if !wait(&mut follower) {
                return;
            }
            let is_lost = match follower.try_next() {
                Ok(first) => {
                    let mut next = first;
                    // Several commits are answered by one computation.
                    while let Some(commit) = next {
                        note(&commit);
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
            let is_concerned = |known: &Known| {
                is_lost || touched.contains(BUCKETS) || known.buckets.iter().any(|bucket| touched.contains(bucket))
            };
            let concerned: HashSet<&str> =
                self.queries.iter().filter(|(_, known)| is_concerned(known)).map(|(name, _)| name.as_str()).collect();
            for number in numbers {
                self.compute_if(number, |name| concerned.contains(name), false);
            }
        }
    }

    fn compute_if(&self, number: u64, is_concerned: impl Fn(&str) -> bool, is_scheduled: bool) {
        let mut subscribers = self.subscribers();
        let Some(subscriber) = subscribers.get(&number) else { return };
        let Some(subscription) = subscriber.subscription.upgrade() else {
            subscribers.remove(&number);
            return;
        };
        let turn = Arc::clone(&subscriber.turn);
        drop(subscribers);
        let QuerySource::Programmatic { name, params } = &subscription.source else { return };
        if !is_concerned(name) {
            return;
        }
        let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
        // The caller is read under the turn: a result for the previous login must not come after one for the current.
        let begin = |subscriber: &mut Subscriber| {
            // Only now, so that no more than one computation waits for its turn.
            subscriber.is_scheduled &= !is_scheduled;
            (subscriber.caller.clone(), subscriber.login)
        };
        let caller = self.subscribers().get_mut(&number).map(begin);
        if let Some((caller, login)) = caller.filter(|_| !subscription.has_ended()) {
            subscription.compute(login, self.compute(name, params, &caller));
        }
    }

    fn compute(&self, name: &str, params: &Map<String, Json>, caller: &Caller) -> Result<Computed, RequestError> {
        let known = self
            .queries
            .get(name)
            .ok_or_else(|| RequestError::new(Code::QueryNotDefined, format!("query \"{name}\" is not defined")))?;
        let snapshot = self.store.snapshot();
        let view = View { snapshot: &snapshot, now: self.store.now(), caller, name };
        let answer = catch_unwind(AssertUnwindSafe(|| known.query.answer(&view, params))).unwrap_or_else(|_| {
            tracing::error!(query = name, "programmatic query panicked");
            Err(RequestError::new(Code::InternalError, "Internal server error"))
        })?;
        Ok(Computed { json: Bytes::from(answer.to_string()), position: snapshot.position })
    }
}
