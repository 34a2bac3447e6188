//! The data on the server. A value contains its key, so a reply that went to the wrong task is noticed.

use std::ops::Deref;
use std::sync::LazyLock;

use bytes::BytesMut;
use tidewire_redis::resp::encode_command;

/// As many keys as the widest command asks for.
const COUNT: usize = 1000;
/// The bytes of a value.
pub(super) const LENGTH: usize = 64;
pub(super) const LIST: &str = "list";
pub(super) const LARGE: &str = "large";
/// The commands of a pipeline.
pub(super) const PIPELINE: usize = 100;

pub(super) static KEYS: LazyLock<Vec<String>> = LazyLock::new(|| (0..COUNT).map(|key| format!("key:{key}")).collect());
pub(super) static VALUES: LazyLock<Vec<String>> =
    LazyLock::new(|| (0..COUNT).map(|key| format!("{key:0LENGTH$}")).collect());
pub(super) static LARGE_VALUE: LazyLock<String> = LazyLock::new(|| "x".repeat(1 << 20));

/// The commands that put it there, and how many they are.
pub(super) fn commands() -> (BytesMut, usize) {
    let mut output = BytesMut::new();
    for (key, value) in KEYS.iter().zip(&*VALUES) {
        encode_command(&["SET", key, value], &mut output);
        encode_command(&["RPUSH", LIST, value], &mut output);
    }
    encode_command(&["SET", LARGE, &LARGE_VALUE], &mut output);
    (output, 2 * COUNT + 1)
}

/// Whether these are all values, from the first on.
pub(super) fn are_values<S: Deref<Target = [u8]>>(found: &[S], count: usize) -> bool {
    found.len() == count && found.iter().zip(&*VALUES).all(|(found, value)| **found == *value.as_bytes())
}
