//! The cost of live queries for writers: the write rate with live queries of three kinds, compared with none.

use serde_json::json;
use tidewire_bench::{Contender, Metric, Workload};
use tidewire_store::Query;

use super::super::Effort;
use super::rows::{self, name, query};
use super::store::{LiveStore, WRITES_IN_FLIGHT};

/// The part of the description that all workloads share.
const METHOD: &str = "Each write changes the result of one query. One task on the thread of the writers reads all deltas, and the \
                   clock stops when it has read the last one. \"none\" has no live queries.";

pub(super) fn equalities(effort: Effort) -> Workload {
    let (rows, writes) = (effort.operations(100_000), effort.operations(60_000));
    let queries = move || (0..rows).map(|id| query(&json!({"name": name(id)})));
    Workload {
        name: "live-equalities",
        about: format!(
            "{writes} updates of random rows of {} bytes, {WRITES_IN_FLIGHT} in flight, in an in-memory store with {rows} rows and an \
             index, with {rows} live queries that each have an equality filter. {METHOD}",
            rows::BYTES
        ),
        operation: "write",
        metrics: &[Metric::Throughput, Metric::Cpu],
        contenders: vec![none(rows, "name", writes), live(rows, "name", queries, writes)],
    }
}

pub(super) fn ranges(effort: Effort) -> Workload {
    let (rows, writes) = (effort.operations(100_000), effort.operations(60_000));
    let queries = move || {
        (0..rows).step_by(RANGE).map(|from| query(&json!({"place": {"$gte": from, "$lt": from + RANGE as u64}})))
    };
    Workload {
        name: "live-ranges",
        about: format!(
            "The same with {} live queries, each for a disjoint range of {RANGE} rows. {METHOD}",
            rows / RANGE as u64
        ),
        operation: "write",
        metrics: &[Metric::Throughput, Metric::Cpu],
        contenders: vec![none(rows, "place", writes), live(rows, "place", queries, writes)],
    }
}

/// Rows in a range.
const RANGE: usize = 10;

pub(super) fn unindexed(effort: Effort) -> Workload {
    let (queries, writes) = (effort.operations(10_000), effort.operations(60_000));
    let few = effort.operations(100);
    Workload {
        name: "live-unindexed",
        about: format!(
            "The same with {} rows, {few} updates and {queries} live queries that each search for a substring, which no index \
             supports: every query is evaluated on the old and the new version of each updated row. {METHOD} It does {writes} \
             updates.",
            row_count(queries)
        ),
        operation: "write",
        metrics: &[Metric::Cpu, Metric::Throughput],
        contenders: vec![
            none(row_count(queries), "place", writes),
            live(row_count(queries), "place", move || substring_queries(queries), few),
        ],
    }
}

/// Returns queries that no index supports, each of which matches at most one row.
pub(super) fn substring_queries(count: u64) -> impl ExactSizeIterator<Item = Query> {
    let count = usize::try_from(count).expect("64 bits");
    (0..count).map(|id| query(&json!({"name": {"$contains": name(id as u64)}})))
}

/// Returns the number of rows for this number of substring queries. It is small, because each query reads all rows when it starts.
pub(super) fn row_count(queries: u64) -> u64 {
    queries / 100
}

fn none(rows: u64, index: &'static str, writes: u64) -> Contender {
    let mut store = None;
    Contender::new("none", move |meter| {
        store.get_or_insert_with(|| LiveStore::without_queries(rows, &[index])).round(meter, writes)
    })
}

fn live<Q>(rows: u64, index: &'static str, queries: impl Fn() -> Q + 'static, writes: u64) -> Contender
where
    Q: Iterator<Item = Query>,
{
    let mut store = None;
    Contender::new("tidewire-live", move |meter| {
        store.get_or_insert_with(|| LiveStore::with_queries(rows, &[index], queries())).round(meter, writes)
    })
}
