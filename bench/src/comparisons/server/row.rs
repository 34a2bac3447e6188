//! The rows of the server. Their numbers have a fixed number of digits, so all rows have the same length.

use std::fmt::Write as _;

use serde_json::{Map, Value as Json};

pub(super) const BUCKET: &str = "rows";

/// The name of a query for the row whose key is the parameter `id`.
pub(super) const QUERY: &str = "row";

/// The length of a row as JSON, without the fields that the store adds.
pub(super) const BYTES: usize = 256;

/// The key of the first row.
const FIRST_KEY: u64 = 1_000_000;

/// The initial count of a row.
pub(super) const FIRST_COUNT: u64 = 1_000_000_000;

/// Returns the key of a row, numbered from zero.
pub(super) fn key(number: u64) -> u64 {
    FIRST_KEY + number
}

/// Returns the row as JSON.
pub(super) fn text(number: u64) -> String {
    let mut text = String::with_capacity(BYTES);
    write!(text, r#"{{"id":{},"count":{FIRST_COUNT},"text":""#, key(number))
        .expect("writing to a string does not fail");
    text.extend(std::iter::repeat_n('x', BYTES - "\"}".len() - text.len()));
    text.push_str("\"}");
    text
}

/// Returns the row as a record.
pub(super) fn record(number: u64) -> Map<String, Json> {
    serde_json::from_str(&text(number)).expect("the text is a JSON object")
}

/// Returns the request that sets the count of a row.
pub(super) fn update(id: u64, number: u64, count: u64) -> String {
    let (key, data) = (key(number), format!(r#"{{"count":{count}}}"#));
    format!(r#"{{"id":{id},"type":"store.update","bucket":"{BUCKET}","key":{key},"data":{data}}}"#)
}

/// Returns the request that subscribes to a row.
pub(super) fn subscribe(number: u64) -> String {
    let key = key(number);
    format!(r#"{{"id":1,"type":"store.subscribe","query":"{QUERY}","params":{{"id":{key}}}}}"#)
}
