//! Keys: messages with the same key are handled in order.

use std::hash::{DefaultHasher, Hash, Hasher};

/// Messages with the same key are handled one at a time, in order.
///
/// A key is a number so that a queue holds no strings. Where the natural key is something else, [`Key::of`] hashes it; two
/// values that should collide share an order, which costs them some concurrency and nothing else.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(pub u64);

impl Key {
    /// The key of anything that can be hashed. The same value has the same key in every run.
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
