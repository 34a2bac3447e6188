//! One commit that reaches many subscribers of the same query.

use bytes::Bytes;
use futures_util::Stream;
use serde_json::{Value as Json, json};
use tidewire_bench::{Contender, Meter, Metric, Sample, Workload};
use tidewire_live::{Event, Live, Subscription};
use tidewire_store::{Position, Query, Store};
use tokio::runtime::Runtime;

use super::super::Effort;
use super::drain::Drain;
use super::rows::{self, BUCKET, name, query};
use super::singly::{Queue, Singly};
use super::watched::{live, runtime, subscribe};

const ROWS: u64 = 100;

/// The row that is updated.
const ID: u64 = 7;

pub(super) fn to_equal(effort: Effort) -> Workload {
    let (subscribers, commits) = (effort.operations(10_000), effort.operations(2_000).min(20));
    let events = subscribers * commits;
    let alone = effort.operations(10_000);
    let (mut singly, mut together, mut single) = (None, None, None);
    Workload {
        name: "live-fanout",
        about: format!(
            "{commits} updates of a row of {} bytes, one at a time, that {subscribers} follow by the same query: {events} events, \
             each taken as JSON when all have been told. By a thread that tries and encodes what has changed for each subscriber, and \
             has a queue for each, or by live queries, where all must be given the same bytes. What a commit costs without so \
             many is seen by \"one subscriber\": {alone} updates that one follows. The updates are measured too.",
            rows::BYTES
        ),
        operation: "event",
        metrics: &[Metric::Cpu, Metric::Throughput, Metric::Allocations],
        contenders: vec![
            Contender::new("for each", move |meter| {
                singly
                    .get_or_insert_with(|| Told::singly(subscribers))
                    .round(meter, subscribers, commits, |bytes| bytes)
            }),
            Contender::new("tidewire-live", move |meter| {
                together.get_or_insert_with(|| Told::together(subscribers)).shared(meter, subscribers, commits)
            }),
            Contender::new("one subscriber", move |meter| {
                single.get_or_insert_with(|| Told::together(1)).shared(meter, 1, alone)
            }),
        ],
    }
}

/// A store, and subscribers that are told of one row.
struct Told<S, T> {
    runtime: Runtime,
    count: u64,
    // They end before what they follow, and who tells them after the store.
    drain: Drain<S>,
    store: Store,
    teller: T,
}

/// What tells the subscribers.
pub(super) trait Teller {
    /// Waits until all have been told of what is committed up to here.
    async fn settled(&mut self, position: Position);
}

impl Teller for Live {
    async fn settled(&mut self, position: Position) {
        let settled = Self::settled(self).await.expect("the live queries go on");
        assert!(settled.sequence >= position.sequence, "it takes in all that is published");
    }
}

impl Told<Queue, Singly> {
    fn singly(subscribers: u64) -> Self {
        let store = rows::filled(ROWS, &["name"]);
        let (teller, queues) = Singly::new(&store, queries(subscribers));
        Self { runtime: runtime(), count: 0, drain: Drain::new(queues), store, teller }
    }
}

impl Told<Subscription, Live> {
    fn together(subscribers: u64) -> Self {
        let (runtime, store) = (runtime(), rows::filled(ROWS, &["name"]));
        let live = live(&store);
        let drain = Drain::new(runtime.block_on(subscribe(&live, queries(subscribers))));
        Self { runtime, count: 0, drain, store, teller: live }
    }

    /// All who hear of a commit must be given the same bytes.
    fn shared(&mut self, meter: Meter, subscribers: u64, commits: u64) -> Sample {
        let (mut heard, mut first) = (0, Bytes::new());
        self.round(meter, subscribers, commits, |event| {
            let Event::Delta { delta, .. } = event else { panic!("nobody falls behind") };
            let encoded = delta.encoded();
            if heard % subscribers == 0 {
                first = encoded.clone();
            }
            heard += 1;
            assert!(encoded.as_ptr() == first.as_ptr(), "it is encoded once");
            encoded
        })
    }
}

impl<S: Stream + Unpin, T: Teller> Told<S, T> {
    fn round(
        &mut self,
        meter: Meter,
        subscribers: u64,
        commits: u64,
        mut encoded: impl FnMut(S::Item) -> Bytes,
    ) -> Sample {
        let Self { runtime, count, drain, store, teller } = self;
        meter.measure(subscribers * commits, || {
            for _ in 0..commits {
                *count += 1;
                runtime.block_on(async {
                    let update = store.update(BUCKET, Json::from(ID), rows::patch(*count), None);
                    update.await.expect("the row is there");
                    teller.settled(store.snapshot().position).await;
                });
                let (mut heard, mut bytes) = (0, 0);
                drain.take(&mut |event| {
                    heard += 1;
                    bytes += encoded(event).len() as u64;
                });
                assert!(heard == subscribers && bytes > heard * rows::BYTES as u64, "all are told of the whole row");
            }
        })
    }
}

fn queries(subscribers: u64) -> impl Iterator<Item = Query> {
    (0..subscribers).map(|_| query(&json!({"name": name(ID)})))
}
