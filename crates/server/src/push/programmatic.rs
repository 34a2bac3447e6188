//! Queries that are code of the host: asked again whenever a bucket that they read has changed.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Wake, Waker};
use std::thread::{JoinHandle, Thread};

use bytes::Bytes;
use serde_json::{Map, Value as Json};
use tidewire_store::{BUCKETS, Commit, FollowError, Follower, Position, Store};

use crate::push::subscription::{Forward, Source};
use crate::push::view::View;
use crate::session::caller::Caller;
use crate::{Code, RequestError};

/// A query that is code of the host. It runs on a thread of its own, or on one for what takes long; a panic ends the subscription
/// that it was asked for.
pub trait ProgrammaticQuery: Send + Sync + std::fmt::Debug + 'static {
    /// The buckets that it reads: a commit that touches none of them leaves its answer as it is. Asked once, when the server starts.
    fn buckets(&self) -> Vec<String>;

    /// Its answer. It sees what whoever asks may see, and must give the same for the same data.
    fn answer(&self, view: &View<'_>, params: &Map<String, Json>) -> Result<Json, RequestError>;
}

/// What a query answered, and when.
#[derive(Debug, Clone)]
pub(crate) struct Answered {
    /// As JSON text.
    pub(crate) text: Bytes,
    /// The commit that it is current to.
    pub(crate) position: Position,
}

impl Answered {
    /// The position, as clients are told it. There is no history of such a query, so nothing can be resumed from it.
    pub(crate) fn mark(&self) -> String {
        format!("{:016x}{:016x}", self.position.epoch, self.position.sequence)
    }
}

/// The host's queries, and who follows them.
#[derive(Debug)]
pub(crate) struct Host {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    store: Store,
    queries: BTreeMap<String, Known>,
    followers: Mutex<Followers>,
}

#[derive(Debug)]
struct Known {
    query: Arc<dyn ProgrammaticQuery>,
    buckets: Vec<String>,
}

#[derive(Debug, Default)]
struct Followers {
    /// By the number of the subscription.
    by_number: HashMap<u64, Following>,
    is_closed: bool,
}

/// A subscription that is answered whenever something has changed.
#[derive(Debug)]
struct Following {
    forward: Weak<Forward>,
    /// Who asks.
    caller: Caller,
    /// Held from the moment that the code is asked until its answer is pushed: answers come in the order in which they were asked
    /// for. It is none of the subscription's own locks, so that the subscription can end while the code takes its time.
    turn: Arc<Mutex<()>>,
}

impl Host {
    /// Follows the store, if there are queries.
    pub(crate) fn start(
        store: &Store,
        queries: &BTreeMap<String, Arc<dyn ProgrammaticQuery>>,
    ) -> std::io::Result<Self> {
        let known = |query: &Arc<dyn ProgrammaticQuery>| Known { query: Arc::clone(query), buckets: query.buckets() };
        let known = queries.iter().map(|(name, query)| (name.clone(), known(query))).collect();
        let shared = Arc::new(Shared { store: store.clone(), queries: known, followers: Mutex::default() });
        if queries.is_empty() {
            return Ok(Self { shared, thread: None });
        }
        let (_, follower) = store.follow();
        let followed = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("tidewire-host".to_owned());
        let thread = thread.spawn(move || followed.run(follower))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// The buckets that a query reads, if it is one of the host's.
    pub(crate) fn buckets(&self, name: &str) -> Option<&[String]> {
        self.shared.queries.get(name).map(|known| &*known.buckets)
    }

    /// Whether a query is one of the host's.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.shared.queries.contains_key(name)
    }

    /// What a query answers somebody now.
    pub(crate) fn answer(
        &self,
        name: &str,
        params: &Map<String, Json>,
        caller: &Caller,
    ) -> Result<Answered, RequestError> {
        self.shared.answer(name, params, caller)
    }

    /// From now on the subscription is answered whenever something has changed. Something may have changed between its first answer
    /// and now, so the code is to be [asked](Self::ask) once more.
    pub(crate) fn follow(&self, forward: &Arc<Forward>, caller: Caller) {
        let mut followers = self.shared.followers();
        followers.by_number.retain(|_, following| following.forward.strong_count() > 0);
        let following = Following { forward: Arc::downgrade(forward), caller, turn: Arc::default() };
        followers.by_number.insert(forward.number, following);
    }

    /// Asks for a subscription, which may take its time.
    pub(crate) fn ask(&self, number: u64) {
        self.shared.ask_if(number, |_| true);
    }

    /// Somebody else asks from now on, and does so at once.
    pub(crate) fn change_caller(&self, number: u64, caller: Caller) {
        if let Some(following) = self.shared.followers().by_number.get_mut(&number) {
            following.caller = caller;
        }
        self.ask(number);
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.shared.followers().is_closed = true;
        let is_own = |thread: &JoinHandle<()>| thread.thread().id() == std::thread::current().id();
        if let Some(thread) = self.thread.take() {
            // It may wait for a commit that does not come.
            thread.thread().unpark();
            if !is_own(&thread) {
                // Whoever drops this last may count on the store being free. If it panicked, it has said so.
                let _ = thread.join();
            }
        }
    }
}

impl Shared {
    fn followers(&self) -> MutexGuard<'_, Followers> {
        self.followers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, mut follower: Follower) {
        loop {
            let mut touched = HashSet::new();
            let mut note =
                |commit: &Commit| touched.extend(commit.changes.iter().map(|change| change.bucket.to_string()));
            if !self.wait(&mut follower) {
                return;
            }
            let is_lost = match follower.try_next() {
                Ok(first) => {
                    let mut next = first;
                    // All that has come meanwhile is answered at once.
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
            let followers = self.followers();
            if followers.is_closed {
                return;
            }
            let numbers: Vec<u64> = followers.by_number.keys().copied().collect();
            drop(followers);
            let is_concerned = |known: &Known| {
                is_lost || touched.contains(BUCKETS) || known.buckets.iter().any(|bucket| touched.contains(bucket))
            };
            let concerned: HashSet<&str> =
                self.queries.iter().filter(|(_, known)| is_concerned(known)).map(|(name, _)| name.as_str()).collect();
            for number in numbers {
                self.ask_if(number, |name| concerned.contains(name));
            }
        }
    }

    /// Waits for a commit, or a reason why there is none. Returns whether anybody still wants to know.
    fn wait(&self, follower: &mut Follower) -> bool {
        let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
        let mut context = Context::from_waker(&waker);
        let mut ready = pin!(follower.ready());
        loop {
            let is_ready = ready.as_mut().poll(&mut context).is_ready();
            if self.followers().is_closed || is_ready {
                return is_ready;
            }
            // Whoever closes it, and whoever commits after the look, unparks it: the park returns at once then.
            std::thread::park();
        }
    }

    fn ask_if(&self, number: u64, is_concerned: impl Fn(&str) -> bool) {
        let mut followers = self.followers();
        let Some(following) = followers.by_number.get(&number) else { return };
        let Some(forward) = following.forward.upgrade() else {
            followers.by_number.remove(&number);
            return;
        };
        let turn = Arc::clone(&following.turn);
        drop(followers);
        let Source::Programmatic { name, params } = &forward.source else { return };
        if !is_concerned(name) {
            return;
        }
        let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
        // Who asks is looked up when no other answer can come in between: else the answer to whoever was logged in before
        // could come after that to who is now.
        let caller = self.followers().by_number.get(&number).map(|following| following.caller.clone());
        if let Some(caller) = caller.filter(|_| !forward.has_ended()) {
            forward.answer(self.answer(name, params, &caller));
        }
    }

    fn answer(&self, name: &str, params: &Map<String, Json>, caller: &Caller) -> Result<Answered, RequestError> {
        let known = self
            .queries
            .get(name)
            .ok_or_else(|| RequestError::new(Code::QueryNotDefined, format!("query \"{name}\" is not defined")))?;
        let snapshot = self.store.snapshot();
        let view = View { snapshot: &snapshot, now: self.store.now(), caller, name };
        let answered = catch_unwind(AssertUnwindSafe(|| known.query.answer(&view, params)));
        let answer = answered.unwrap_or_else(|_| {
            tracing::error!(query = name, "a query of the host panicked");
            Err(RequestError::new(Code::InternalError, "Internal server error"))
        })?;
        Ok(Answered { text: Bytes::from(answer.to_string()), position: snapshot.position })
    }
}

/// Wakes a thread that is parked.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}
