//! The rows that are written and subscribed to.

use serde_json::{Map, Value as Json, json};
use tidewire_store::{Query, Store, StoreOptions};

pub(super) const BUCKET: &str = "rows";

/// The bytes that a row has as JSON, about.
pub(super) const BYTES: usize = 256;

/// How many rows go into a commit when a store is filled.
const AT_ONCE: u64 = 10_000;

/// A store in memory with so many rows, and these indexes.
pub(super) fn filled(rows: u64, indexes: &[&str]) -> Store {
    let store = Store::memory(StoreOptions::default());
    let number = json!({"type": "number"});
    let schema = json!({"id": number, "name": {"type": "string"}, "place": number, "count": number});
    let bucket = json!({"key": "id", "schema": schema, "indexes": indexes});
    store.define_bucket(BUCKET, bucket).wait().expect("a bucket can be defined");
    for first in (0..rows).step_by(usize::try_from(AT_ONCE).expect("64 bits")) {
        let some = (first..rows.min(first + AT_ONCE)).map(row);
        store.insert_many(BUCKET, some).wait().expect("rows are stored");
    }
    store
}

/// What names the row with this key, and no other.
pub(super) fn name(id: u64) -> String {
    format!("w{id:08}")
}

/// A query of the rows that a filter means.
pub(super) fn query(filter: &Json) -> Query {
    parsed(&json!({"bucket": BUCKET, "filter": filter}))
}

pub(super) fn parsed(query: &Json) -> Query {
    Query::parse(query).expect("the query is right")
}

/// What an update changes.
pub(super) fn patch(count: u64) -> Map<String, Json> {
    Map::from_iter([("count".to_owned(), count.into())])
}

fn row(id: u64) -> Map<String, Json> {
    let count = Random(id).below(COUNTS);
    let row = json!({"id": id, "name": name(id), "place": id, "count": count, "text": ""});
    let text = "x".repeat(BYTES - row.to_string().len());
    let Json::Object(mut row) = row else { unreachable!("it was made as an object") };
    row.insert("text".to_owned(), text.into());
    row
}

/// The count of a row is below this.
pub(super) const COUNTS: u64 = 1_000_000_000;

/// Numbers without order, the same in every run.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        // The high bits are the better ones, and numbers that begin alike are told apart by them after a mix.
        let mixed = (self.0 ^ (self.0 >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        (mixed >> 32) % end
    }
}
