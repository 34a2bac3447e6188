//! The rows that are updated and subscribed to.

use serde_json::{Map, Value as Json, json};
use tidewire_store::{Query, Store, StoreOptions};

pub(super) const BUCKET: &str = "rows";

/// The approximate length of a row as JSON.
pub(super) const BYTES: usize = 256;

/// Rows per commit while a store is filled.
const ROWS_PER_COMMIT: u64 = 10_000;

/// Creates an in-memory store with this number of rows and with these indexes.
pub(super) fn store_with_rows(rows: u64, indexes: &[&str]) -> Store {
    let store = Store::memory(StoreOptions::default());
    let number = json!({"type": "number"});
    let schema = json!({"id": number, "name": {"type": "string"}, "place": number, "count": number});
    let bucket = json!({"key": "id", "schema": schema, "indexes": indexes});
    store.define_bucket(BUCKET, bucket).wait().expect("a bucket can be defined");
    for first in (0..rows).step_by(usize::try_from(ROWS_PER_COMMIT).expect("64 bits")) {
        let some = (first..rows.min(first + ROWS_PER_COMMIT)).map(row);
        store.insert_many(BUCKET, some).wait().expect("rows are stored");
    }
    store
}

/// Returns the unique name of the row with this key.
pub(super) fn name(id: u64) -> String {
    format!("w{id:08}")
}

/// Returns a query for the rows that match a filter.
pub(super) fn query(filter: &Json) -> Query {
    parsed(&json!({"bucket": BUCKET, "filter": filter}))
}

pub(super) fn parsed(query: &Json) -> Query {
    Query::parse(query).expect("the query is valid")
}

/// Returns the patch of an update.
pub(super) fn patch(count: u64) -> Map<String, Json> {
    Map::from_iter([("count".to_owned(), count.into())])
}

fn row(id: u64) -> Map<String, Json> {
    let count = Random(id).below(MAX_COUNT);
    let row = json!({"id": id, "name": name(id), "place": id, "count": count, "text": ""});
    let text = "x".repeat(BYTES - row.to_string().len());
    let Json::Object(mut row) = row else { unreachable!("the value is an object") };
    row.insert("text".to_owned(), text.into());
    row
}

/// The exclusive upper limit of the count of a row.
pub(super) const MAX_COUNT: u64 = 1_000_000_000;

/// A pseudo-random number generator with a fixed seed.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        // The high bits are more random, and mixing gives similar seeds different first numbers.
        let mixed = (self.0 ^ (self.0 >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        (mixed >> 32) % end
    }
}
