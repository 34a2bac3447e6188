//! The memory of one more subscription to a query that has subscribers.

use serde_json::{Value as Json, json};
use tidewire_bench::{Contender, Meter, Metric, Sample, Workload, count_bytes};

use super::super::Effort;
use super::rows::{self, BUCKET, name, query};
use super::watched::{live, runtime, subscribe};

/// The row that is followed.
const ID: u64 = 7;

pub(super) fn per_subscription(effort: Effort) -> Workload {
    let (many, just_grown) = (effort.operations(100_000), effort.operations(58_000));
    let contender = |name, count, is_told| Contender::new(name, move |meter| round(meter, count, is_told));
    Workload {
        name: "live-memory",
        about: format!(
            "{many} subscriptions to a query that is live already: the bytes that are allocated for them and not freed, by all \
             threads, what the subscriber holds included. As they are at first, and when each has taken an event. Tables double \
             when they are full, so that with {just_grown} of them there is the most room to spare (\"just grown\")."
        ),
        operation: "subscription",
        metrics: &[Metric::Memory],
        contenders: vec![
            contender("new", many, false),
            contender("told", many, true),
            contender("just grown", just_grown, false),
        ],
    }
}

fn round(meter: Meter, count: u64, is_told: bool) -> Sample {
    let (runtime, store) = (runtime(), rows::filled(100, &["name"]));
    let live = live(&store);
    let queries = |count: u64| {
        let count = usize::try_from(count).expect("64 bits");
        (0..count).map(|_| query(&json!({"name": name(ID)})))
    };
    let first = runtime.block_on(subscribe(&live, queries(1)));
    let mut bytes = 0;
    let sample = meter.measure(count, || {
        let (subscriptions, held) = count_bytes(|| {
            let mut subscriptions = runtime.block_on(subscribe(&live, queries(count)));
            if is_told {
                let update = store.update(BUCKET, Json::from(ID), rows::patch(1), None);
                runtime.block_on(async {
                    update.await.expect("the row is there");
                    live.settled().await.expect("the live queries go on");
                });
                for subscription in &mut subscriptions {
                    let event = subscription.try_next().expect("no subscription ends");
                    assert!(event.is_some(), "all are told");
                }
            }
            subscriptions
        });
        bytes = u64::try_from(held).expect("they take memory");
        subscriptions
    });
    drop(first);
    sample.with_amount(Metric::Memory, bytes)
}
