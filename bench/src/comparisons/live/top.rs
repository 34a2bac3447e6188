//! The first ten of a million rows: maintained by a live query, or queried after every update.

use std::cell::RefCell;
use std::rc::Rc;

use serde_json::{Value as Json, json};
use tidewire_bench::{Contender, Meter, Metric, Sample, Workload};
use tidewire_live::{Matcher, QueryId, QueryResult, ResultChange};
use tidewire_store::query::Budget;
use tidewire_store::{Follower, Query, QueryOutput};

use super::super::Effort;
use super::rows::{self, BUCKET};
use super::updates::Updates;

/// The limit of the query.
const LIMIT: u64 = 10;

/// The time of evaluation, which has no effect, because no row expires.
const NOW: u64 = 0;

pub(super) fn ten(effort: Effort) -> Workload {
    let (rows, updates) = (effort.operations(1_000_000), effort.operations(20_000));
    let (few, at_the_top) = (effort.operations(200).min(2), effort.operations(2_000));
    // Contenders without an index share one store.
    let unindexed = Rc::new(RefCell::new(None));
    let with_unindexed = |name, round: fn(Meter, &mut Unindexed, u64) -> Sample, updates| {
        let unindexed = Rc::clone(&unindexed);
        Contender::new(name, move |meter| {
            round(meter, unindexed.borrow_mut().get_or_insert_with(|| Unindexed::new(rows)), updates)
        })
    };
    let mut indexed = None;
    Workload {
        name: "live-top-10",
        about: format!(
            "The {LIMIT} of {rows} rows with the highest counts, after each of {updates} updates that set the count of a random row. \
             \"query again\" runs the query after each update, in a store without an index ({few} updates) or with one. \
             tidewire-live computes and encodes the delta of each commit, in a store without an index. Random updates rarely \
             change the result; with \"at the top\" each update moves the first row to the lower half ({at_the_top} updates). \
             The updates themselves are not measured."
        ),
        operation: "update",
        metrics: &[Metric::Throughput, Metric::Cpu],
        contenders: vec![
            with_unindexed("query again", |meter, store, count| query_again(meter, &mut store.updates, count), few),
            Contender::new("query again, indexed", move |meter| {
                query_again(meter, indexed.get_or_insert_with(|| Updates::new(rows, &["count"])), updates)
            }),
            with_unindexed("tidewire-live", Unindexed::random_updates, updates),
            with_unindexed("tidewire-live, at the top", Unindexed::top_updates, at_the_top),
        ],
    }
}

/// Returns a query for the rows with the highest counts.
fn top(limit: u64) -> Query {
    rows::parsed(&json!({"bucket": BUCKET, "sort": {"count": "desc"}, "limit": limit}))
}

/// Runs the query on the snapshot after each update. The snapshots are created before the measurement.
fn query_again(meter: Meter, updates: &mut Updates, count: u64) -> Sample {
    let snapshots: Vec<_> = (0..count).map(|_| updates.update_random()).collect();
    let query = top(LIMIT);
    meter.measure(count, || {
        for snapshot in &snapshots {
            let bucket = snapshot.state.bucket(BUCKET).expect("the bucket exists");
            assert!(
                query.rows(bucket, NOW, &Budget::unlimited()).is_ok_and(|rows| rows.len() as u64 == LIMIT),
                "the result has as many rows as the limit"
            );
        }
    })
}

/// A store without an index, and a matcher that processes its commits.
struct Unindexed {
    updates: Updates,
    matcher: Matcher,
    query: QueryId,
    follower: Follower,
}

impl Unindexed {
    fn new(rows: u64) -> Self {
        let updates = Updates::new(rows, &[]);
        let (snapshot, follower) = updates.store.follow();
        let mut matcher = Matcher::new(snapshot.position);
        let bucket = snapshot.state.bucket(BUCKET).expect("the bucket exists");
        let query = matcher.subscribe(1, &top(LIMIT), bucket, NOW).expect("the subscriber id is not in use");
        Self { updates, matcher, query, follower }
    }

    fn random_updates(meter: Meter, store: &mut Self, count: u64) -> Sample {
        store.apply(meter, count, |updates| (0..count).for_each(|_| drop(updates.update_random()))).0
    }

    fn top_updates(meter: Meter, store: &mut Self, count: u64) -> Sample {
        let (sample, changed) = store.apply(meter, count, |updates| {
            let Ok(QueryOutput::Records(first)) = updates.store.query(&top(count)) else { panic!("the bucket exists") };
            for row in first {
                updates.move_to_lower_half(row["id"].clone());
            }
        });
        assert!(changed == count, "{changed} of {count} updates changed the result");
        sample
    }

    /// Runs the updates, and measures the matcher, which encodes a delta for each commit. Returns the sample and the number of updates
    /// that changed the result. Checks that the final result equals that of the query.
    fn apply(&mut self, meter: Meter, count: u64, update: impl FnOnce(&mut Updates)) -> (Sample, u64) {
        let Self { updates, matcher, query, follower } = self;
        // The updates of other contenders of this store are applied first.
        for commit in updates.unread_commits(follower) {
            matcher.commit(commit.position, &commit.changes);
        }
        update(updates);
        let commits = updates.unread_commits(follower);
        assert!(commits.len() as u64 == count, "every update is one commit");
        let mut changed = 0;
        let sample = meter.measure(count, || {
            for commit in &commits {
                for update in matcher.commit(commit.position, &commit.changes).updates {
                    let ResultChange::Records(delta) = update.change else { panic!("the query returns rows") };
                    changed += u64::from(!delta.encoded().is_empty());
                }
            }
        });
        let Some(QueryResult::Json(result)) = matcher.result(*query) else { panic!("the query returns rows") };
        let result: Vec<Json> = serde_json::from_slice(&result).expect("the result is a list");
        let expected = updates.store.query(&top(LIMIT)).expect("the bucket exists");
        assert!(expected == QueryOutput::Records(result), "the maintained result equals that of a new query");
        (sample, changed)
    }
}
