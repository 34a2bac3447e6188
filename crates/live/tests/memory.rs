//! Memory of a subscriber and of a query, measured with a counting allocator. It is a separate binary, because the allocator is
//! global.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use serde_json::{Value as Json, json};
use tidewire_live::Matcher;
use tidewire_store::{Draft, Position, Query, State};

struct CountingAllocator;

thread_local! {
    /// Bytes allocated minus bytes freed by this thread.
    static BYTES: Cell<isize> = const { Cell::new(0) };
}

fn add_bytes(bytes: usize, sign: isize) {
    BYTES.set(BYTES.get() + sign * isize::try_from(bytes).unwrap_or(0));
}

// SAFETY: every method forwards its arguments to `System` unchanged and returns its result. Counting uses a thread-local cell
// without lazy initialization or destructor, so it neither allocates nor unwinds.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add_bytes(layout.size(), 1);
        // SAFETY: the caller upholds the contract of `System`, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        add_bytes(layout.size(), -1);
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Returns the bytes that `work` allocates and does not free, divided by `count`.
fn bytes_each(count: usize, work: impl FnOnce()) -> isize {
    let before = BYTES.get();
    work();
    (BYTES.get() - before) / isize::try_from(count).unwrap()
}

fn state(rows: usize) -> State {
    let definition = json!({"key": "id", "schema": {"id": {"type": "number"}}});
    let mut draft = Draft::new(State::new(), 1);
    draft.define_bucket("b", &definition).unwrap();
    let records = (0..rows).map(|id| json!({"id": id, "n": id % 1000, "s": "tide"}));
    draft.insert_many("b", records).unwrap();
    draft.finish().0
}

fn query(json: &Json) -> Query {
    let mut query = json.clone();
    query["bucket"] = json!("b");
    Query::parse(&query).unwrap()
}

#[test]
fn further_subscriber_needs_little_memory() {
    const MANY: usize = 50_000;
    let state = state(100);
    let bucket = state.bucket("b").unwrap();
    let query = query(&json!({"filter": {"n": 1}}));
    let mut live = Matcher::new(Position { epoch: 1, sequence: 0 });
    live.subscribe(0, &query, bucket, 1).unwrap();
    let each = bytes_each(MANY, || {
        for subscriber in 1..=MANY as u64 {
            live.subscribe(subscriber, &query, bucket, 1).unwrap();
        }
    });
    println!("{each} bytes a subscriber");
    assert!(each <= 300, "{each} bytes a subscriber");
}

#[test]
fn removed_queries_free_their_memory() {
    let state = state(100);
    let bucket = state.bucket("b").unwrap();
    let mut live = Matcher::new(Position { epoch: 1, sequence: 0 });
    let queries: Vec<Query> = (0..1000)
        .map(|n| match n % 4 {
            0 => query(&json!({"filter": {"n": n}})),
            1 => query(&json!({"filter": {"n": {"$between": [n, n + 10]}}, "sort": {"s": "asc"}})),
            2 => query(&json!({"filter": {"s": {"$contains": n.to_string()}}})),
            _ => query(
                &json!({"filter": {"n": {"$gt": n}}, "aggregate": {"function": "sum", "field": "n", "groupBy": "s"}}),
            ),
        })
        .collect();
    let mut round = || {
        for (subscriber, query) in (0..).zip(&queries) {
            live.subscribe(subscriber, query, bucket, 1).unwrap();
        }
        for subscriber in 0..queries.len() as u64 {
            assert!(live.unsubscribe(subscriber));
        }
    };
    // The first round grows tables that are not shrunk.
    round();
    assert_eq!(bytes_each(1, &mut round), 0);
}

/// A name, and a function from a number to a query.
type Kind = (&'static str, fn(usize) -> Json);

#[test]
#[ignore = "measures"]
fn memory_of_queries() {
    const MANY: usize = 10_000;
    let state = state(1000);
    let bucket = state.bucket("b").unwrap();
    let kinds: [Kind; 5] = [
        ("equality, no row", |n| json!({"filter": {"s": format!("value-{n}")}})),
        ("equality, one row", |n| json!({"filter": {"id": n % 1000, "s": {"$neq": n}}})),
        (
            "range, no row",
            |n| json!({"filter": {"n": {"$between": [2000 + n, 2001 + n]}}, "sort": {"n": "asc"}, "limit": 10}),
        ),
        ("unindexed, no row", |n| json!({"filter": {"s": {"$contains": format!("x{n}")}}})),
        ("count", |n| json!({"filter": {"id": n + 5000}, "aggregate": {"function": "count"}})),
    ];
    for (name, kind) in kinds {
        let queries: Vec<Query> = (0..MANY).map(|n| query(&kind(n))).collect();
        let mut live = Matcher::new(Position { epoch: 1, sequence: 0 });
        let each = bytes_each(MANY, || {
            for (subscriber, query) in (0..).zip(&queries) {
                live.subscribe(subscriber, query, bucket, 1).unwrap();
            }
        });
        println!("{name}: {each} bytes a query");
    }
    let large = self::state(200_000);
    for (name, json) in [("unsorted", json!({})), ("sorted", json!({"sort": {"n": "asc"}, "limit": 10}))] {
        let mut live = Matcher::new(Position { epoch: 1, sequence: 0 });
        let each = bytes_each(200_000, || _ = live.subscribe(1, &query(&json), large.bucket("b").unwrap(), 1).unwrap());
        println!("{name}: {each} bytes a row");
    }
}
