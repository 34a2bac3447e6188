//! Ordinals by key: a hash table that all states of a bucket share, and a small persistent set for exceptions.
//!
//! The table maps the hash of a key to an ordinal. A slot is written once, so readers need no lock and a clone copies nothing. An
//! entry is a hint: it is valid only if the state has a record with that key at that ordinal. An entry that is *dead* in one
//! state, because its record was deleted or its draft was rolled back, may be live in an older snapshot and is never overwritten.
//! (With persistent ordered maps for keys and rows, a read takes twice as long.)
//!
//! # Cost after deletions
//!
//! - A hash has at most one slot. If that slot has another ordinal, because the key was deleted and inserted again or because two
//!   keys have the same hash, the entry is added to `moved`, an ordered set that belongs to one state. A deletion removes the entry
//!   from `moved`. A lookup therefore examines one slot and the `moved` entries of its hash, all of which are live, regardless of
//!   the number of earlier deletions of the key.
//! - At most two thirds of the slots are used, so dead entries of other keys lengthen a probe by a constant factor at most.
//! - When dead entries outnumber the live ones ([`Keys::is_sparse`]), or the table is full, the state gets a new table with its
//!   own records and an empty `moved`. This takes time proportional to the live records, and at least as many insertions or
//!   deletions precede the next rebuild. The memory of the table is therefore proportional to the live records.
//!
//! # Why older snapshots stay correct
//!
//! A snapshot has its own reference to the table and its own `moved`. Slots are only added, so every entry of the snapshot stays
//! where it was, and later entries fail the check against the records of the snapshot. A new table replaces the old table in the
//! new state only; the old table is freed with the last snapshot that refers to it.

use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::sync::{Arc, LazyLock};

use imbl::OrdSet;

use super::Ordinal;
use crate::query::IndexKey;

/// Number of dead entries below which a table is never rebuilt.
const MIN_DEAD_ENTRIES: usize = 64;

/// Maps keys to the ordinals of records that may have them.
#[derive(Debug, Clone)]
pub(super) struct Keys {
    table: Arc<Table>,
    /// Entries of records of this state whose hash has a slot with another ordinal.
    moved: OrdSet<(u64, Ordinal)>,
}

#[derive(Debug)]
struct Table {
    /// The length is a power of two. No two slots have the same hash.
    slots: Box<[Slot]>,
    used: AtomicUsize,
}

/// A slot of the table, written once. A reader that needs an entry has a state that was published after the entry was written.
#[derive(Debug)]
struct Slot {
    /// Zero while the slot is free.
    hash: AtomicU64,
    ordinal: AtomicU64,
}

/// The hash of a key with a secret seed of this process, so that clients cannot choose keys that collide.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct KeyHash(u64);

impl KeyHash {
    pub(super) fn of(key: &IndexKey) -> Self {
        static SECRET: LazyLock<RandomState> = LazyLock::new(RandomState::new);
        // Zero marks a free slot.
        Self(SECRET.hash_one(key).max(1))
    }
}

/// The result of adding a hash to a table.
enum Claim {
    /// The table has the entry.
    Inserted,
    /// The slot of this hash has another ordinal.
    Occupied,
    /// The table is full.
    Full,
}

impl Table {
    fn with_capacity(records: usize) -> Self {
        // At most two thirds are used.
        let slots = (records.saturating_mul(3) / 2 + 1).next_power_of_two().max(8);
        let slot = || Slot { hash: AtomicU64::new(0), ordinal: AtomicU64::new(Ordinal::MAX) };
        Self { slots: std::iter::repeat_with(slot).take(slots).collect(), used: AtomicUsize::new(0) }
    }

    /// Returns the ordinal in the slot of this hash.
    fn find(&self, hash: KeyHash) -> Option<Ordinal> {
        for slot in self.probe(hash) {
            match slot.hash.load(Acquire) {
                0 => return None,
                other if other == hash.0 => return Some(slot.ordinal.load(Acquire)),
                _ => {}
            }
        }
        None
    }

    fn claim(&self, hash: KeyHash, ordinal: Ordinal) -> Claim {
        for slot in self.probe(hash) {
            let mut found = slot.hash.load(Acquire);
            if found == 0 {
                if self.used.load(Relaxed) >= self.slots.len() / 3 * 2 {
                    return Claim::Full;
                }
                // A draft of another thread may claim the slot first, for another hash or for this one.
                match slot.hash.compare_exchange(0, hash.0, Acquire, Acquire) {
                    Ok(_) => {
                        self.used.fetch_add(1, Relaxed);
                        slot.ordinal.store(ordinal, Release);
                        return Claim::Inserted;
                    }
                    Err(winner) => found = winner,
                }
            }
            if found == hash.0 {
                return if slot.ordinal.load(Acquire) == ordinal { Claim::Inserted } else { Claim::Occupied };
            }
        }
        Claim::Full
    }

    /// Returns the slots that may have this hash, in probe order.
    fn probe(&self, hash: KeyHash) -> impl Iterator<Item = &Slot> {
        let mask = self.slots.len() - 1;
        #[expect(clippy::cast_possible_truncation, reason = "it is masked anyway")]
        let first = hash.0 as usize & mask;
        (0..self.slots.len()).map(move |step| &self.slots[(first + step) & mask])
    }
}

impl Keys {
    /// Creates an empty table with capacity for at least this many records.
    pub(super) fn with_capacity(records: usize) -> Self {
        Self { table: Arc::new(Table::with_capacity(records)), moved: OrdSet::new() }
    }

    /// Returns the ordinals of all records that may have a key with this hash.
    pub(super) fn find(&self, hash: KeyHash) -> impl Iterator<Item = Ordinal> {
        let moved = move || {
            let range = (!self.moved.is_empty()).then(|| self.moved.range((hash.0, 0)..=(hash.0, Ordinal::MAX)));
            range.into_iter().flatten().map(|(_, ordinal)| *ordinal)
        };
        // Most lookups end at the table, so the range is created lazily.
        self.table.find(hash).into_iter().chain(std::iter::once_with(moved).flatten())
    }

    /// Adds an entry. Returns false if the table is full: then [`rebuilt`](Self::rebuilt) or [`grown`](Self::grown) is needed.
    #[must_use]
    pub(super) fn insert(&mut self, hash: KeyHash, ordinal: Ordinal) -> bool {
        match self.table.claim(hash, ordinal) {
            Claim::Inserted => true,
            Claim::Occupied => {
                self.moved.insert((hash.0, ordinal));
                true
            }
            Claim::Full => false,
        }
    }

    /// Removes the entry of a deleted record from `moved`. The shared table keeps its entries.
    pub(super) fn remove(&mut self, hash: KeyHash, ordinal: Ordinal) {
        if !self.moved.is_empty() {
            self.moved.remove(&(hash.0, ordinal));
        }
    }

    /// Returns the number of entries, dead ones included.
    fn len(&self) -> usize {
        self.table.used.load(Relaxed) + self.moved.len()
    }

    /// Returns whether more entries are dead than live, in a state with this many records.
    pub(super) fn is_sparse(&self, records: usize) -> bool {
        self.len() > records.saturating_mul(2) + MIN_DEAD_ENTRIES
    }

    /// Returns a larger table, with capacity for twice this many records. Copies the entries of this table if few of them are dead.
    /// Otherwise inserts `entries`, which must be those of all records.
    pub(super) fn grown(&self, records: usize, entries: impl Iterator<Item = (KeyHash, Ordinal)>) -> Self {
        if self.len() > records + records / 4 {
            return Self::rebuilt(records, entries);
        }
        let grown = Self { moved: self.moved.clone(), ..Self::with_capacity(records.max(4) * 2) };
        for slot in &self.table.slots {
            let (hash, ordinal) = (slot.hash.load(Acquire), slot.ordinal.load(Acquire));
            if hash != 0 {
                grown.table.claim(KeyHash(hash), ordinal);
            }
        }
        grown
    }

    /// Returns a table with these entries, which must be those of all records, and with capacity for twice as many.
    pub(super) fn rebuilt(records: usize, entries: impl Iterator<Item = (KeyHash, Ordinal)>) -> Self {
        let mut rebuilt = Self::with_capacity(records.max(4) * 2);
        for (hash, ordinal) in entries {
            let is_inserted = rebuilt.insert(hash, ordinal);
            debug_assert!(is_inserted, "the capacity is twice the number of records");
        }
        rebuilt
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use serde_json::json;

    use super::*;
    use crate::bucket::Bucket;
    use crate::schema::BucketDefinition;
    use crate::{Change, Row, Value};

    #[test]
    fn entries_are_found_until_the_table_is_full() {
        let mut keys = Keys::with_capacity(100);
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
        // A key may have several ordinals.
        let mut keys = Keys::with_capacity(2);
        assert!(keys.insert(hash(1), 1) && keys.insert(hash(1), 2));
        assert_eq!(keys.find(hash(1)).collect::<Vec<_>>(), [1, 2]);
        keys.remove(hash(1), 2);
        assert_eq!(keys.find(hash(1)).collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn clones_insert_concurrently() {
        let keys = Keys::with_capacity(500);
        let hash = |number: u64| KeyHash(number % 500 + 1);
        let clones: Vec<Keys> = std::thread::scope(|scope| {
            let insert = |thread: u64| {
                let mut keys = keys.clone();
                scope.spawn(move || {
                    for number in 0..1000 {
                        assert!(keys.insert(hash(number), thread * 1000 + number));
                    }
                    keys
                })
            };
            let threads: Vec<_> = (0..4).map(insert).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(keys.table.used.load(Relaxed), 500, "a hash has one slot");
        for (thread, keys) in (0..).zip(clones) {
            for number in 0..1000 {
                let own = thread * 1000 + number;
                assert_eq!(keys.find(hash(number)).filter(|ordinal| *ordinal == own).count(), 1);
            }
        }
    }

    fn number(id: u32) -> Value<'static> {
        Value::Number(f64::from(id))
    }

    fn bucket_of(ids: std::ops::Range<u32>) -> Bucket {
        let config = json!({"key": "id", "schema": {"id": {"type": "number"}}});
        let mut bucket = Bucket::new(Arc::new(BucketDefinition::parse(&config).unwrap()));
        ids.for_each(|id| put(&mut bucket, id));
        bucket
    }

    fn put(bucket: &mut Bucket, id: u32) {
        bucket.put(Row::new(json!({"id": id}).as_object().unwrap()).unwrap()).unwrap();
    }

    /// Returns the number of ordinals that a lookup of this key examines.
    fn candidates(bucket: &Bucket, id: u32) -> usize {
        bucket.keys.find(KeyHash::of(&IndexKey::of(Some(&number(id))))).count()
    }

    #[test]
    fn deletions_of_a_key_do_not_lengthen_its_lookup() {
        let mut bucket = bucket_of(0..10_000);
        for _ in 0..2000 {
            put(&mut bucket, 77_777);
            assert!(candidates(&bucket, 77_777) <= 2);
            assert!(bucket.remove(&number(77_777)).is_some());
            assert!(candidates(&bucket, 77_777) <= 1);
        }
    }

    #[test]
    fn rolled_back_insertions_of_a_key_do_not_lengthen_its_lookup() {
        let mut bucket = bucket_of(0..10_000);
        for id in 0..2000 {
            // Ordinals are reused after a rollback, by other keys as well.
            for id in [77_777, 100_000 + id] {
                let row = Row::new(json!({"id": id}).as_object().unwrap()).unwrap();
                let (ordinal, _) = bucket.put_row(row.clone()).unwrap();
                bucket.revert(Change { bucket: "b".into(), ordinal, old: None, new: Some(row) });
            }
            assert!(candidates(&bucket, 77_777) <= 2);
        }
        assert!(bucket.get(&number(77_777)).is_none());
    }

    #[test]
    fn dead_entries_are_reclaimed() {
        let mut bucket = bucket_of(0..10_000);
        for id in 10_000..200_000 {
            put(&mut bucket, id);
            assert!(bucket.remove(&number(id)).is_some());
        }
        assert!(bucket.keys.table.slots.len() <= 1 << 16, "{} slots for 10000 records", bucket.keys.table.slots.len());
        for id in 10..10_000 {
            assert!(bucket.remove(&number(id)).is_some());
        }
        assert!(bucket.keys.table.slots.len() <= 1 << 10, "{} slots for 10 records", bucket.keys.table.slots.len());
        assert!((0..10).all(|id| bucket.get(&number(id)).is_some()));
    }

    proptest::proptest! {
        /// Every clone finds exactly its own records, regardless of later insertions and deletions.
        #[test]
        fn clones_find_their_own_records(
            steps in proptest::collection::vec((0..12_u32, proptest::bool::ANY, proptest::bool::weighted(0.2)), 0..200),
        ) {
            let mut clones = vec![(bucket_of(0..0), HashSet::new())];
            for (id, is_put, is_cloned) in steps {
                if is_cloned {
                    clones.extend(clones.last().cloned());
                }
                let Some((bucket, expected)) = clones.last_mut() else { continue };
                if is_put {
                    put(bucket, id);
                    expected.insert(id);
                } else {
                    proptest::prop_assert_eq!(bucket.remove(&number(id)).is_some(), expected.remove(&id));
                }
            }
            for (bucket, expected) in clones {
                for id in 0..12 {
                    proptest::prop_assert_eq!(bucket.get(&number(id)).is_some(), expected.contains(&id));
                }
            }
        }
    }
}
