//! A large bucket without indexes. A request that reads all of it is costly.

use serde_json::{Map, Value as Json, json};
use tidewire_store::Store;

pub(super) const BUCKET: &str = "archive";

/// The length of a record as JSON, without the fields that the store adds.
pub(super) const RECORD_BYTES: u64 = 1024;

/// The number of groups. Each has the same number of records.
pub(super) const GROUPS: u64 = 10;

/// Every `rank` is below this number.
pub(super) const RANKS: u64 = 1_000_003;

/// The length of the field `name`.
const NAME_BYTES: usize = 64;

pub(super) fn define(store: &Store) {
    let (number, string) = (json!({"type": "number"}), json!({"type": "string"}));
    let schema = json!({"id": number, "group": number, "rank": number, "name": string, "text": string});
    store.define_bucket(BUCKET, json!({"key": "id", "schema": schema})).wait().expect("a bucket can be defined");
}

/// Returns the record of this number, from zero. Ranks are not in the order of the keys.
pub(super) fn record(number: u64) -> Map<String, Json> {
    let (group, rank) = (number % GROUPS, number * 7919 % RANKS);
    let name = format!("record {number} ").repeat(NAME_BYTES);
    let mut text =
        format!(r#"{{"id":{number},"group":{group},"rank":{rank},"name":"{}","text":""#, &name[..NAME_BYTES]);
    let rest = usize::try_from(RECORD_BYTES).expect("64 bits") - "\"}".len() - text.len();
    text.extend(std::iter::repeat_n('x', rest));
    text.push_str("\"}");
    serde_json::from_str(&text).expect("the text is a JSON object")
}
