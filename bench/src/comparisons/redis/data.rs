//! The data on the server. A value contains its key, so that a reply delivered to the wrong task is detected.

use std::ops::Deref;
use std::sync::LazyLock;

use bytes::BytesMut;
use tidewire_redis::resp::encode_command;

/// The number of keys. The largest command reads all of them.
const KEY_COUNT: usize = 1000;
/// The length of a value.
pub(super) const VALUE_BYTES: usize = 64;
pub(super) const LIST: &str = "list";
pub(super) const LARGE: &str = "large";
/// A list that does not exist.
pub(super) const EMPTY_LIST: &str = "empty";
/// A key whose value changes.
pub(super) const CHANGING: &str = "changing";
pub(super) const CHANNEL: &str = "channel";
/// The number of commands in a pipeline.
pub(super) const PIPELINE_COMMANDS: usize = 100;

pub(super) static KEYS: LazyLock<Vec<String>> =
    LazyLock::new(|| (0..KEY_COUNT).map(|key| format!("key:{key}")).collect());
pub(super) static VALUES: LazyLock<Vec<String>> =
    LazyLock::new(|| (0..KEY_COUNT).map(|key| format!("{key:0VALUE_BYTES$}")).collect());
pub(super) static LARGE_VALUE: LazyLock<String> = LazyLock::new(|| "x".repeat(1 << 20));

/// Returns the encoded commands that store the data, and their number.
pub(super) fn commands() -> (BytesMut, usize) {
    let mut output = BytesMut::new();
    for (key, value) in KEYS.iter().zip(&*VALUES) {
        encode_command(&["SET", key, value], &mut output);
        encode_command(&["RPUSH", LIST, value], &mut output);
    }
    encode_command(&["SET", LARGE, &LARGE_VALUE], &mut output);
    (output, 2 * KEY_COUNT + 1)
}

/// Returns whether these are the first `count` values.
pub(super) fn are_values<S: Deref<Target = [u8]>>(found: &[S], count: usize) -> bool {
    found.len() == count && found.iter().zip(&*VALUES).all(|(found, value)| **found == *value.as_bytes())
}
