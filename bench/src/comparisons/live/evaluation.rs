//! The cost of evaluating a query that no index serves.

use std::hint::black_box;

use tidewire_bench::{Contender, Metric, Workload};
use tidewire_store::{Filter, Row};

use super::super::Effort;
use super::updates::Updates;
use super::watched::Watched;
use super::writes::{contains, rows_of};

pub(super) fn of_unserved(effort: Effort) -> Workload {
    let (followed, writes) = (effort.operations(10_000), effort.operations(100));
    let evaluations = 2 * followed * writes;
    let mut watched = None;
    Workload {
        name: "live-evaluation",
        about: format!(
            "{writes} updates beside {followed} live queries that no index can serve, as in live-unserved, by the row that is \
             tried with a filter: {evaluations} in all. All of the work is counted, the writes too. The least one can do is a \
             loop over the filters, without writes."
        ),
        operation: "evaluation",
        metrics: &[Metric::Cpu, Metric::Throughput],
        contenders: vec![
            Contender::new("bare loop", move |meter| {
                let filters: Vec<Filter> = contains(followed).map(|query| query.filter).collect();
                let mut updates = Updates::new(rows_of(followed), &["place"]);
                let (_, mut follower) = updates.store.follow();
                (0..writes).for_each(|_| drop(updates.update_any()));
                let commits = updates.unseen(&mut follower);
                meter.measure(evaluations, || {
                    for change in commits.iter().flat_map(|commit| &commit.changes) {
                        let meant = |row: &Option<Row>| {
                            let row = row.as_ref().expect("it was updated");
                            filters.iter().filter(|filter| black_box(filter.matches(row))).count()
                        };
                        assert!(meant(&change.old) == 1 && meant(&change.new) == 1, "one query means it");
                    }
                })
            }),
            Contender::new("tidewire-live", move |meter| {
                let watched = watched
                    .get_or_insert_with(|| Watched::with_queries(rows_of(followed), &["place"], contains(followed)));
                watched.round_of(meter, writes, evaluations)
            }),
        ],
    }
}
