//! Keys: messages with the same key are handled in order.

use std::hash::{DefaultHasher, Hash, Hasher};

/// The key of a message. Messages with the same key are handled one at a time, in order.
///
/// A key is a number, so that queues store no strings. [`Key::of`] hashes any other value. Values whose hashes collide share a key,
/// which only reduces concurrency.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(pub u64);

impl Key {
    /// Returns the key of a value that can be hashed. The same value has the same key in every run.
    pub fn of<T: Hash + ?Sized>(value: &T) -> Self {
        let mut hasher = DefaultHasher::new();
        value.hash(&mut hasher);
        Self(hasher.finish())
    }
}

impl From<u64> for Key {
    fn from(key: u64) -> Self {
        Self(key)
    }
}
