//! A store with or without live queries.

use futures_util::{StreamExt as _, stream};
use serde_json::Value as Json;
use tidewire_bench::{Meter, Sample};
use tidewire_live::{Event, Live, LiveOptions, Mode, Subscription};
use tidewire_store::{Query, Store};
use tokio::runtime::{self, Runtime};

use super::drain::Drain;
use super::rows::{self, BUCKET, MAX_COUNT, Random};

/// Writes in flight.
pub(super) const WRITES_IN_FLIGHT: usize = 64;

/// Subscriptions in flight while the store is set up.
const SUBSCRIPTIONS_IN_FLIGHT: usize = 512;

/// A store, and the subscribers of its live queries.
pub(super) struct LiveStore {
    runtime: Runtime,
    rows: u64,
    random: Random,
    subscribers: Option<Subscribers>,
    store: Store,
}

struct Subscribers {
    // Dropped before the live queries.
    drain: Drain<Subscription>,
    live: Live,
}

impl LiveStore {
    /// Creates a store with this number of rows and without live queries.
    pub(super) fn without_queries(rows: u64, indexes: &[&str]) -> Self {
        Self {
            runtime: runtime(),
            rows,
            random: Random(0),
            subscribers: None,
            store: rows::store_with_rows(rows, indexes),
        }
    }

    /// Creates a store with this number of rows, and a delta subscription to each of the queries.
    pub(super) fn with_queries(rows: u64, indexes: &[&str], queries: impl IntoIterator<Item = Query>) -> Self {
        let this = Self::without_queries(rows, indexes);
        let live = live(&this.store);
        let drain = Drain::new(this.runtime.block_on(subscribe(&live, queries)));
        Self { subscribers: Some(Subscribers { drain, live }), ..this }
    }

    /// Updates this number of random rows. Panics unless each update reaches a subscriber.
    pub(super) fn round(&mut self, meter: Meter, writes: u64) -> Sample {
        self.round_of(meter, writes, writes)
    }

    /// Like [`round`](Self::round), with another number of operations to divide the cost by.
    pub(super) fn round_of(&mut self, meter: Meter, writes: u64, operations: u64) -> Sample {
        let Self { runtime, rows, random, subscribers, store } = self;
        let updates: Vec<(u64, u64)> = (0..writes).map(|_| (random.below(*rows), random.below(MAX_COUNT))).collect();
        let Some(Subscribers { drain, live }) = subscribers else {
            return meter.measure(operations, || runtime.block_on(write(store, &updates)));
        };
        let mut events = 0;
        let sample = meter.measure(operations, || {
            let work = async {
                write(store, &updates).await;
                live.settled().await.expect("the live queries are running");
            };
            runtime.block_on(drain.during(work, |event| {
                assert!(matches!(event, Event::Delta { .. }), "no subscriber falls behind");
                events += 1;
            }));
        });
        assert!(events == writes, "{events} of {writes} writes reached a subscriber");
        assert!(live.stats().restarts == 0, "the live queries have missed no commit");
        sample
    }
}

/// Creates live queries without a limit on subscriptions.
pub(super) fn live(store: &Store) -> Live {
    Live::with_options(store.clone(), LiveOptions::default().max_subscriptions(usize::MAX))
}

/// Opens a delta subscription to each of the queries.
pub(super) async fn subscribe(live: &Live, queries: impl IntoIterator<Item = Query>) -> Vec<Subscription> {
    let queries = queries.into_iter();
    let mut subscriptions = Vec::with_capacity(queries.size_hint().0);
    let mut pending =
        stream::iter(queries).map(|query| live.subscribe(query, Mode::Delta)).buffer_unordered(SUBSCRIPTIONS_IN_FLIGHT);
    while let Some(subscription) = pending.next().await {
        subscriptions.push(subscription.expect("the subscription is accepted"));
    }
    subscriptions
}

/// Updates rows, with [`WRITES_IN_FLIGHT`] writes in flight.
async fn write(store: &Store, updates: &[(u64, u64)]) {
    stream::iter(updates)
        .map(|(id, count)| store.update(BUCKET, Json::from(*id), rows::patch(*count), None))
        .buffer_unordered(WRITES_IN_FLIGHT)
        .for_each(|row| async { drop(row.expect("the row exists")) })
        .await;
}

/// Creates the runtime of writers and subscribers, which has one thread. Store and live queries have another thread each.
pub(super) fn runtime() -> Runtime {
    runtime::Builder::new_current_thread().build().expect("a runtime starts")
}
