//! State shared with the driver: requests and counters.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard};

use serde_json::{Map, Value as Json};
use tidewire_store::{Filter, Position, Query};
use tokio::sync::{Notify, Semaphore, oneshot};

use crate::background::FinishedJob;
use crate::live::{LiveError, SubscribeOptions};
use crate::lock::lock;
use crate::subscription::Subscription;
use crate::wake::catch_panic;

/// A request to the driver.
pub(crate) enum Command {
    Subscribe(Box<Subscribe>),
    Settle(oneshot::Sender<Position>),
}

/// A request for a subscription.
pub(crate) struct Subscribe {
    /// The id of the new subscription.
    pub(crate) id: u64,
    pub(crate) target: Target,
    pub(crate) options: SubscribeOptions,
    pub(crate) reply: oneshot::Sender<Result<Subscription, LiveError>>,
}

/// The query of a subscription, or its name.
pub(crate) enum Target {
    Query(Query),
    Named {
        name: String,
        params: Map<String, Json>,
        /// A filter for the rows that the subscriber may see.
        row_filter: Option<Filter>,
    },
}

/// Queued requests to the driver.
#[derive(Default)]
pub(crate) struct Requests {
    pub(crate) commands: VecDeque<Command>,
    /// Subscriptions whose handle was dropped, or whose caller stopped waiting.
    pub(crate) dropped: Vec<u64>,
    /// Subscriptions that requested a snapshot.
    pub(crate) refresh: Vec<u64>,
    /// Background jobs that have ended.
    pub(crate) finished: Vec<FinishedJob>,
    pub(crate) is_closed: bool,
}

/// State that handles, subscriptions and background threads share with the driver.
pub(crate) struct LiveShared {
    requests: Mutex<Requests>,
    /// Permits for queued commands.
    permits: Semaphore,
    pub(crate) wake: Notify,
    last_id: AtomicU64,
    pub(crate) counters: Counters,
}

/// Counters since the start, and gauges.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) commits: AtomicU64,
    pub(crate) events: AtomicU64,
    pub(crate) conflated: AtomicU64,
    pub(crate) ended: AtomicU64,
    pub(crate) restarts: AtomicU64,
    pub(crate) evaluations: AtomicU64,
    pub(crate) reevaluations: AtomicU64,
    pub(crate) too_costly: AtomicU64,
    pub(crate) queries: AtomicUsize,
    pub(crate) subscribers: AtomicUsize,
    pub(crate) kept_bytes: AtomicUsize,
}

impl LiveShared {
    pub(crate) fn new(max_commands: usize) -> Self {
        Self {
            requests: Mutex::default(),
            permits: Semaphore::new(max_commands.clamp(1, Semaphore::MAX_PERMITS)),
            wake: Notify::new(),
            last_id: AtomicU64::new(0),
            counters: Counters::default(),
        }
    }

    fn requests(&self) -> MutexGuard<'_, Requests> {
        lock(&self.requests)
    }

    /// Returns a new id for a subscription or a job.
    pub(crate) fn next_id(&self) -> u64 {
        self.last_id.fetch_add(1, Relaxed) + 1
    }

    /// Sends a command, after waiting for a permit. The command is dropped if the driver has ended.
    pub(crate) async fn send(&self, command: Command) {
        let Ok(permit) = self.permits.acquire().await else { return };
        permit.forget();
        let mut requests = self.requests();
        if !requests.is_closed {
            requests.commands.push_back(command);
        }
        drop(requests);
        self.wake.notify_one();
    }

    /// Requests the end of a subscription whose handle was dropped.
    pub(crate) fn unsubscribe(&self, id: u64) {
        self.requests().dropped.push(id);
        self.wake.notify_one();
    }

    /// Requests a snapshot for a subscription.
    pub(crate) fn refresh(&self, id: u64) {
        self.requests().refresh.push(id);
        self.wake.notify_one();
    }

    /// Reports a background job that has ended.
    pub(crate) fn finish(&self, finished: FinishedJob) {
        let mut requests = self.requests();
        if !requests.is_closed {
            requests.finished.push(finished);
        }
        drop(requests);
        self.wake.notify_one();
    }

    /// Takes all requests, and releases the permits of the commands.
    pub(crate) fn take(&self) -> Requests {
        let mut requests = self.requests();
        let is_closed = requests.is_closed;
        let taken = std::mem::replace(&mut *requests, Requests { is_closed, ..Requests::default() });
        drop(requests);
        for _ in &taken.commands {
            // One by one, so that a waker that panics does not prevent the release of the other permits.
            catch_panic(|| self.permits.add_permits(1));
        }
        Requests { is_closed, ..taken }
    }

    /// Closes the request queue.
    pub(crate) fn close(&self) {
        self.requests().is_closed = true;
        catch_panic(|| self.permits.close());
        self.wake.notify_one();
    }
}

impl std::fmt::Debug for LiveShared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LiveShared").field("counters", &self.counters).finish_non_exhaustive()
    }
}
