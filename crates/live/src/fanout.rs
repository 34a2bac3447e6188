//! Tells many at once, on several threads.

use std::convert::Infallible;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use tidewire_pool::{BuildError, Context, Key, Message, Pool};

use crate::subscription::{Event, Inbox, Pushed};

/// A commit that concerns so many queries is told on several threads.
const MANY: usize = 64;

/// Delivers events. All of a commit are delivered before the next is looked at, so that nobody hears of them in another order.
pub(crate) struct Fanout {
    pool: Pool<Part>,
    workers: usize,
}

/// A part of what is to be delivered.
struct Part {
    deliveries: Vec<(Arc<Inbox>, Event)>,
    max_deltas: usize,
    count: Arc<Count>,
}

/// How many parts are left, and what became of the others.
#[derive(Default)]
struct Count {
    state: Mutex<(usize, Delivered)>,
    done: Condvar,
}

/// What became of events.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Delivered {
    /// Events that subscribers have.
    pub(crate) given: u64,
    /// Subscribers that have fallen behind.
    pub(crate) behind: u64,
}

impl Drop for Part {
    fn drop(&mut self) {
        let mut state = self.count.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.0 -= 1;
        if state.0 == 0 {
            self.count.done.notify_one();
        }
    }
}

impl Part {
    fn deliver(&mut self) {
        let delivered = deliver(std::mem::take(&mut self.deliveries), self.max_deltas);
        let all = &mut self.count.state.lock().unwrap_or_else(PoisonError::into_inner).1;
        all.given += delivered.given;
        all.behind += delivered.behind;
    }
}

/// Delivers events here and now.
fn deliver(deliveries: Vec<(Arc<Inbox>, Event)>, max_deltas: usize) -> Delivered {
    let mut delivered = Delivered::default();
    for (inbox, event) in deliveries {
        let pushed = inbox.push(event, max_deltas);
        delivered.given += u64::from(pushed == Pushed::Given);
        delivered.behind += u64::from(pushed == Pushed::FallsBehind);
    }
    delivered
}

impl Fanout {
    pub(crate) fn new(workers: usize) -> Result<Self, BuildError> {
        let handle = |message: &mut Message<Part>, _: &mut Context<'_, Part>| {
            for (_, event) in &message.payload.deliveries {
                if let Event::Delta { delta, .. } = event {
                    // It is made once for all, and here rather than by the first who asks.
                    delta.encoded();
                }
            }
            message.payload.deliver();
            Ok::<(), Infallible>(())
        };
        let pool = Pool::builder().workers(workers.max(1)).start(handle)?;
        Ok(Self { pool, workers: workers.max(1) })
    }

    /// Delivers what a commit brings to subscribers of so many queries.
    pub(crate) fn deliver(&self, deliveries: Vec<(Arc<Inbox>, Event)>, queries: usize, max_deltas: usize) -> Delivered {
        if queries <= MANY || self.workers == 1 {
            return deliver(deliveries, max_deltas);
        }
        let size = deliveries.len().div_ceil(self.workers).max(1);
        let mut deliveries = deliveries.into_iter();
        let parts: Vec<Vec<_>> = std::iter::from_fn(|| Some(deliveries.by_ref().take(size).collect::<Vec<_>>()))
            .take_while(|part: &Vec<_>| !part.is_empty())
            .collect();
        let count = Arc::new(Count::default());
        count.state.lock().unwrap_or_else(PoisonError::into_inner).0 = parts.len();
        if parts.is_empty() {
            return Delivered::default();
        }
        for (key, deliveries) in parts.into_iter().enumerate() {
            let part = Part { deliveries, max_deltas, count: Arc::clone(&count) };
            if let Err(refused) = self.pool.submit(Message::new(Key::of(&key), part)) {
                refused.into_message().payload.deliver();
            }
        }
        let mut state = count.state.lock().unwrap_or_else(PoisonError::into_inner);
        while state.0 > 0 {
            state = count.done.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.1
    }
}
