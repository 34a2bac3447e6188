//! Evaluation of queries that are not live yet, and resuming of subscriptions.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tidewire_pool::Key;
use tidewire_store::query::Budget;
use tidewire_store::{Query, Snapshot};

use super::results::QueryState;
use super::subscriber::{PendingStage, Recipient};
use super::{Driver, Purpose};
use crate::background::{JobId, JobOutput};
use crate::evaluation::{CatchUpError, Evaluated, Evaluation, EvaluationControl, EvaluationError};
use crate::live::{LiveError, MemoryLimit};
use crate::mark::{self, Mark};
use crate::matcher::QueryId;
use crate::query::{LiveQuery, ResultChange};
use crate::resume::{HistoryUnavailable, MissedChanges};
use crate::shared::LiveShared;
use crate::subscription::{First, Following, SubscriptionEnd};

/// A query that is evaluated in the background.
pub(super) struct WaitingQuery {
    pub(super) query: Arc<Query>,
    /// The subscribers that wait for the result.
    pub(super) waiters: Vec<u64>,
    pub(super) control: Arc<EvaluationControl>,
    job: JobId,
    /// The number of times that the result was returned to the background to catch up.
    catch_ups: u32,
}

/// Limit of the work of the live thread for one request, in units of about a nanosecond: half a millisecond.
const MAX_REQUEST_WORK: u64 = 500_000;
/// Limit of the work of the live thread for all requests within [`DIRECT_WINDOW`]: a fifth of the time. Above it, queries are
/// evaluated by background threads.
const MAX_WINDOW_WORK: u64 = 20_000_000;
const DIRECT_WINDOW: Duration = Duration::from_millis(100);

/// The work of the live thread for requests in the current window.
pub(super) struct DirectWork {
    window_start: Instant,
    work: u64,
}

impl DirectWork {
    pub(super) fn new() -> Self {
        Self { window_start: Instant::now(), work: 0 }
    }

    /// Returns the budget of one request, which is zero if the limit of the window is reached.
    fn budget(&mut self) -> Budget {
        if self.window_start.elapsed() >= DIRECT_WINDOW {
            *self = Self::new();
        }
        Budget::unlimited().max_work(if self.work < MAX_WINDOW_WORK { MAX_REQUEST_WORK } else { 0 })
    }

    fn charge(&mut self, budget: &Budget) {
        self.work += budget.work();
    }
}

/// Limit of the catch-ups of one evaluation.
const MAX_CATCH_UPS: u32 = 8;

impl Driver {
    /// Attaches a subscriber to a query, which is evaluated first if it is not live.
    pub(super) fn attach_or_evaluate(&mut self, id: u64, query: Query, snapshot: &Snapshot, deadline: Option<Instant>) {
        let canonical: Arc<[u8]> = query.canonical().into();
        if let Some(live) = self.matcher.find(&canonical) {
            return self.attach(id, live, snapshot);
        }
        if let Some(waiting) = self.evaluations.get_mut(&canonical) {
            waiting.waiters.push(id);
            let deadline = self.deadline(deadline);
            if let Some(waiting) = self.evaluations.get(&canonical) {
                waiting.control.extend(deadline);
            }
            return self.set_stage(id, PendingStage::Evaluation(canonical));
        }
        if let Some(evaluated) = self.evaluate_directly(&query, &canonical, snapshot) {
            return self.install(evaluated, &[id], snapshot);
        }
        let is_new = self.subscribers.get(&id).and_then(|subscriber| subscriber.pending.as_ref());
        if is_new.is_some_and(|pending| matches!(pending.recipient, Recipient::Caller { .. }))
            && self.evaluators.is_full()
        {
            return self.end_with(id, SubscriptionEnd::NotEvaluated, LiveError::Busy);
        }
        self.set_stage(id, PendingStage::Evaluation(Arc::clone(&canonical)));
        self.start_evaluation(Arc::new(query), canonical, vec![id], deadline);
    }

    /// Evaluates a query on the live thread, if the direct budget suffices.
    pub(super) fn evaluate_directly(
        &mut self,
        query: &Query,
        canonical: &Arc<[u8]>,
        snapshot: &Snapshot,
    ) -> Option<Evaluated> {
        let bucket = snapshot.state.bucket(&query.bucket).ok()?;
        let budget = self.direct_work.budget();
        let live = LiveQuery::evaluate(query, Arc::clone(canonical), bucket, self.store.now(), &budget);
        self.direct_work.charge(&budget);
        Some(Evaluated { live: live.ok()?, position: snapshot.position, bucket: bucket.identity() })
    }

    /// Starts the evaluation of a query in the background. The caller sets the stage of the waiting subscribers.
    pub(super) fn start_evaluation(
        &mut self,
        query: Arc<Query>,
        canonical: Arc<[u8]>,
        waiters: Vec<u64>,
        deadline: Option<Instant>,
    ) {
        let control = Arc::new(EvaluationControl::new(self.deadline(deadline)));
        let owner = waiters.first().and_then(|id| self.accounts.owner(*id));
        let evaluation = Evaluation {
            store: self.store.clone(),
            query: Arc::clone(&query),
            canonical: Arc::clone(&canonical),
            control: Arc::clone(&control),
            max_bytes: owner.map_or(self.options.max_bytes, |_| self.options.max_owner_bytes),
            earlier: None,
        };
        let job = self.submit_evaluation(evaluation, owner);
        self.evaluations.insert(canonical, WaitingQuery { query, waiters, control, job, catch_ups: 0 });
    }

    /// Submits an evaluation. Those of one owner run one after the other, so that an owner occupies at most one thread.
    fn submit_evaluation(&mut self, evaluation: Evaluation, owner: Option<u64>) -> JobId {
        let canonical = Arc::clone(&evaluation.canonical);
        let key = owner.map_or(Key::of(&canonical), |owner| Key::of(&owner));
        let run = move |shared: &LiveShared| JobOutput::Evaluated(evaluation.run(&shared.counters).map(Box::new));
        let job = self.evaluators.submit(key, run);
        self.jobs.insert(job, Purpose::Evaluation(canonical));
        job
    }

    /// Removes a subscriber from an evaluation. The evaluation is cancelled if no other subscriber waits for it.
    pub(super) fn leave_evaluation(&mut self, id: u64, canonical: &[u8]) {
        let Some(waiting) = self.evaluations.get_mut(canonical) else { return };
        waiting.waiters.retain(|waiter| *waiter != id);
        if waiting.waiters.is_empty() {
            waiting.control.cancel();
            self.evaluations.remove(canonical);
        }
    }

    pub(super) fn finish_evaluation(
        &mut self,
        job: JobId,
        canonical: &Arc<[u8]>,
        evaluated: Result<Box<Evaluated>, EvaluationError>,
    ) {
        // The evaluation may have been cancelled.
        if self.evaluations.get(canonical).is_none_or(|waiting| waiting.job != job) {
            return;
        }
        let mut evaluated = match evaluated {
            Ok(evaluated) => evaluated,
            Err(failure) => return self.fail_evaluation(canonical, &failure),
        };
        let snapshot = self.catch_up();
        // The commits may have ended the waiting subscribers.
        if self.evaluations.get(canonical).is_none_or(|waiting| waiting.job != job) {
            return;
        }
        // Only few commits are left to apply.
        let budget = Budget::unlimited().max_work(MAX_REQUEST_WORK);
        let earlier = match evaluated.catch_up(&self.store, Some(snapshot.position), &budget) {
            Ok(()) if evaluated.position == self.matcher.position() => {
                let waiters = self.evaluations.remove(canonical).map(|waiting| waiting.waiters);
                return self.install(*evaluated, &waiters.unwrap_or_default(), &snapshot);
            }
            Ok(()) | Err(CatchUpError::Exceeded(_)) => Some(*evaluated),
            Err(CatchUpError::Behind | CatchUpError::BucketDropped) => None,
        };
        let Some(waiting) = self.evaluations.get_mut(canonical) else { return };
        waiting.catch_ups += 1;
        if waiting.catch_ups > MAX_CATCH_UPS {
            return self.fail_evaluation(canonical, &EvaluationError::TooManyCommits);
        }
        let owner = waiting.waiters.first().and_then(|id| self.accounts.owner(*id));
        let evaluation = Evaluation {
            store: self.store.clone(),
            query: Arc::clone(&waiting.query),
            canonical: Arc::clone(canonical),
            control: Arc::clone(&waiting.control),
            max_bytes: owner.map_or(self.options.max_bytes, |_| self.options.max_owner_bytes),
            earlier,
        };
        let job = self.submit_evaluation(evaluation, owner);
        if let Some(waiting) = self.evaluations.get_mut(canonical) {
            waiting.job = job;
        }
    }

    fn fail_evaluation(&mut self, canonical: &Arc<[u8]>, failure: &EvaluationError) {
        // With a short history, even a cheap query can fail in the background. It is then evaluated on the live thread.
        if *failure == EvaluationError::TooManyCommits {
            let snapshot = self.catch_up();
            let query = self.evaluations.get(canonical).map(|waiting| Arc::clone(&waiting.query));
            if let Some(evaluated) = query.and_then(|query| self.evaluate_directly(&query, canonical, &snapshot)) {
                let waiters = self.evaluations.remove(canonical).map(|waiting| waiting.waiters);
                return self.install(evaluated, &waiters.unwrap_or_default(), &snapshot);
            }
        }
        let Some(waiting) = self.evaluations.remove(canonical) else { return };
        for id in waiting.waiters {
            let (end, error) = match failure {
                EvaluationError::Store(error) => (SubscriptionEnd::BucketDropped, LiveError::Store(error.clone())),
                EvaluationError::TooManyCommits => (SubscriptionEnd::NotEvaluated, LiveError::TooManyCommits),
                EvaluationError::Deadline | EvaluationError::Cancelled => {
                    (SubscriptionEnd::NotEvaluated, LiveError::Deadline)
                }
                EvaluationError::TooLarge { max } => {
                    (SubscriptionEnd::TooLarge, LiveError::TooLarge { limit: MemoryLimit::Owner, max: *max })
                }
                EvaluationError::Panicked => (SubscriptionEnd::NotEvaluated, LiveError::Panicked),
            };
            self.end_with(id, end, error);
        }
    }

    /// Adds a query that was evaluated at the position of the matcher, and attaches its subscribers.
    pub(super) fn install(&mut self, evaluated: Evaluated, waiters: &[u64], snapshot: &Snapshot) {
        let Evaluated { live, bucket, .. } = evaluated;
        let hash = mark::hash(&live.query);
        let query = match self.matcher.insert(live) {
            Ok(query) => query,
            Err(error) => {
                for id in waiters {
                    self.end_with(*id, SubscriptionEnd::NotEvaluated, error.into());
                }
                return;
            }
        };
        self.queries.insert(query, QueryState::new(hash, bucket.clone()));
        for id in waiters {
            let pending = self.subscribers.get(id).and_then(|subscriber| subscriber.pending.as_ref());
            let has_other_bucket = pending.is_some_and(
                |pending| matches!(&pending.recipient, Recipient::Inbox { bucket: known } if *known != bucket),
            );
            if has_other_bucket {
                self.end(*id, SubscriptionEnd::BucketDropped);
            } else {
                self.attach(*id, query, snapshot);
            }
        }
        if self.matcher.subscribers(query).is_empty() {
            self.matcher.end(query);
            self.queries.remove(&query);
        }
    }

    /// Adds a subscriber to a live query, and requests its first result.
    fn attach(&mut self, id: u64, query: QueryId, snapshot: &Snapshot) {
        if !self.subscribers.contains_key(&id) {
            return;
        }
        let added = self.check_memory(id, query).and_then(|()| Ok(self.matcher.add_subscriber(id, query)?));
        if let Err(error) = added {
            let end = if matches!(error, LiveError::TooLarge { .. }) {
                SubscriptionEnd::TooLarge
            } else {
                SubscriptionEnd::NotEvaluated
            };
            return self.end_with(id, end, error);
        }
        self.set_stage(id, PendingStage::Result);
        let Some(hash) = self.queries.get(&query).map(|state| state.hash) else { return };
        let pending = self.subscribers.get(&id).and_then(|subscriber| subscriber.pending.as_ref());
        let since = pending.and_then(|pending| match pending.recipient {
            Recipient::Caller { since, .. } => since.filter(|since| since.is_of(hash)),
            Recipient::Inbox { .. } => None,
        });
        match since {
            Some(since) => self.resume(id, query, since, snapshot),
            None => self.request_result(id),
        }
    }

    pub(super) fn set_stage(&mut self, id: u64, stage: PendingStage) {
        if let Some(pending) = self.subscribers.get_mut(&id).and_then(|subscriber| subscriber.pending.as_mut()) {
            pending.stage = stage;
        }
    }

    /// Begins a subscription with the changes since its mark, or with a snapshot if they are not available.
    fn resume(&mut self, id: u64, live: QueryId, since: Mark, snapshot: &Snapshot) {
        let Some(query) = self.matcher.query(live) else { return };
        let is_persistent = snapshot.state.bucket(&query.bucket).is_ok_and(|bucket| bucket.definition().persistent);
        // A restart of the store loses the records of a bucket that is not persistent, without a commit.
        if !is_persistent && since.position().sequence <= self.store.opened_at().sequence {
            return self.request_result(id);
        }
        let mut missed = MissedChanges::after(since.position());
        let budget = self.direct_work.budget();
        let read = missed.read(&self.store, query, snapshot.position, &budget);
        self.direct_work.charge(&budget);
        match read {
            Ok(Ok(())) => self.begin_with_missed(id, live, &missed, snapshot),
            Ok(Err(HistoryUnavailable)) => self.request_result(id),
            Err(_) => self.read_history(id, live, missed),
        }
    }

    /// Reads the rest of the history in the background.
    fn read_history(&mut self, id: u64, live: QueryId, mut missed: MissedChanges) {
        let Some(query) = self.matcher.query(live).cloned() else { return };
        let (store, until) = (self.store.clone(), self.matcher.position());
        let inbox = self.subscribers.get(&id).map(|subscriber| Arc::downgrade(&subscriber.inbox));
        let run = move |_: &LiveShared| {
            // The driver drops the inbox with its subscriber.
            let budget =
                Budget::unlimited().stop_when(move || inbox.as_ref().is_none_or(|inbox| inbox.strong_count() == 0));
            let read = missed.read(&store, &query, until, &budget);
            JobOutput::Read(read.unwrap_or(Err(HistoryUnavailable)).map(|()| missed))
        };
        let key = Key::of(&self.accounts.owner(id).unwrap_or(id));
        let job = self.evaluators.submit(key, run);
        self.jobs.insert(job, Purpose::History(id));
        self.set_stage(id, PendingStage::History(job));
    }

    pub(super) fn finish_history(&mut self, job: JobId, id: u64, missed: Result<MissedChanges, HistoryUnavailable>) {
        let snapshot = self.catch_up();
        let pending = self.subscribers.get(&id).and_then(|subscriber| subscriber.pending.as_ref());
        // The subscriber may have been dropped, or may wait for another evaluation.
        if pending.is_none_or(|pending| pending.stage != PendingStage::History(job)) {
            return;
        }
        self.set_stage(id, PendingStage::Result);
        let Some(live) = self.matcher.query_of(id) else { return };
        let Some(query) = self.matcher.query(live) else { return };
        let budget = Budget::unlimited().max_work(MAX_REQUEST_WORK);
        let read = missed.and_then(|mut missed| {
            let read = missed.read(&self.store, query, snapshot.position, &budget);
            read.unwrap_or(Err(HistoryUnavailable)).map(|()| missed)
        });
        match read {
            Ok(missed) => self.begin_with_missed(id, live, &missed, &snapshot),
            Err(HistoryUnavailable) => self.request_result(id),
        }
    }

    /// Begins a subscription with the missed changes, or with a snapshot if a delta could be wrong.
    fn begin_with_missed(&mut self, id: u64, live: QueryId, missed: &MissedChanges, snapshot: &Snapshot) {
        let now = self.store.now();
        let Some(query) = self.matcher.query(live) else { return };
        // It is unknown whether the subscriber has seen a record that has expired and is not swept yet.
        let has_expired = snapshot.state.bucket(&query.bucket).is_ok_and(|bucket| bucket.expired(now).next().is_some());
        if has_expired || missed.has_expired(now) {
            return self.request_result(id);
        }
        let delta = match self.matcher.replay(live, &missed.net_changes()) {
            Some(ResultChange::Records(delta)) => Some(delta),
            None => None,
            // An aggregate has no deltas.
            Some(ResultChange::Value) => return self.request_result(id),
        };
        if let Some(state) = self.queries.get_mut(&live) {
            state.clear_delivered();
        }
        self.begin(id, First::Resumed(delta), self.matcher.position(), Following::Deltas(&[]));
    }
}
