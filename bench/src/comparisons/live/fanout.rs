//! The fan-out of one commit to many subscribers of the same query.

use bytes::Bytes;
use futures_util::Stream;
use serde_json::{Value as Json, json};
use tidewire_bench::{Contender, Meter, Metric, Sample, Workload};
use tidewire_live::{Event, Live, Subscription};
use tidewire_store::{Position, Query, Store};
use tokio::runtime::Runtime;

use super::super::Effort;
use super::drain::Drain;
use super::naive::{NaiveNotifier, Queue};
use super::rows::{self, BUCKET, name, query};
use super::store::{live, runtime, subscribe};

const ROWS: u64 = 100;

/// The row that is updated.
const ID: u64 = 7;

pub(super) fn same_query(effort: Effort) -> Workload {
    let (subscribers, commits) = (effort.operations(10_000), effort.operations(2_000).min(20));
    let events = subscribers * commits;
    let alone = effort.operations(10_000);
    let (mut naive, mut live, mut single) = (None, None, None);
    Workload {
        name: "live-fanout",
        about: format!(
            "{commits} updates of a row of {} bytes, one at a time, with {subscribers} subscribers of the same query: {events} \
             events, each read as JSON after it has been delivered to all. \"per subscriber\" is a thread that evaluates and \
             encodes each change for every subscriber, with a queue for each. tidewire-live must give all subscribers the same \
             bytes. \"one subscriber\" shows the cost of a commit without fan-out, by {alone} updates. The updates are \
             included.",
            rows::BYTES
        ),
        operation: "event",
        metrics: &[Metric::Cpu, Metric::Throughput, Metric::Allocations],
        contenders: vec![
            Contender::new("per subscriber", move |meter| {
                naive.get_or_insert_with(|| Subscribed::naive(subscribers)).round(
                    meter,
                    subscribers,
                    commits,
                    |bytes| bytes,
                )
            }),
            Contender::new("tidewire-live", move |meter| {
                live.get_or_insert_with(|| Subscribed::live(subscribers)).live_round(meter, subscribers, commits)
            }),
            Contender::new("one subscriber", move |meter| {
                single.get_or_insert_with(|| Subscribed::live(1)).live_round(meter, 1, alone)
            }),
        ],
    }
}

/// A store, and the subscribers of one row.
struct Subscribed<S, N> {
    runtime: Runtime,
    count: u64,
    // Fields are dropped in this order: the subscribers first, and the notifier after the store.
    drain: Drain<S>,
    store: Store,
    notifier: N,
}

/// Notifies subscribers of commits.
pub(super) trait Notifier {
    /// Waits until all commits up to this position have been delivered to the subscribers.
    async fn settled(&mut self, position: Position);
}

impl Notifier for Live {
    async fn settled(&mut self, position: Position) {
        let settled = Self::settled(self).await.expect("the live queries are running");
        assert!(settled.sequence >= position.sequence, "all published commits have been processed");
    }
}

impl Subscribed<Queue, NaiveNotifier> {
    fn naive(subscribers: u64) -> Self {
        let store = rows::store_with_rows(ROWS, &["name"]);
        let (notifier, queues) = NaiveNotifier::new(&store, queries(subscribers));
        Self { runtime: runtime(), count: 0, drain: Drain::new(queues), store, notifier }
    }
}

impl Subscribed<Subscription, Live> {
    fn live(subscribers: u64) -> Self {
        let (runtime, store) = (runtime(), rows::store_with_rows(ROWS, &["name"]));
        let live = live(&store);
        let drain = Drain::new(runtime.block_on(subscribe(&live, queries(subscribers))));
        Self { runtime, count: 0, drain, store, notifier: live }
    }

    /// Runs a round, and checks that all subscribers receive the same bytes.
    fn live_round(&mut self, meter: Meter, subscribers: u64, commits: u64) -> Sample {
        let (mut events, mut first) = (0, Bytes::new());
        self.round(meter, subscribers, commits, |event| {
            let Event::Delta { delta, .. } = event else { panic!("no subscriber falls behind") };
            let encoded = delta.encoded();
            if events % subscribers == 0 {
                first = encoded.clone();
            }
            events += 1;
            assert!(encoded.as_ptr() == first.as_ptr(), "a delta is encoded once");
            encoded
        })
    }
}

impl<S: Stream + Unpin, N: Notifier> Subscribed<S, N> {
    fn round(
        &mut self,
        meter: Meter,
        subscribers: u64,
        commits: u64,
        mut encoded: impl FnMut(S::Item) -> Bytes,
    ) -> Sample {
        let Self { runtime, count, drain, store, notifier } = self;
        meter.measure(subscribers * commits, || {
            for _ in 0..commits {
                *count += 1;
                runtime.block_on(async {
                    let update = store.update(BUCKET, Json::from(ID), rows::patch(*count), None);
                    update.await.expect("the row exists");
                    notifier.settled(store.snapshot().position).await;
                });
                let (mut events, mut bytes) = (0, 0);
                drain.drain(&mut |event| {
                    events += 1;
                    bytes += encoded(event).len() as u64;
                });
                assert!(
                    events == subscribers && bytes > events * rows::BYTES as u64,
                    "every subscriber receives the whole row"
                );
            }
        })
    }
}

fn queries(subscribers: u64) -> impl Iterator<Item = Query> {
    (0..subscribers).map(|_| query(&json!({"name": name(ID)})))
}
