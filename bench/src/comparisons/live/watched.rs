//! A store that is written to, with or without live queries beside it.

use futures_util::{StreamExt as _, stream};
use serde_json::Value as Json;
use tidewire_bench::{Meter, Sample};
use tidewire_live::{Event, Live, LiveOptions, Mode, Subscription};
use tidewire_store::{Query, Store};
use tokio::runtime::{self, Runtime};

use super::drain::Drain;
use super::rows::{self, BUCKET, COUNTS, Random};

/// How many writes wait at a time.
pub(super) const WRITERS: usize = 64;

/// How many subscribe at a time.
const SUBSCRIBING: usize = 512;

/// A store, and who follows it.
pub(super) struct Watched {
    runtime: Runtime,
    rows: u64,
    random: Random,
    subscribers: Option<Subscribers>,
    store: Store,
}

struct Subscribers {
    // They end before what they follow.
    drain: Drain<Subscription>,
    live: Live,
}

impl Watched {
    /// Has so many rows, and nobody follows them.
    pub(super) fn unwatched(rows: u64, indexes: &[&str]) -> Self {
        Self { runtime: runtime(), rows, random: Random(0), subscribers: None, store: rows::filled(rows, indexes) }
    }

    /// Has so many rows, and each of these queries is followed by deltas.
    pub(super) fn with_queries(rows: u64, indexes: &[&str], queries: impl IntoIterator<Item = Query>) -> Self {
        let this = Self::unwatched(rows, indexes);
        let live = live(&this.store);
        let drain = Drain::new(this.runtime.block_on(subscribe(&live, queries)));
        Self { subscribers: Some(Subscribers { drain, live }), ..this }
    }

    /// Writes so many rows, and panics unless a subscriber hears of each.
    pub(super) fn round(&mut self, meter: Meter, writes: u64) -> Sample {
        self.round_of(meter, writes, writes)
    }

    /// The same, where so many operations are done by the writes.
    pub(super) fn round_of(&mut self, meter: Meter, writes: u64, operations: u64) -> Sample {
        let Self { runtime, rows, random, subscribers, store } = self;
        let updates: Vec<(u64, u64)> = (0..writes).map(|_| (random.below(*rows), random.below(COUNTS))).collect();
        let Some(Subscribers { drain, live }) = subscribers else {
            return meter.measure(operations, || runtime.block_on(write(store, &updates)));
        };
        let mut heard = 0;
        let sample = meter.measure(operations, || {
            let work = async {
                write(store, &updates).await;
                live.settled().await.expect("the live queries go on");
            };
            runtime.block_on(drain.during(work, |event| {
                assert!(matches!(event, Event::Delta { .. }), "nobody falls behind");
                heard += 1;
            }));
        });
        assert!(heard == writes, "{heard} of {writes} writes were heard of");
        assert!(live.stats().restarts == 0, "the live queries have missed nothing");
        sample
    }
}

/// Live queries that take as many subscriptions as come.
pub(super) fn live(store: &Store) -> Live {
    Live::with_options(store.clone(), LiveOptions::default().max_subscriptions(usize::MAX))
}

/// Follows each of these queries by deltas.
pub(super) async fn subscribe(live: &Live, queries: impl IntoIterator<Item = Query>) -> Vec<Subscription> {
    let queries = queries.into_iter();
    let mut subscriptions = Vec::with_capacity(queries.size_hint().0);
    let mut coming =
        stream::iter(queries).map(|query| live.subscribe(query, Mode::Delta)).buffer_unordered(SUBSCRIBING);
    while let Some(subscription) = coming.next().await {
        subscriptions.push(subscription.expect("the query can be followed"));
    }
    subscriptions
}

/// Gives rows other counts, with [`WRITERS`] writes under way.
async fn write(store: &Store, updates: &[(u64, u64)]) {
    stream::iter(updates)
        .map(|(id, count)| store.update(BUCKET, Json::from(*id), rows::patch(*count), None))
        .buffer_unordered(WRITERS)
        .for_each(|row| async { drop(row.expect("the row is there")) })
        .await;
}

/// The one thread of those who write and those who hear: beside it there are that of the store and that of the live queries.
pub(super) fn runtime() -> Runtime {
    runtime::Builder::new_current_thread().build().expect("a runtime starts")
}
