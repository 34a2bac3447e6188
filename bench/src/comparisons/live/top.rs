//! The first ten of a million rows: maintained by a live query, or queried again.

use std::cell::RefCell;
use std::rc::Rc;

use serde_json::{Value as Json, json};
use tidewire_bench::{Contender, Meter, Metric, Sample, Workload};
use tidewire_live::{Matcher, QueryId, QueryResult, ResultChange};
use tidewire_store::query::Budget;
use tidewire_store::{Answer, Follower, Query};

use super::super::Effort;
use super::rows::{self, BUCKET};
use super::updates::Updates;

const FIRST: u64 = 10;

/// Any time will do: no row expires.
const NOW: u64 = 0;

pub(super) fn ten(effort: Effort) -> Workload {
    let (rows, updates) = (effort.operations(1_000_000), effort.operations(20_000));
    let (few, at_the_top) = (effort.operations(200).min(2), effort.operations(2_000));
    // Whoever asks without an index and whoever keeps the rows up to date have one store.
    let plain = Rc::new(RefCell::new(None));
    let with_plain = |name, round: fn(Meter, &mut Plain, u64) -> Sample, updates| {
        let plain = Rc::clone(&plain);
        Contender::new(name, move |meter| {
            round(meter, plain.borrow_mut().get_or_insert_with(|| Plain::new(rows)), updates)
        })
    };
    let mut indexed = None;
    Workload {
        name: "live-top-10",
        about: format!(
            "The {FIRST} rows of {rows} that have the highest counts, after each of {updates} updates that give a row a random \
             count: by asking again, in a store without an index ({few} updates) or with one, or as what has changed, encoded, by \
             a matcher that is fed with the commits of a store without an index. The rows that are updated are random, so that \
             hardly any is among the first; or each is the first of all and becomes one of the lower half (\"at the top\", \
             {at_the_top} updates). The updates themselves are not measured."
        ),
        operation: "update",
        metrics: &[Metric::Throughput, Metric::Cpu],
        contenders: vec![
            with_plain("ask again", |meter, plain, count| ask(meter, &mut plain.updates, count), few),
            Contender::new("ask again, indexed", move |meter| {
                ask(meter, indexed.get_or_insert_with(|| Updates::new(rows, &["count"])), updates)
            }),
            with_plain("tidewire-live", Plain::anywhere, updates),
            with_plain("tidewire-live, at the top", Plain::at_the_top, at_the_top),
        ],
    }
}

/// Those with the highest counts.
fn top(limit: u64) -> Query {
    rows::parsed(&json!({"bucket": BUCKET, "sort": {"count": "desc"}, "limit": limit}))
}

/// Runs the query on the state after each update. All states are there when it begins.
fn ask(meter: Meter, updates: &mut Updates, count: u64) -> Sample {
    let snapshots: Vec<_> = (0..count).map(|_| updates.update_any()).collect();
    let query = top(FIRST);
    meter.measure(count, || {
        for snapshot in &snapshots {
            let bucket = snapshot.state.bucket(BUCKET).expect("there is a bucket");
            assert!(
                query.rows(bucket, NOW, &Budget::unlimited()).is_ok_and(|rows| rows.len() as u64 == FIRST),
                "there are that many"
            );
        }
    })
}

/// A store without an index, and a matcher that follows it.
struct Plain {
    updates: Updates,
    matcher: Matcher,
    query: QueryId,
    follower: Follower,
}

impl Plain {
    fn new(rows: u64) -> Self {
        let updates = Updates::new(rows, &[]);
        let (snapshot, follower) = updates.store.follow();
        let mut matcher = Matcher::new(snapshot.position);
        let bucket = snapshot.state.bucket(BUCKET).expect("there is a bucket");
        let query = matcher.subscribe(1, &top(FIRST), bucket, NOW).expect("it is the first");
        Self { updates, matcher, query, follower }
    }

    fn anywhere(meter: Meter, plain: &mut Self, count: u64) -> Sample {
        plain.keep(meter, count, |updates| (0..count).for_each(|_| drop(updates.update_any()))).0
    }

    fn at_the_top(meter: Meter, plain: &mut Self, count: u64) -> Sample {
        let (sample, changed) = plain.keep(meter, count, |updates| {
            let Ok(Answer::Records(first)) = updates.store.query(&top(count)) else { panic!("there is a bucket") };
            for row in first {
                updates.lower(row["id"].clone());
            }
        });
        assert!(changed == count, "{changed} of {count} updates have changed what comes first");
        sample
    }

    /// Takes each commit in, and encodes what has changed for whoever follows, with how many of them had something. At the end it
    /// must be what the query returns.
    fn keep(&mut self, meter: Meter, count: u64, update: impl FnOnce(&mut Updates)) -> (Sample, u64) {
        let Self { updates, matcher, query, follower } = self;
        // Others have updated the store meanwhile.
        for commit in updates.unseen(follower) {
            matcher.commit(commit.position, &commit.changes);
        }
        update(updates);
        let commits = updates.unseen(follower);
        assert!(commits.len() as u64 == count, "an update is a commit");
        let mut changed = 0;
        let sample = meter.measure(count, || {
            for commit in &commits {
                for update in matcher.commit(commit.position, &commit.changes).updates {
                    let ResultChange::Records(delta) = update.change else { panic!("rows are followed") };
                    changed += u64::from(!delta.encoded().is_empty());
                }
            }
        });
        let Some(QueryResult::Json(whole)) = matcher.result(*query) else { panic!("rows are followed") };
        let whole: Vec<Json> = serde_json::from_slice(&whole).expect("it is a list");
        let answer = updates.store.query(&top(FIRST)).expect("there is a bucket");
        assert!(answer == Answer::Records(whole), "it is up to date");
        (sample, changed)
    }
}
