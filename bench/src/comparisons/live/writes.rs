//! The cost of live queries for writers: the write rate beside queries of three kinds, compared with none.

use serde_json::json;
use tidewire_bench::{Contender, Metric, Workload};
use tidewire_store::Query;

use super::super::Effort;
use super::rows::{self, name, query};
use super::watched::{WRITERS, Watched};

/// How the work is done, whatever the queries are.
const HOW: &str = "Each write concerns one query, followed by deltas, which one task takes on the thread of the writers. The \
                   clock stops when all has been heard of. Without live queries nobody follows the store.";

pub(super) fn equalities(effort: Effort) -> Workload {
    let (rows, writes) = (effort.operations(100_000), effort.operations(60_000));
    let queries = move || (0..rows).map(|id| query(&json!({"name": name(id)})));
    Workload {
        name: "live-equalities",
        about: format!(
            "{writes} updates of random rows of {} bytes, {WRITERS} at a time, in a store in memory that has {rows} with an \
             index, beside {rows} live queries with an equality each. {HOW}",
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
            "The same beside {} live queries with a range each, of {RANGE} rows, disjoint. {HOW}",
            rows / RANGE as u64
        ),
        operation: "write",
        metrics: &[Metric::Throughput, Metric::Cpu],
        contenders: vec![none(rows, "place", writes), live(rows, "place", queries, writes)],
    }
}

/// How many rows are in a range.
const RANGE: usize = 10;

pub(super) fn unserved(effort: Effort) -> Workload {
    let (followed, writes) = (effort.operations(10_000), effort.operations(60_000));
    let few = effort.operations(100);
    Workload {
        name: "live-unserved",
        about: format!(
            "The same with {} rows, {few} updates of them, beside {followed} live queries that each look for a part of a text: \
             each is tried with each row that is written, as it was and as it is. {HOW} Then there are {writes} updates.",
            rows_of(followed)
        ),
        operation: "write",
        metrics: &[Metric::Cpu, Metric::Throughput],
        contenders: vec![
            none(rows_of(followed), "place", writes),
            live(rows_of(followed), "place", move || contains(followed), few),
        ],
    }
}

/// Queries that no index can serve, each of one row at most.
pub(super) fn contains(followed: u64) -> impl ExactSizeIterator<Item = Query> {
    let followed = usize::try_from(followed).expect("64 bits");
    (0..followed).map(|id| query(&json!({"name": {"$contains": name(id as u64)}})))
}

/// How many rows there are for such queries: few, because each query reads them all when it begins.
pub(super) fn rows_of(followed: u64) -> u64 {
    followed / 100
}

fn none(rows: u64, index: &'static str, writes: u64) -> Contender {
    let mut unwatched = None;
    Contender::new("none", move |meter| {
        unwatched.get_or_insert_with(|| Watched::unwatched(rows, &[index])).round(meter, writes)
    })
}

fn live<Q>(rows: u64, index: &'static str, queries: impl Fn() -> Q + 'static, writes: u64) -> Contender
where
    Q: Iterator<Item = Query>,
{
    let mut watched = None;
    Contender::new("tidewire-live", move |meter| {
        watched.get_or_insert_with(|| Watched::with_queries(rows, &[index], queries())).round(meter, writes)
    })
}
