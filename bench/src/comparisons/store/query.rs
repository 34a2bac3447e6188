//! A query by an index: its cost depends on the size of its result, not of the bucket.

use serde_json::json;
use tidewire_bench::{Contender, Metric, Workload};
use tidewire_store::{Query, QueryOutput, Store, StoreOptions};

use super::super::Effort;
use super::contender::{fill, runtime};
use super::ours::{BUCKET, Ours};
use super::row::{self, Rows, group_name};

/// Rows that a query returns.
const ROWS_PER_QUERY: usize = 10;

pub(super) fn indexed(effort: Effort) -> Workload {
    let (few, many) = (effort.operations(10_000), effort.operations(1_000_000));
    let queries = effort.operations(20_000);
    Workload {
        name: "store-query",
        about: format!(
            "{queries} lookups, each for {ROWS_PER_QUERY} rows of {} bytes by a random value of an indexed field, in a bucket of {few} rows \
             (\"few\") or {many} rows (\"many\").",
            row::BYTES
        ),
        operation: "lookup",
        metrics: &[Metric::Cpu, Metric::Throughput],
        contenders: vec![contender("few", few, queries), contender("many", many, queries)],
    }
}

/// Creates a contender whose store is created in the first round.
fn contender(name: &'static str, count: u64, queries: u64) -> Contender {
    let mut filled = None;
    let mut random = 0_u64;
    Contender::new(name, move |meter| {
        let rows = Rows::new(count);
        let store = filled.get_or_insert_with(|| {
            let store = Ours::with_index(Store::memory(StoreOptions::default()));
            fill(&runtime(), &store, rows, 0, count);
            store
        });
        let mut query = || {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let group = group_name((random >> 33) % rows.groups());
            let query = json!({"bucket": BUCKET, "filter": {"group": group}});
            Query::parse(&query).expect("the query is valid")
        };
        let queries: Vec<Query> = (0..queries).map(|_| query()).collect();
        meter.measure(queries.len() as u64, || {
            for query in &queries {
                let result = store.store().query(query).expect("the bucket exists");
                assert!(matches!(&result, QueryOutput::Records(rows) if rows.len() == ROWS_PER_QUERY), "{result:?}");
            }
        })
    })
}
