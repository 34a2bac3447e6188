//! Delivers the events of a commit to many subscribers, on several threads.

use std::convert::Infallible;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use tidewire_pool::{BuildError, Context, Key, Message, Pool};

use crate::lock::lock;
use crate::subscription::{Event, Inbox, Pushed};

/// If a commit changes at most this number of queries, the live thread delivers its events without the other threads.
const MAX_QUERIES_INLINE: usize = 64;

/// Fan-out of events to subscribers. [`deliver`](Self::deliver) returns when all events of a commit are delivered, so subscribers
/// receive commits in order.
pub(crate) struct Fanout {
    pool: Pool<Option<Batch>>,
    workers: usize,
    limits: DeliveryLimits,
}

/// Limits of deliveries.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DeliveryLimits {
    /// Limit of the queued deltas of a subscriber.
    pub(crate) max_deltas: usize,
    /// Limit of the bytes of an encoded delta.
    pub(crate) max_bytes: usize,
}

/// The deliveries of one worker.
struct Batch {
    deliveries: Vec<(Arc<Inbox>, Event)>,
    limits: DeliveryLimits,
    progress: Arc<Progress>,
}

/// The progress of the batches of a commit.
#[derive(Default)]
struct Progress {
    state: Mutex<ProgressState>,
    done: Condvar,
}

#[derive(Default)]
struct ProgressState {
    batches_left: usize,
    delivered: Delivered,
}

/// Counts of the deliveries of a commit.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Delivered {
    /// Events that were queued.
    pub(crate) queued: u64,
    /// Subscribers whose queue was full. They continue with a snapshot.
    pub(crate) fell_behind: u64,
}

impl Progress {
    fn state(&self) -> MutexGuard<'_, ProgressState> {
        lock(&self.state)
    }
}

impl Batch {
    fn deliver(&mut self) {
        let delivered = deliver(std::mem::take(&mut self.deliveries), self.limits.max_deltas);
        let all = &mut self.progress.state().delivered;
        all.queued += delivered.queued;
        all.fell_behind += delivered.fell_behind;
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        let mut state = self.progress.state();
        state.batches_left -= 1;
        if state.batches_left == 0 {
            self.progress.done.notify_one();
        }
    }
}

/// Delivers events on this thread.
fn deliver(deliveries: Vec<(Arc<Inbox>, Event)>, max_deltas: usize) -> Delivered {
    let mut delivered = Delivered::default();
    for (inbox, event) in deliveries {
        let pushed = inbox.push(event, max_deltas);
        delivered.queued += u64::from(pushed == Pushed::Queued);
        delivered.fell_behind += u64::from(pushed == Pushed::FellBehind);
    }
    delivered
}

impl Fanout {
    pub(crate) fn new(workers: usize, limits: DeliveryLimits) -> Result<Self, BuildError> {
        let handle = |message: &mut Message<Option<Batch>>, _: &mut Context<'_, Option<Batch>>| {
            // Moved out of the message, so that the batch is dropped here even after a panic. Otherwise the pool would keep it in a
            // dead letter, and the live thread would wait for it forever.
            if let Some(mut batch) = message.payload.take() {
                for (_, event) in &batch.deliveries {
                    if let Event::Delta { delta, .. } = event {
                        // Encodes the delta once for all subscribers. A delta that is too large fails when a subscriber encodes it.
                        delta.encoded_within(batch.limits.max_bytes);
                    }
                }
                batch.deliver();
            }
            Ok::<(), Infallible>(())
        };
        let pool = Pool::builder().workers(workers.max(1)).start(handle)?;
        Ok(Self { pool, workers: workers.max(1), limits })
    }

    /// Delivers the events of a commit. `queries` is the number of queries that it changes.
    pub(crate) fn deliver(&self, deliveries: Vec<(Arc<Inbox>, Event)>, queries: usize) -> Delivered {
        let limits = self.limits;
        if queries <= MAX_QUERIES_INLINE || self.workers == 1 || deliveries.is_empty() {
            return deliver(deliveries, limits.max_deltas);
        }
        let size = deliveries.len().div_ceil(self.workers);
        let mut deliveries = deliveries.into_iter();
        let batches: Vec<Vec<_>> = std::iter::from_fn(|| Some(deliveries.by_ref().take(size).collect::<Vec<_>>()))
            .take_while(|batch: &Vec<_>| !batch.is_empty())
            .collect();
        let progress = Arc::new(Progress::default());
        progress.state().batches_left = batches.len();
        for (key, deliveries) in batches.into_iter().enumerate() {
            let batch = Batch { deliveries, limits, progress: Arc::clone(&progress) };
            if let Err(refused) = self.pool.submit(Message::new(Key::of(&key), Some(batch)))
                && let Some(mut batch) = refused.into_message().payload
            {
                batch.deliver();
            }
        }
        let mut state = progress.state();
        while state.batches_left > 0 {
            state = progress.done.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.delivered
    }
}
