//! The rows of the server. Their numbers have a fixed number of digits, so all rows have the same length.

use std::fmt::Write as _;

use serde_json::{Map, Value as Json};

pub(super) const BUCKET: &str = "rows";

/// A named query of the row with the key that is its parameter `id`.
pub(super) const QUERY: &str = "row";

/// The bytes that a row has as JSON, without what the store adds.
pub(super) const BYTES: usize = 256;

/// The key of the first row.
const FIRST_KEY: u64 = 1_000_000;

/// The count of a row that was not updated.
pub(super) const FIRST_COUNT: u64 = 1_000_000_000;

/// The key of the row of this number, from zero.
pub(super) fn key(number: u64) -> u64 {
    FIRST_KEY + number
}

/// The row of this number.
pub(super) fn text(number: u64) -> String {
    let mut text = String::with_capacity(BYTES);
    write!(text, r#"{{"id":{},"count":{FIRST_COUNT},"text":""#, key(number)).expect("a string takes it");
    text.extend(std::iter::repeat_n('x', BYTES - "\"}".len() - text.len()));
    text.push_str("\"}");
    text
}

/// The same, as the tree that a store is given.
pub(super) fn record(number: u64) -> Map<String, Json> {
    serde_json::from_str(&text(number)).expect("it was made as an object")
}

/// The request with this id that gives the row of this number a count.
pub(super) fn update(id: u64, number: u64, count: u64) -> String {
    let (key, data) = (key(number), format!(r#"{{"count":{count}}}"#));
    format!(r#"{{"id":{id},"type":"store.update","bucket":"{BUCKET}","key":{key},"data":{data}}}"#)
}

/// The request that follows the row of this number.
pub(super) fn subscribe(number: u64) -> String {
    let key = key(number);
    format!(r#"{{"id":1,"type":"store.subscribe","query":"{QUERY}","params":{{"id":{key}}}}}"#)
}
