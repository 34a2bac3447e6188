//! The cost of evaluating a query that no index supports.

use std::hint::black_box;

use tidewire_bench::{Contender, Metric, Workload};
use tidewire_store::{Filter, Row};

use super::super::Effort;
use super::store::LiveStore;
use super::updates::Updates;
use super::writes::{row_count, substring_queries};

pub(super) fn unindexed(effort: Effort) -> Workload {
    let (queries, writes) = (effort.operations(10_000), effort.operations(100));
    let evaluations = 2 * queries * writes;
    let mut store = None;
    Workload {
        name: "live-evaluation",
        about: format!(
            "{writes} updates with {queries} live queries that no index supports, as in live-unindexed. An operation is the \
             evaluation of one filter on one row, {evaluations} in all. The writes are included. \"bare loop\" only evaluates \
             the filters."
        ),
        operation: "evaluation",
        metrics: &[Metric::Cpu, Metric::Throughput],
        contenders: vec![
            Contender::new("bare loop", move |meter| {
                let filters: Vec<Filter> = substring_queries(queries).map(|query| query.filter).collect();
                let mut updates = Updates::new(row_count(queries), &["place"]);
                let (_, mut follower) = updates.store.follow();
                (0..writes).for_each(|_| drop(updates.update_random()));
                let commits = updates.unread_commits(&mut follower);
                meter.measure(evaluations, || {
                    for change in commits.iter().flat_map(|commit| &commit.changes) {
                        let count_matches = |row: &Option<Row>| {
                            let row = row.as_ref().expect("an update has an old and a new row");
                            filters.iter().filter(|filter| black_box(filter.matches(row))).count()
                        };
                        assert!(
                            count_matches(&change.old) == 1 && count_matches(&change.new) == 1,
                            "one query matches the row"
                        );
                    }
                })
            }),
            Contender::new("tidewire-live", move |meter| {
                let store = store.get_or_insert_with(|| {
                    LiveStore::with_queries(row_count(queries), &["place"], substring_queries(queries))
                });
                store.round_of(meter, writes, evaluations)
            }),
        ],
    }
}
