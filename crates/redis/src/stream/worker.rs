//! The worker: a loop on the task of its caller that starts requests and handlers and waits for them.
//!
//! Requests and handlers are tasks of two [`JoinSet`]s, so the loop itself never waits for the server, and all of them end with it. At
//! most one request of each kind runs at a time. Each has a time before which it does not start: after a failure that is a backoff.

use std::collections::{BTreeSet, HashSet};
use std::fmt::Display;
use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::watch;
use tokio::task::{JoinError, JoinSet};
use tokio::time::{Instant, sleep_until};

use super::group::{Claim, Group, Stream, Taken};
use super::handling::{Outcome, handle};
use super::held::{EntryKey, Gone, Held};
use super::options::{MIN_INTERVAL, backoff};
use super::stats::Counters;
use super::{Delivery, WorkerOptions, WorkerStats};
use crate::command::ToArgument;
use crate::connection::{after, later};
use crate::{Client, Error, ErrorCode, RequestOutcome};

/// A consumer of a group that calls a handler for each entry of its streams.
///
/// [The module](super) has an example, and describes what is guaranteed.
#[derive(Debug)]
#[must_use = "a worker does nothing until it is run"]
pub struct Worker {
    group: Group,
    handle: WorkerHandle,
}

/// A handle to a [`Worker`], which stops it and has its statistics.
#[derive(Debug, Clone)]
pub struct WorkerHandle {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    is_stopping: watch::Sender<bool>,
    counters: Arc<Counters>,
}

impl Worker {
    /// Creates a worker for a stream. Nothing happens until it is [run](Self::run).
    pub fn new(client: &Client, stream: impl ToArgument, options: WorkerOptions) -> Self {
        let group = Group { client: client.clone(), streams: Vec::new(), options: options.limited() };
        let shared = Shared { is_stopping: watch::Sender::new(false), counters: Arc::default() };
        Self { group, handle: WorkerHandle { shared: Arc::new(shared) } }.stream(stream)
    }

    /// Adds another stream, unless the worker has it already. Entries of different streams have no order.
    pub fn stream(mut self, stream: impl ToArgument) -> Self {
        let key = stream.with_bytes(Bytes::copy_from_slice);
        if !self.group.has_stream(&key) {
            self.group.streams.push(Stream::new(key));
        }
        self
    }

    /// Returns a handle that stops the worker.
    pub fn handle(&self) -> WorkerHandle {
        self.handle.clone()
    }

    /// Calls the handler for each entry, until the worker is [stopped](WorkerHandle::stop).
    ///
    /// An entry is acknowledged after the handler has returned `Ok`. After an error or a panic it stays pending and is handled again.
    /// Handlers run on tasks of the current tokio runtime.
    ///
    /// # Errors
    ///
    /// If the client is closed, which aborts the running handlers: [stop](WorkerHandle::stop) the worker first. If the group cannot be created because a key is not a stream, the user has no permission, or the server
    /// does not know the command. Other errors are repeated.
    ///
    /// # Cancellation
    ///
    /// Dropping the future aborts the handlers. Their entries, and those that were delivered and not yet handled, stay pending.
    pub async fn run<H, F, E>(self, handler: H) -> Result<(), Error>
    where
        H: Fn(Delivery) -> F + Send + Sync + 'static,
        F: Future<Output = Result<(), E>> + Send + 'static,
        E: Display,
    {
        let Self { group, handle: WorkerHandle { shared } } = self;
        tracing::info!(group = group.options.group, consumer = group.options.consumer, "stream worker started");
        let ended = Run::new(group, handler, Arc::clone(&shared.counters)).run(shared.is_stopping.subscribe()).await;
        match &ended {
            Ok(()) => tracing::info!("stream worker stopped"),
            Err(error) => tracing::error!(%error, "stream worker failed, running handlers were aborted"),
        }
        ended
    }
}

impl WorkerHandle {
    /// Stops the worker: it takes no more entries, waits for running handlers up to [`grace`](WorkerOptions::grace), and then
    /// [`Worker::run`] returns.
    ///
    /// Entries that were delivered and whose handler was not started can be claimed by other workers at once.
    pub fn stop(&self) {
        self.shared.is_stopping.send_replace(true);
    }

    /// Returns the statistics of the worker.
    pub fn stats(&self) -> WorkerStats {
        self.shared.counters.stats()
    }
}

/// A running worker.
struct Run<H> {
    group: Arc<Group>,
    handler: Arc<H>,
    counters: Arc<Counters>,
    held: Held,
    handlers: JoinSet<(EntryKey, Outcome)>,
    requests: JoinSet<Reply>,
    /// The kinds of requests that run now, at most one request of each.
    running: BTreeSet<Kind>,
    /// Whether the group may not exist.
    must_create: bool,
    /// Whether the group has existed.
    was_created: bool,
    /// Whether entries may be pending for this consumer that the worker does not hold: at the start, and after a reply was lost.
    must_recover: bool,
    /// Requests that failed since the last that succeeded.
    failures: u64,
    /// When requests other than extensions may start.
    requests_at: Instant,
    read_at: Instant,
    claim_at: Instant,
    extend_at: Instant,
}

/// A kind of request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Create,
    Read,
    /// Also of entries for another attempt.
    Claim,
    Extend,
}

/// The end of a request.
enum Reply {
    Created(Result<(), Error>),
    Read(Result<Vec<(EntryKey, Delivery)>, Error>),
    Claimed(Claim, Result<Taken, Error>),
    /// With the entries that were to be taken.
    Retried(Vec<EntryKey>, Result<Taken, Error>),
    Extended(Result<Vec<(EntryKey, Gone)>, Error>),
    Released(Result<(), Error>),
}

impl<H, F, E> Run<H>
where
    H: Fn(Delivery) -> F + Send + Sync + 'static,
    F: Future<Output = Result<(), E>> + Send + 'static,
    E: Display,
{
    fn new(group: Group, handler: H, counters: Arc<Counters>) -> Self {
        let now = Instant::now();
        Self {
            group: Arc::new(group),
            handler: Arc::new(handler),
            counters,
            held: Held::default(),
            handlers: JoinSet::new(),
            requests: JoinSet::new(),
            running: BTreeSet::new(),
            must_create: true,
            was_created: false,
            must_recover: true,
            failures: 0,
            requests_at: now,
            read_at: now,
            claim_at: now,
            extend_at: now,
        }
    }

    async fn run(mut self, mut is_stopping: watch::Receiver<bool>) -> Result<(), Error> {
        loop {
            self.start_due();
            // Everything that is due was started, so these are in the future.
            let next = [self.create_due(), self.claim_due(), self.read_due(), self.extend_due()];
            let next = next.into_iter().flatten().min();
            tokio::select! {
                biased;
                // Cannot fail, because `handle` owns the sender.
                () = async { let _ = is_stopping.wait_for(|is_stopping| *is_stopping).await; } => break,
                Some(ended) = self.handlers.join_next() => self.handled(joined(ended))?,
                Some(ended) = self.requests.join_next() => self.replied(joined(ended))?,
                () = sleep_until(next.unwrap_or_else(Instant::now)), if next.is_some() => {}
            }
        }
        self.stop().await
    }

    /// Waits for the running handlers, and keeps their entries.
    async fn stop(&mut self) -> Result<(), Error> {
        let deadline = after(self.group.options.grace);
        // Dropping the requests unblocks the read. What it was about to return stays pending.
        self.requests = JoinSet::new();
        self.running.clear();
        let queued = self.held.take_queue();
        if !queued.is_empty() {
            let group = Arc::clone(&self.group);
            self.requests.spawn(async move { Reply::Released(group.release(queued).await) });
        }
        while !self.handlers.is_empty() || !self.requests.is_empty() {
            let extend_at = self.extend_due().filter(|_| !self.handlers.is_empty());
            if extend_at.is_some_and(|due| due <= Instant::now()) {
                self.start_extension();
                continue;
            }
            tokio::select! {
                () = sleep_until(deadline) => break,
                Some(ended) = self.handlers.join_next() => self.handled(joined(ended))?,
                Some(ended) = self.requests.join_next() => self.replied(joined(ended))?,
                () = sleep_until(extend_at.unwrap_or(deadline)), if extend_at.is_some() => {}
            }
        }
        if !self.handlers.is_empty() {
            tracing::warn!(handlers = self.handlers.len(), "aborted handlers after the grace period");
        }
        self.handlers.shutdown().await;
        Ok(())
    }

    /// Starts the handlers and requests that are due.
    fn start_due(&mut self) {
        let options = &self.group.options;
        while self.handlers.len() < options.max_concurrent
            && let Some((key, delivery)) = self.held.start()
        {
            let (group, counters) = (Arc::clone(&self.group), Arc::clone(&self.counters));
            let handler = Arc::clone(&self.handler);
            self.handlers.spawn(async move { (key, handle(&group, &counters, &*handler, key, delivery).await) });
        }
        let now = Instant::now();
        let is_due = |due: Option<Instant>| due.is_some_and(|due| due <= now);
        if is_due(self.extend_due()) {
            self.start_extension();
        }
        if is_due(self.create_due()) {
            self.running.insert(Kind::Create);
            let group = Arc::clone(&self.group);
            self.requests.spawn(async move { Reply::Created(group.create().await) });
        }
        if is_due(self.claim_due()) {
            self.start_claim(now);
        }
        if is_due(self.read_due()) {
            self.running.insert(Kind::Read);
            // A server that does not wait for new entries is not asked all the time.
            self.read_at = later(now, MIN_INTERVAL);
            let group = Arc::clone(&self.group);
            self.requests.spawn(async move { Reply::Read(group.read().await) });
        }
    }

    fn start_extension(&mut self) {
        self.running.insert(Kind::Extend);
        self.extend_at = after(self.group.options.extension_interval());
        let (group, keys) = (Arc::clone(&self.group), self.held.claimed());
        self.requests.spawn(async move { Reply::Extended(group.extend(keys).await) });
    }

    fn start_claim(&mut self, now: Instant) {
        self.running.insert(Kind::Claim);
        let group = Arc::clone(&self.group);
        let due = if self.must_recover { Vec::new() } else { self.held.due(now, group.options.batch) };
        if !due.is_empty() {
            self.requests.spawn(async move {
                let taken = group.take(Claim::Own, &due).await;
                Reply::Retried(due, taken)
            });
            return;
        }
        let claim = if self.must_recover { Claim::Own } else { Claim::Stale };
        let held: HashSet<_> = self.held.all().collect();
        self.requests.spawn(async move { Reply::Claimed(claim, group.claim(claim, &held).await) });
    }

    fn is_running(&self, kind: Kind) -> bool {
        self.running.contains(&kind)
    }

    fn create_due(&self) -> Option<Instant> {
        (self.must_create && !self.is_running(Kind::Create)).then_some(self.requests_at)
    }

    fn claim_due(&self) -> Option<Instant> {
        if self.must_create || self.is_running(Kind::Claim) || !self.held.is_queue_empty() {
            return None;
        }
        if self.must_recover {
            // What a running read returns is not held yet.
            return (!self.is_running(Kind::Read)).then_some(self.requests_at);
        }
        let due = self.held.next_retry().map_or(self.claim_at, |retry| retry.min(self.claim_at));
        Some(due.max(self.requests_at))
    }

    fn read_due(&self) -> Option<Instant> {
        let is_full = !self.held.is_queue_empty() || self.held.retrying() >= self.group.options.max_retrying;
        (!self.must_create && !self.must_recover && !self.is_running(Kind::Read) && !is_full)
            .then(|| self.read_at.max(self.requests_at))
    }

    fn extend_due(&self) -> Option<Instant> {
        (self.held.len() > 0 && !self.is_running(Kind::Extend)).then_some(self.extend_at)
    }

    /// Handles the end of a handler.
    fn handled(&mut self, (key, outcome): (EntryKey, Outcome)) -> Result<(), Error> {
        match outcome {
            Outcome::Done => {
                self.held.forget(key);
            }
            Outcome::Failed { deliveries } => {
                let due = after(self.group.options.retry_delay(deliveries));
                if let Err(gone) = self.held.retry_at(key, due) {
                    self.count_gone(gone);
                }
            }
            Outcome::Gone => {
                self.held.forget(key);
                self.count_gone(Gone::Lost);
            }
            Outcome::Ended(error) => return Err(error),
        }
        Ok(())
    }

    /// Handles the end of a request.
    fn replied(&mut self, reply: Reply) -> Result<(), Error> {
        match reply {
            Reply::Created(created) => {
                self.running.remove(&Kind::Create);
                let is_first = !self.was_created;
                if self.checked("XGROUP CREATE", created, is_first)?.is_some() {
                    (self.must_create, self.was_created) = (false, true);
                }
            }
            Reply::Read(read) => {
                self.running.remove(&Kind::Read);
                self.note_lost_reply(&read);
                for (key, delivery) in self.checked("XREADGROUP", read, false)?.unwrap_or_default() {
                    self.enqueue(key, delivery);
                }
            }
            Reply::Claimed(claim, taken) => {
                self.running.remove(&Kind::Claim);
                // An earlier request of it may have taken entries.
                self.must_recover |= taken.is_err();
                let Some(taken) = self.checked("claiming", taken, false)? else { return Ok(()) };
                match claim {
                    Claim::Own => self.must_recover = taken.has_more,
                    Claim::Stale if taken.has_more && !taken.is_empty() => {}
                    Claim::Stale => self.claim_at = after(self.group.options.claim_interval),
                }
                self.count_deleted(&taken.deleted);
                for (key, delivery) in taken.entries {
                    tracing::debug!(id = %delivery.id, deliveries = delivery.deliveries, "stream entry claimed");
                    self.counters.count(|stats| stats.claimed += 1);
                    self.enqueue(key, delivery);
                }
            }
            Reply::Retried(keys, taken) => {
                self.running.remove(&Kind::Claim);
                self.must_recover |= taken.is_err();
                let Some(taken) = self.checked("retrying", taken, false)? else { return Ok(()) };
                self.count_deleted(&taken.deleted);
                let mut gone: HashSet<_> = keys.into_iter().collect();
                for key in &taken.deleted {
                    gone.remove(key);
                }
                for (key, delivery) in taken.entries {
                    gone.remove(&key);
                    self.counters.count(|stats| stats.retried += 1);
                    self.enqueue(key, delivery);
                }
                for key in gone {
                    self.lose(key, Gone::Lost);
                }
            }
            Reply::Extended(gone) => {
                self.running.remove(&Kind::Extend);
                let Some(gone) = self.checked("extending", gone, false)? else {
                    self.extend_at = self.extend_at.min(self.requests_at);
                    return Ok(());
                };
                for (key, gone) in gone {
                    self.lose(key, gone);
                }
            }
            Reply::Released(released) => {
                self.checked("releasing", released, false)?;
            }
        }
        Ok(())
    }

    /// Counts and logs an error, and delays the next requests. Returns it if the worker cannot go on.
    fn checked<T>(&mut self, request: &str, result: Result<T, Error>, is_first: bool) -> Result<Option<T>, Error> {
        let error = match result {
            Ok(value) => {
                self.failures = 0;
                return Ok(Some(value));
            }
            Err(error) => error,
        };
        self.counters.count(|stats| stats.errors += 1);
        let is_misconfigured =
            matches!(error.code(), Some(ErrorCode::WrongType | ErrorCode::NoPermission | ErrorCode::Err));
        if is_final(&error) || is_first && is_misconfigured {
            return Err(error);
        }
        self.failures += 1;
        let options = self.group.client.options();
        self.requests_at = after(backoff(options.min_backoff, options.max_backoff, self.failures));
        if error.code() == Some(&ErrorCode::NoGroup) {
            self.must_create = true;
        }
        tracing::warn!(request, %error, failures = self.failures, "request of a stream worker failed");
        Ok(None)
    }

    /// Notes that entries may be pending for this consumer that the worker does not hold.
    fn note_lost_reply<T>(&mut self, result: &Result<T, Error>) {
        if let Err(error) = result
            && !matches!(error, Error::Server(_))
            && error.outcome() != Some(RequestOutcome::NeverSent)
        {
            self.must_recover = true;
        }
    }

    fn enqueue(&mut self, key: EntryKey, delivery: Delivery) {
        if self.held.len() == 0 {
            self.extend_at = after(self.group.options.extension_interval());
        }
        self.held.enqueue(key, delivery);
    }

    fn lose(&mut self, key: EntryKey, gone: Gone) {
        if self.held.lose(key, gone) {
            self.count_gone(gone);
        }
    }

    fn count_deleted(&mut self, keys: &[EntryKey]) {
        for key in keys {
            self.held.forget(*key);
            self.count_gone(Gone::Deleted);
        }
    }

    fn count_gone(&self, gone: Gone) {
        tracing::debug!(?gone, "stream entry is no longer pending for this worker");
        self.counters.count(|stats| match gone {
            Gone::Lost => stats.lost += 1,
            Gone::Deleted => stats.deleted += 1,
        });
    }
}

/// Returns whether no request can succeed any more.
pub(super) fn is_final(error: &Error) -> bool {
    matches!(error, Error::Closed { .. } | Error::Command(_))
}

/// Returns the result of a task. Panics of handlers are caught, so a panic is of this crate and goes on.
fn joined<T>(ended: Result<T, JoinError>) -> T {
    ended.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()))
}
