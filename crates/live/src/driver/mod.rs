//! The driver: applies the commits of a store to the matcher, on its own thread, and delivers events to subscribers.
//!
//! Between commits it handles requests and the output of background jobs. It does no long work: a costly query is
//! [evaluated](crate::evaluation) by a background thread, and installed when its result has caught up with the commits, so there is
//! no gap between the result and the deltas that follow. Large results are encoded in the background too.
//!
//! If the driver falls so far behind that the store's history no longer has the next commit, it restarts from the newest state: all
//! queries are evaluated again. The next event of each subscriber is a snapshot, delivered when its query has been evaluated.

mod accounts;
mod evaluations;
mod results;
mod subscriber;

use std::collections::{HashMap, HashSet};
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::Poll;
use std::time::{Duration, Instant};

use tidewire_pool::{BuildError, Key};
use tidewire_store::query::Parameters;
use tidewire_store::system::QUERIES;
use tidewire_store::{Change, Commit, FollowError, Follower, Position, Query, Snapshot, Store, StoreError};
use tokio::sync::oneshot;

use self::accounts::Accounts;
use self::evaluations::{DirectWork, WaitingQuery};
use self::results::QueryState;
use self::subscriber::{Definition, PendingStage, PendingSubscriber, Recipient, Subscriber, name_of};
use crate::background::{Background, FinishedJob, JobId, JobOutput};
use crate::evaluation::EvaluationError;
use crate::fanout::{DeliveryLimits, Fanout};
use crate::live::{LiveError, LiveOptions};
use crate::mark::Mark;
use crate::matcher::{Matcher, QueryId, Update};
use crate::query::{LiveQuery, ResultChange, ResultTooLarge};
use crate::resume::HistoryUnavailable;
use crate::shared::{Command, LiveShared, Subscribe, Target};
use crate::subscription::{Event, Inbox, Mode, SubscriptionEnd};
use crate::wake::catch_panic;

/// The state of the live thread.
pub(crate) struct Driver {
    store: Store,
    options: LiveOptions,
    shared: Arc<LiveShared>,
    follower: Follower,
    matcher: Matcher,
    subscribers: HashMap<u64, Subscriber>,
    queries: HashMap<QueryId, QueryState>,
    /// Queries that are evaluated in the background, by their canonical form.
    evaluations: HashMap<Arc<[u8]>, WaitingQuery>,
    /// The purposes of the running background jobs.
    jobs: HashMap<JobId, Purpose>,
    /// Queries with a changed result that must be delivered as a snapshot.
    changed: HashSet<QueryId>,
    /// Callers of `settled`, each with the position up to which events must be delivered before the reply.
    settling: Vec<(Position, oneshot::Sender<Position>)>,
    accounts: Accounts,
    direct_work: DirectWork,
    fanout: Fanout,
    evaluators: Background,
    encoders: Background,
}

/// The purpose of a background job.
#[derive(Debug)]
enum Purpose {
    /// The evaluation of the query with this canonical form.
    Evaluation(Arc<[u8]>),
    /// The history since the mark of this subscriber.
    History(u64),
    /// The result of this query.
    Encoding(QueryId),
}

/// Limit of the commits that are applied before requests are handled.
const MAX_COMMITS_PER_ROUND: usize = 256;
/// Limit of the rows of a query that is dropped on the live thread. Larger queries are dropped in the background.
const MAX_ROWS_DROPPED: usize = 10_000;
/// Number of threads that evaluate queries. Few, so that most cores stay free for commits and clients.
const EVALUATION_THREADS: usize = 2;
/// Number of threads that encode large results. They are separate, so that evaluations do not delay encodings.
const ENCODING_THREADS: usize = 1;

impl Driver {
    pub(crate) fn new(store: Store, options: LiveOptions, shared: Arc<LiveShared>) -> Result<Self, BuildError> {
        let limits = DeliveryLimits { max_deltas: options.max_deltas, max_bytes: options.max_result_bytes };
        let fanout = Fanout::new(options.workers.min(LiveOptions::MAX_WORKERS), limits)?;
        let evaluators = Background::new("live-evaluate", EVALUATION_THREADS, Arc::clone(&shared))?;
        let encoders = Background::new("live-encode", ENCODING_THREADS, Arc::clone(&shared))?;
        let (snapshot, follower) = store.follow();
        let mut matcher = Matcher::new(snapshot.position);
        matcher.set_max_commit_work(options.max_owner_work);
        Ok(Self {
            matcher,
            store,
            options,
            shared,
            follower,
            subscribers: HashMap::new(),
            queries: HashMap::new(),
            evaluations: HashMap::new(),
            jobs: HashMap::new(),
            changed: HashSet::new(),
            settling: Vec::new(),
            accounts: Accounts::default(),
            direct_work: DirectWork::new(),
            fanout,
            evaluators,
            encoders,
        })
    }

    /// Runs until the handle is dropped or the store is closed.
    pub(crate) async fn run(mut self) {
        loop {
            if !self.apply_commits(None) {
                return;
            }
            self.deliver_changed_results();
            if !self.handle_requests() {
                return;
            }
            self.deliver_changed_results();
            self.reply_settled();
            self.publish_gauges();
            self.wait().await;
        }
    }

    /// Waits for a commit, a request or the end of a background job.
    async fn wait(&mut self) {
        let mut request = pin!(self.shared.wake.notified());
        let mut commit = pin!(self.follower.ready());
        poll_fn(|context| {
            let is_ready = commit.as_mut().poll(context).is_ready() || request.as_mut().poll(context).is_ready();
            if is_ready { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    /// Applies all commits up to a position, or a bounded number of commits. Returns false when the store is closed.
    fn apply_commits(&mut self, until: Option<Position>) -> bool {
        let mut left = if until.is_some() { usize::MAX } else { MAX_COMMITS_PER_ROUND };
        while left > 0 && until.is_none_or(|until| self.matcher.position().sequence < until.sequence) {
            match self.follower.try_next() {
                Ok(Some(commit)) => self.apply_commit(&commit),
                // A published commit is added to the history shortly afterwards.
                Ok(None) if until.is_some() => std::thread::yield_now(),
                Ok(None) => break,
                Err(FollowError::Closed) => return false,
                Err(_) => {
                    self.restart();
                    // The next commit may cause another restart, so requests are handled in between.
                    left = if until.is_some() { left } else { 1 };
                }
            }
            left -= 1;
        }
        true
    }

    fn apply_commit(&mut self, commit: &Commit) {
        self.shared.counters.commits.fetch_add(1, Relaxed);
        let committed = self.matcher.commit(commit.position, &commit.changes);
        for ended in committed.ended {
            self.queries.remove(&ended.query);
            for id in ended.subscribers {
                self.end(id, SubscriptionEnd::BucketDropped);
            }
        }
        for ended in committed.too_costly {
            self.queries.remove(&ended.query);
            for id in ended.subscribers {
                self.end_costly(id);
            }
        }
        for change in commit.changes.iter().filter(|change| *change.bucket == *QUERIES && change.new.is_none()) {
            self.end_named(change);
        }
        self.deliver_updates(commit.position, committed.updates);
        self.charge_work();
        self.check_growth();
    }

    /// Delivers deltas, and marks the queries whose result must be delivered as a snapshot.
    fn deliver_updates(&mut self, position: Position, updates: Vec<Update>) {
        let mut deliveries = Vec::new();
        let changed = updates.len();
        for update in updates {
            let Some(state) = self.queries.get_mut(&update.query) else { continue };
            let mark = Mark::new(position, state.hash);
            let mut needs_snapshot = matches!(update.change, ResultChange::Value);
            if let ResultChange::Records(delta) = &update.change {
                let event = Event::Delta { delta: delta.clone(), mark };
                state.collect_delta(&event, self.options.max_deltas);
                for id in self.matcher.subscribers(update.query) {
                    match self.subscribers.get(id) {
                        Some(Subscriber { mode: Mode::Delta, inbox, .. }) => {
                            deliveries.push((Arc::clone(inbox), event.clone()));
                        }
                        _ => needs_snapshot = true,
                    }
                }
            }
            if needs_snapshot {
                self.changed.insert(update.query);
            }
        }
        let delivered = self.fanout.deliver(deliveries, changed);
        self.shared.counters.events.fetch_add(delivered.queued, Relaxed);
        self.shared.counters.conflated.fetch_add(delivered.fell_behind, Relaxed);
    }

    /// Restarts from the newest state after commits were missed, and evaluates all queries again. Costly queries are evaluated in the
    /// background.
    fn restart(&mut self) {
        self.shared.counters.restarts.fetch_add(1, Relaxed);
        let (snapshot, follower) = self.store.follow();
        self.follower = follower;
        self.changed.clear();
        self.end_outdated(&snapshot);
        let mut states = std::mem::take(&mut self.queries);
        for (query, live) in self.matcher.restart(snapshot.position) {
            let Some(state) = states.remove(&query) else { continue };
            let (query, canonical) = (Arc::new(live.query.clone()), Arc::clone(&live.canonical));
            let subscribers = live.subscribers.clone();
            self.discard(live);
            for id in &subscribers {
                let Some(subscriber) = self.subscribers.get_mut(id) else { continue };
                let new = || {
                    let recipient = Recipient::Inbox { bucket: state.bucket.clone() };
                    Box::new(PendingSubscriber { recipient, stage: PendingStage::Result, requested: snapshot.position })
                };
                subscriber.pending.get_or_insert_with(new).stage = PendingStage::Evaluation(Arc::clone(&canonical));
                if let Some(end) = end_reason(subscriber, &query, &snapshot) {
                    self.end(*id, end);
                }
            }
            let waiters: Vec<u64> = subscribers.into_iter().filter(|id| self.subscribers.contains_key(id)).collect();
            if waiters.is_empty() {
                continue;
            }
            match self.evaluate_directly(&query, &canonical, &snapshot) {
                Some(evaluated) => self.install(evaluated, &waiters, &snapshot),
                None => self.start_evaluation(query, canonical, waiters, None),
            }
        }
    }

    /// Ends the subscribers waiting for an evaluation whose bucket was dropped, or whose named query has changed.
    fn end_outdated(&mut self, snapshot: &Snapshot) {
        let waiting =
            self.evaluations.values().flat_map(|waiting| waiting.waiters.iter().map(|id| (*id, &waiting.query)));
        let end_of =
            |(id, query): (u64, &Arc<Query>)| Some((id, end_reason(self.subscribers.get(&id)?, query, snapshot)?));
        for (id, end) in waiting.filter_map(end_of).collect::<Vec<_>>() {
            self.end(id, end);
        }
    }

    /// Handles requests and the output of background jobs. Returns false when the handle has been dropped.
    fn handle_requests(&mut self) -> bool {
        let requests = self.shared.take();
        for id in requests.dropped {
            self.remove(id);
        }
        for finished in requests.finished {
            self.finish_job(finished);
        }
        for id in requests.refresh {
            let Some(subscriber) = self.subscribers.get(&id) else { continue };
            // A pending subscriber gets a result without a request.
            if subscriber.pending.is_none() && subscriber.inbox.needs_snapshot() {
                self.request_result(id);
            }
        }
        for command in requests.commands {
            match command {
                Command::Subscribe(subscribe) => self.subscribe(*subscribe),
                Command::Settle(reply) => {
                    self.catch_up();
                    self.settling.push((self.matcher.position(), reply));
                }
            }
        }
        !requests.is_closed
    }

    fn finish_job(&mut self, finished: FinishedJob) {
        self.evaluators.submit_backlog();
        self.encoders.submit_backlog();
        let FinishedJob { job, output } = finished;
        match (self.jobs.remove(&job), output) {
            (Some(Purpose::Evaluation(canonical)), Some(JobOutput::Evaluated(evaluated))) => {
                self.finish_evaluation(job, &canonical, evaluated);
            }
            (Some(Purpose::Evaluation(canonical)), _) => {
                self.finish_evaluation(job, &canonical, Err(EvaluationError::Panicked));
            }
            (Some(Purpose::History(id)), Some(JobOutput::Read(missed))) => self.finish_history(job, id, missed),
            (Some(Purpose::History(id)), _) => self.finish_history(job, id, Err(HistoryUnavailable)),
            (Some(Purpose::Encoding(query)), Some(JobOutput::Encoded(encoded))) => {
                self.finish_encoding(job, query, encoded);
            }
            (Some(Purpose::Encoding(query)), _) => self.finish_encoding(job, query, Err(ResultTooLarge)),
            (None, _) => {}
        }
    }

    /// Replies to a caller, after updating the gauges. The value is dropped if the caller stopped waiting.
    fn send_reply<T>(&self, reply: oneshot::Sender<T>, value: T) {
        self.publish_gauges();
        catch_panic(|| drop(reply.send(value)));
    }

    fn publish_gauges(&self) {
        let counters = &self.shared.counters;
        counters.queries.store(self.queries.len(), Relaxed);
        counters.subscribers.store(self.subscribers.len(), Relaxed);
        counters.kept_bytes.store(self.matcher.kept_bytes(), Relaxed);
    }

    /// Applies all published commits. Returns the newest state, which is at the position of the matcher.
    fn catch_up(&mut self) -> Arc<Snapshot> {
        loop {
            let snapshot = self.store.snapshot();
            let is_open = self.apply_commits(Some(snapshot.position));
            self.deliver_changed_results();
            // A restart may have continued from a later state.
            if self.matcher.position() == snapshot.position || !is_open {
                return snapshot;
            }
        }
    }

    /// Replies to callers of `settled` whose events are delivered.
    fn reply_settled(&mut self) {
        for (position, reply) in std::mem::take(&mut self.settling) {
            if self.is_delivered(position) {
                self.send_reply(reply, self.matcher.position());
            } else {
                self.settling.push((position, reply));
            }
        }
    }

    /// Returns whether the events up to a position are delivered: no subscriber waits for a result that was requested by then.
    fn is_delivered(&self, position: Position) -> bool {
        let is_waiting = |id: &u64| {
            let pending = self.subscribers.get(id).and_then(|subscriber| subscriber.pending.as_ref());
            pending.is_some_and(|pending| {
                matches!(pending.recipient, Recipient::Inbox { .. }) && pending.requested.sequence <= position.sequence
            })
        };
        !self.evaluations.values().any(|evaluation| evaluation.waiters.iter().any(is_waiting))
            && !self.queries.values().any(|state| state.is_behind(position))
    }

    fn subscribe(&mut self, subscribe: Subscribe) {
        let Subscribe { id, target, options, reply } = subscribe;
        if reply.is_closed() {
            return;
        }
        let snapshot = self.catch_up();
        let (query, definition) = match self.resolve(target, &snapshot) {
            Ok(resolved) => resolved,
            Err(error) => return self.send_reply(reply, Err(error)),
        };
        let recipient = Recipient::Caller { reply, since: options.since };
        let pending = PendingSubscriber { recipient, stage: PendingStage::Result, requested: snapshot.position };
        let inbox = Arc::new(Inbox::awaiting_first());
        let subscriber = Subscriber { inbox, mode: options.mode, definition, pending: Some(Box::new(pending)) };
        self.subscribers.insert(id, subscriber);
        if let Some(owner) = options.owner {
            self.accounts.open(id, owner, Instant::now());
        }
        self.attach_or_evaluate(id, query, &snapshot, options.deadline);
    }

    /// Returns the query of a new subscription, and the definition if it is a named query.
    fn resolve(&self, target: Target, snapshot: &Snapshot) -> Result<(Query, Option<Definition>), LiveError> {
        let max = self.options.max_subscriptions;
        if self.subscribers.len() >= max {
            return Err(LiveError::TooMany { max });
        }
        let (query, definition) = match target {
            Target::Query(query) => (query, None),
            Target::Named { name, params, row_filter } => {
                let config = snapshot.state.query_config(&name)?;
                let query = Query::parse_with(&config, &Parameters::from(&params)).map_err(StoreError::from)?;
                let query = match &row_filter {
                    Some(row_filter) => query.restrict(row_filter),
                    None => query,
                };
                (query, Some(Definition(snapshot.state.query_record(&name)?.clone())))
            }
        };
        snapshot.state.bucket(&query.bucket)?;
        Ok((query, definition))
    }

    /// Ends the subscriptions to a named query that was undefined.
    fn end_named(&mut self, change: &Change) {
        let Some(name) = change.old.as_ref().and_then(name_of) else { return };
        let has_name = |subscriber: &Subscriber| {
            subscriber.definition.as_ref().is_some_and(|definition| definition.has_name(&name))
        };
        let ids = self.subscribers.iter().filter(|(_, subscriber)| has_name(subscriber)).map(|(id, _)| *id);
        for id in ids.collect::<Vec<u64>>() {
            self.end(id, SubscriptionEnd::QueryUndefined);
        }
    }

    /// Ends a subscription. If it has not begun, the caller gets [`LiveError::Ended`].
    fn end(&mut self, id: u64, end: SubscriptionEnd) {
        self.end_with(id, end, LiveError::Ended(end));
    }

    /// Ends a subscription. If it has not begun, the caller gets the error.
    fn end_with(&mut self, id: u64, end: SubscriptionEnd, error: LiveError) {
        self.detach(id);
        self.accounts.close(id);
        let Some(subscriber) = self.subscribers.remove(&id) else { return };
        if let Some(Recipient::Caller { reply, .. }) = subscriber.pending.map(|pending| pending.recipient) {
            return self.send_reply(reply, Err(error));
        }
        self.shared.counters.ended.fetch_add(1, Relaxed);
        subscriber.inbox.end(end);
    }

    /// Removes a subscriber whose handle was dropped.
    fn remove(&mut self, id: u64) {
        self.detach(id);
        self.accounts.close(id);
        self.subscribers.remove(&id);
    }

    /// Detaches a subscriber from its query or evaluation, which ends if it has no other subscriber.
    fn detach(&mut self, id: u64) {
        let pending = self.subscribers.get(&id).and_then(|subscriber| subscriber.pending.as_ref());
        if let Some(PendingStage::Evaluation(canonical)) = pending.map(|pending| pending.stage.clone()) {
            self.leave_evaluation(id, &canonical);
        }
        let Some(query) = self.matcher.query_of(id) else { return };
        if let Some(live) = self.matcher.remove_subscriber(id) {
            self.queries.remove(&query);
            self.discard(live);
        }
    }

    /// Drops a query. If it has many rows, it is dropped in the background, because that takes milliseconds.
    fn discard(&mut self, live: LiveQuery) {
        if live.row_count() > MAX_ROWS_DROPPED {
            self.encoders.submit(Key::of(&live.generation), move |_| {
                drop(live);
                JobOutput::Discarded
            });
        }
    }

    /// Returns the deadline of an evaluation.
    fn deadline(&self, requested: Option<Instant>) -> Instant {
        let now = Instant::now();
        let latest = now.checked_add(self.options.evaluation_timeout).unwrap_or(now + LONGEST_TIMEOUT);
        requested.map_or(latest, |requested| requested.min(latest))
    }
}

/// Returns why a waiting subscriber must end: its bucket was dropped, or the definition of its named query has changed.
fn end_reason(subscriber: &Subscriber, query: &Query, snapshot: &Snapshot) -> Option<SubscriptionEnd> {
    let pending = subscriber.pending.as_ref()?;
    if let Recipient::Inbox { bucket } = &pending.recipient
        && !snapshot.state.bucket(&query.bucket).is_ok_and(|known| known.identity() == *bucket)
    {
        return Some(SubscriptionEnd::BucketDropped);
    }
    let is_outdated = |definition: &Definition| !definition.is_in(&snapshot.state);
    subscriber.definition.as_ref().is_some_and(is_outdated).then_some(SubscriptionEnd::QueryUndefined)
}

/// The timeout of an evaluation whose configured timeout would overflow an [`Instant`].
const LONGEST_TIMEOUT: Duration = Duration::from_hours(365 * 24);

impl Drop for Driver {
    fn drop(&mut self) {
        // Releases all callers and subscribers and cancels evaluations, even if the driver panicked.
        self.shared.close();
        for evaluation in self.evaluations.values() {
            evaluation.control.cancel();
        }
        for command in self.shared.take().commands {
            catch_panic(|| drop(command));
        }
        self.queries.clear();
        let subscribers = std::mem::take(&mut self.subscribers);
        self.publish_gauges();
        for (_, reply) in std::mem::take(&mut self.settling) {
            catch_panic(|| drop(reply));
        }
        for subscriber in subscribers.into_values() {
            if let Some(Recipient::Caller { reply, .. }) = subscriber.pending.map(|pending| pending.recipient) {
                catch_panic(|| drop(reply));
            } else {
                self.shared.counters.ended.fetch_add(1, Relaxed);
                subscriber.inbox.end(SubscriptionEnd::Closed);
            }
        }
    }
}
