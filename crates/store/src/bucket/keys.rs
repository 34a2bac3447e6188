//! Records by key: a hash table that all states of a bucket share.
//!
//! The table only grows, and its entries are hints: an entry counts only if the state that is read has that record with that key.
//! So an entry may be left over from a deleted record or an abandoned draft, and neither reads nor undo copy anything. When the
//! table is full, the next state gets a new one with its own records; older states keep theirs. (With ordered maps
//! with structural sharing for keys and rows, a read took twice as long.)

use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::sync::{Arc, LazyLock};

use super::Ordinal;
use crate::IndexKey;

/// Leads from keys to the ordinals of records that may have them.
#[derive(Debug, Clone)]
pub(super) struct Keys(Arc<Table>);

#[derive(Debug)]
struct Table {
    /// A power of two of them.
    slots: Box<[Slot]>,
    used: AtomicUsize,
}

/// Written once. Whoever is to see an entry has been given a state after it was written.
#[derive(Debug)]
struct Slot {
    /// Zero as long as nobody has it.
    hash: AtomicU64,
    ordinal: AtomicU64,
}

/// The hash of a key, with a secret of this process: nobody can choose keys that hash alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct KeyHash(u64);

impl KeyHash {
    pub(super) fn of(key: &IndexKey) -> Self {
        static SECRET: LazyLock<RandomState> = LazyLock::new(RandomState::new);
        // Zero stands for nothing.
        Self(SECRET.hash_one(key).max(1))
    }
}

impl Keys {
    /// With room for so many records at least.
    pub(super) fn with_room_for(records: usize) -> Self {
        // At most two of three are used.
        let slots = (records.saturating_mul(3) / 2 + 1).next_power_of_two().max(8);
        let slot = || Slot { hash: AtomicU64::new(0), ordinal: AtomicU64::new(Ordinal::MAX) };
        Self(Arc::new(Table { slots: std::iter::repeat_with(slot).take(slots).collect(), used: AtomicUsize::new(0) }))
    }

    /// The ordinals of all records that may have a key of this hash.
    pub(super) fn find(&self, hash: KeyHash) -> impl Iterator<Item = Ordinal> {
        self.probe(hash)
            .map_while(|slot| match slot.hash.load(Acquire) {
                0 => None,
                other => Some((other, slot)),
            })
            .filter(move |(other, _)| *other == hash.0)
            .map(|(_, slot)| slot.ordinal.load(Acquire))
    }

    /// Takes an entry in. Returns false if there is no room: then a table with more of it is needed.
    #[must_use]
    pub(super) fn insert(&self, hash: KeyHash, ordinal: Ordinal) -> bool {
        if self.0.used.fetch_add(1, Relaxed) >= self.0.slots.len() / 3 * 2 {
            return false;
        }
        // Others may be inserting, into drafts of their own: whoever gets a slot keeps it.
        let own = self.probe(hash).find(|slot| slot.hash.compare_exchange(0, hash.0, Acquire, Relaxed).is_ok());
        own.inspect(|slot| slot.ordinal.store(ordinal, Release)).is_some()
    }

    /// A table with more room, for so many records. If not too many entries lead nowhere they are taken over as they are, else
    /// `entries` says which there are.
    pub(super) fn grown(&self, records: usize, entries: impl Iterator<Item = (KeyHash, Ordinal)>) -> Self {
        let grown = Self::with_room_for(records.max(4) * 2);
        // There is room for all of them, and as many more.
        if self.0.used.load(Relaxed) <= records + records / 4 {
            for slot in &self.0.slots {
                let (hash, ordinal) = (slot.hash.load(Acquire), slot.ordinal.load(Acquire));
                if hash != 0 {
                    let _ = grown.insert(KeyHash(hash), ordinal);
                }
            }
        } else {
            for (hash, ordinal) in entries {
                let _ = grown.insert(hash, ordinal);
            }
        }
        grown
    }

    /// The slots in which an entry may be, in the order in which they are looked at.
    fn probe(&self, hash: KeyHash) -> impl Iterator<Item = &Slot> {
        let slots = &self.0.slots;
        let mask = slots.len() - 1;
        #[expect(clippy::cast_possible_truncation, reason = "it is masked anyway")]
        let first = hash.0 as usize & mask;
        (0..slots.len()).map(move |step| &slots[(first + step) & mask])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Value;

    #[test]
    fn what_was_inserted_is_found_until_it_is_full() {
        let keys = Keys::with_room_for(100);
        let hash = |number: u32| KeyHash::of(&IndexKey::of(Some(&Value::Number(f64::from(number)))));
        let mut count = 0;
        while keys.insert(hash(count), count.into()) {
            count += 1;
        }
        assert!(count >= 100, "{count}");
        for number in 0..count {
            assert!(keys.find(hash(number)).any(|ordinal| ordinal == u64::from(number)));
        }
        assert_eq!(keys.find(hash(count)).count(), 0);
        // A key may have had several places.
        let keys = Keys::with_room_for(2);
        assert!(keys.insert(hash(1), 1) && keys.insert(hash(1), 2));
        assert_eq!(keys.find(hash(1)).collect::<Vec<_>>(), [1, 2]);
    }

    #[test]
    fn several_may_insert_at_once() {
        let keys = Keys::with_room_for(4000);
        let hash = |number: u64| KeyHash(number % 500 + 1);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let keys = keys.clone();
                scope.spawn(move || {
                    for number in 0..1000 {
                        assert!(keys.insert(hash(number), thread * 1000 + number));
                    }
                });
            }
        });
        for number in 0..4000 {
            assert_eq!(keys.find(hash(number % 1000)).filter(|ordinal| *ordinal == number).count(), 1);
        }
    }
}
