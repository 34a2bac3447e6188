//! The memory of a subscription to a query that already has a subscriber.

use serde_json::{Value as Json, json};
use tidewire_bench::{Contender, Meter, Metric, Sample, Workload, count_bytes};

use super::super::Effort;
use super::rows::{self, BUCKET, name, query};
use super::store::{live, runtime, subscribe};

/// The row that the query matches.
const ID: u64 = 7;

pub(super) fn per_subscription(effort: Effort) -> Workload {
    let (many, just_grown) = (effort.operations(100_000), effort.operations(58_000));
    let contender = |name, count, reads_event| Contender::new(name, move |meter| round(meter, count, reads_event));
    Workload {
        name: "live-memory",
        about: format!(
            "{many} subscriptions to a query that already has a subscriber: the bytes that all threads allocate for them and do \
             not free, including those of the subscribers. \"new\" is measured after subscribing, \"notified\" after each \
             subscriber has read an event. Hash tables double their capacity when they are full; with {just_grown} \
             subscriptions about half of it is unused (\"just grown\")."
        ),
        operation: "subscription",
        metrics: &[Metric::Memory],
        contenders: vec![
            contender("new", many, false),
            contender("notified", many, true),
            contender("just grown", just_grown, false),
        ],
    }
}

fn round(meter: Meter, count: u64, reads_event: bool) -> Sample {
    let (runtime, store) = (runtime(), rows::store_with_rows(100, &["name"]));
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
            if reads_event {
                let update = store.update(BUCKET, Json::from(ID), rows::patch(1), None);
                runtime.block_on(async {
                    update.await.expect("the row exists");
                    live.settled().await.expect("the live queries are running");
                });
                for subscription in &mut subscriptions {
                    let event = subscription.try_next().expect("no subscription ends");
                    assert!(event.is_some(), "every subscriber is notified");
                }
            }
            subscriptions
        });
        bytes = u64::try_from(held).expect("memory use grows");
        subscriptions
    });
    drop(first);
    sample.with_amount(Metric::Memory, bytes)
}
