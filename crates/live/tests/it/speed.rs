//! The cost of a commit, with unaffected queries, and compared with a new query:
//! `cargo test --release -p tidewire-live --test it -- --ignored --nocapture --test-threads 1 speed`

use std::time::{Duration, Instant};

use serde_json::{Map, Value as Json, json};
use tidewire_live::Matcher;
use tidewire_store::query::Budget;
use tidewire_store::{Change, Draft, Position, Query, State};

const WORDS: [&str; 8] = ["tide", "harbour", "buoy", "mole", "quay", "anchor", "sail", "wave"];

fn state() -> State {
    let definition = json!({"key": "id", "schema": {"id": {"type": "number"}}});
    let mut draft = Draft::new(State::new(), 1);
    draft.define_bucket("b", &definition).unwrap();
    draft.finish().0
}

/// A record of about 270 bytes.
fn record(id: usize) -> Map<String, Json> {
    let text: Vec<&str> = (0..16).map(|_| WORDS[fastrand::usize(..WORDS.len())]).collect();
    let record = json!({
        "id": id, "room": format!("room-{}", id % 100_000), "score": fastrand::u32(..1_000_000), "at": id,
        "title": WORDS[id % 8], "text": text.join(" "), "group": id % 100, "price": f64::from(fastrand::u32(..100_000)) / 100.0,
    });
    let Json::Object(record) = record else { unreachable!("it is an object") };
    record
}

fn state_with_rows(rows: usize) -> State {
    let mut state = state();
    // In batches, because a draft holds its changes in memory.
    for part in (0..rows).collect::<Vec<_>>().chunks(10_000) {
        let mut draft = Draft::new(state, 1);
        draft.insert_many("b", part.iter().map(|id| record(*id))).unwrap();
        state = draft.finish().0;
    }
    state
}

/// Returns commits of one update each, and the state after them.
fn updates(mut state: State, rows: usize, count: usize, patch: impl Fn() -> Json) -> (State, Vec<Vec<Change>>) {
    let mut commits = Vec::with_capacity(count);
    for now in 2..count + 2 {
        let mut draft = Draft::new(state, now as u64);
        let Json::Object(patch) = patch() else { unreachable!("a patch is an object") };
        draft.update("b", &json!(fastrand::usize(..rows)), patch, None).unwrap();
        let (next, changes) = draft.finish();
        state = next;
        commits.push(changes);
    }
    (state, commits)
}

/// Creates a matcher with these queries.
fn live(state: &State, queries: impl Iterator<Item = Json>) -> Matcher {
    let mut live = Matcher::new(Position { epoch: 1, sequence: 0 });
    for (id, mut query) in (0..).zip(queries) {
        query["bucket"] = json!("b");
        let query = Query::parse(&query).unwrap();
        live.subscribe(id, &query, state.bucket("b").unwrap(), 1).unwrap();
    }
    live
}

/// The cost per commit: time, updates, evaluations.
struct Cost {
    time: Duration,
    updates: f64,
    evaluations: f64,
}

#[expect(clippy::cast_precision_loss, reason = "the figures are only printed")]
fn run(live: &mut Matcher, commits: &[Vec<Change>]) -> Cost {
    let before = live.stats().evaluations;
    let mut updates = 0;
    let start = Instant::now();
    for changes in commits {
        updates += live.commit(live.position(), changes).updates.len();
    }
    let time = start.elapsed() / u32::try_from(commits.len()).unwrap();
    let each = |count: usize| count as f64 / commits.len() as f64;
    let evaluations = usize::try_from(live.stats().evaluations - before).unwrap();
    Cost { time, updates: each(updates), evaluations: each(evaluations) }
}

fn report(name: &str, queries: usize, cost: &Cost) {
    let Cost { time, updates, evaluations } = cost;
    println!("{name}: {queries} queries: {time:?} a commit, {updates:.2} updates, {evaluations:.1} evaluations");
}

#[test]
#[ignore = "measures; run in release"]
fn speed_with_unaffected_queries() {
    const ROWS: usize = 2000;
    let state = state_with_rows(ROWS);
    for queries in [100, 10_000, 100_000] {
        let mut live = live(&state, (0..queries).map(|room| json!({"filter": {"room": format!("room-{room}")}})));
        let (_, commits) = updates(state.clone(), ROWS, 20_000, || json!({"score": fastrand::u32(..1_000_000)}));
        report("equality", queries, &run(&mut live, &commits));
    }
    for queries in [100, 1000, 10_000] {
        let width = 1_000_000 / queries;
        let range =
            |index| json!({"filter": {"score": {"$gte": index * width, "$lt": (index + 1) * width}}, "limit": 10});
        let mut live = live(&state, (0..queries).map(range));
        let (_, commits) = updates(state.clone(), ROWS, 20_000, || json!({"score": fastrand::u32(..1_000_000)}));
        report("disjoint ranges", queries, &run(&mut live, &commits));
    }
    // Nested intervals around one value, so that each row is in a few of them.
    let nested = |index: usize| json!({"filter": {"at": {"$between": [index, 20_000 - index]}}, "aggregate": {"function": "count"}});
    let mut nested = live(&state, (0..10_000).map(nested));
    let (_, commits) = updates(state.clone(), 10, 5000, || json!({"score": 1}));
    report("nested ranges, of which a row is in 5", 10_000, &run(&mut nested, &commits));
}

/// A name, and a function from a number to a filter.
type Kind = (&'static str, fn(usize) -> Json);

#[test]
#[ignore = "measures; run in release"]
fn speed_of_unindexed_filters() {
    const ROWS: usize = 1000;
    let state = state_with_rows(ROWS);
    let filters: [Kind; 3] = [
        (
            "$neq or $exists",
            |n| json!({"$or": [{"title": {"$neq": "tide"}, "score": {"$gt": 1_000_000 + n}}, {"x": {"$exists": true}}]}),
        ),
        ("$contains", |n| json!({"text": {"$contains": format!("nothing{n}")}})),
        ("$endsWith", |n| json!({"text": {"$endsWith": format!("nothing{n}")}})),
    ];
    for (name, filter) in filters {
        let mut live = live(&state, (0..10_000).map(|n| json!({"filter": filter(n)})));
        let (_, commits) = updates(state.clone(), ROWS, 200, || json!({"score": fastrand::u32(..1_000_000)}));
        let cost = run(&mut live, &commits);
        report(name, 10_000, &cost);
        println!("    {:.2} million evaluations a second", cost.evaluations / cost.time.as_secs_f64() / 1e6);
    }
}

#[test]
#[ignore = "measures; run in release"]
fn speed_of_maintenance_and_of_new_queries() {
    const ROWS: usize = 1_000_000;
    let state = state_with_rows(ROWS);
    let (after, commits) = updates(
        state.clone(),
        ROWS,
        50_000,
        || json!({"score": fastrand::u32(..1_000_000), "price": f64::from(fastrand::u32(..100_000)) / 100.0}),
    );
    for (name, query) in [
        ("top 10", json!({"sort": {"score": "desc"}, "limit": 10})),
        ("10 in the middle", json!({"sort": {"score": "desc"}, "offset": 500_000, "limit": 10})),
        ("all, sorted", json!({"sort": {"title": "asc", "score": "desc"}})),
        ("all", json!({})),
        ("count", json!({"filter": {"score": {"$gt": 500_000}}, "aggregate": {"function": "count"}})),
        ("sum", json!({"aggregate": {"function": "sum", "field": "score"}})),
        ("sum of prices", json!({"aggregate": {"function": "sum", "field": "price"}})),
        ("max", json!({"aggregate": {"function": "max", "field": "score"}})),
        ("sum of 100 groups", json!({"aggregate": {"function": "sum", "field": "score", "groupBy": "group"}})),
    ] {
        let mut query = query;
        query["bucket"] = json!("b");
        let query = Query::parse(&query).unwrap();
        let mut live = Matcher::new(Position { epoch: 1, sequence: 0 });
        let start = Instant::now();
        live.subscribe(1, &query, state.bucket("b").unwrap(), 1).unwrap();
        let subscribe = start.elapsed();
        let Cost { time, updates, .. } = run(&mut live, &commits);
        let start = Instant::now();
        std::hint::black_box(query.evaluate(after.bucket("b").unwrap(), 1, &Budget::unlimited()).unwrap());
        let requery = start.elapsed();
        let ratio = requery.as_secs_f64() / time.as_secs_f64();
        println!(
            "{name} of {ROWS}: {time:?} a commit ({updates:.3} updates), new query {requery:?}, {ratio:.0} times; subscribe {subscribe:?}"
        );
    }
}
