//! A part of the cache: entries, an index by key, and the order of eviction. It has no lock and no clock.
//!
//! An entry is a command with its reply, or with the load that waits for it. All entries of a key form a list, so that an invalidation
//! removes them without a search. Stored replies are also in the queue of the eviction policy, SIEVE: new entries join at one end, and a hand
//! moves from the other end. It evicts an entry that was not read since it last passed, and skips the others. So a hit only sets a flag.

use std::ops::Range;
use std::sync::Arc;

use hashbrown::HashTable;
use tokio::time::Instant;

use crate::Value;

/// The memory of an entry besides the bytes of its command and its reply: its slot, its places in both tables and the headers of its
/// allocations, on a 64-bit system and with the average free capacity of vectors and tables.
pub(super) const ENTRY_BYTES: usize = 320;

/// Marks the end of a list.
const NONE: u32 = u32::MAX;

/// A command whose reply can be cached. The hashes are those of the cache.
#[derive(Clone)]
pub(super) struct Read<'a> {
    pub(super) command: &'a [u8],
    /// Where the key is in the command.
    pub(super) key: Range<usize>,
    pub(super) command_hash: u64,
    pub(super) key_hash: u64,
}

/// A reply to be kept.
pub(super) struct Reply {
    pub(super) value: Arc<Value>,
    /// Its size with that of its entry.
    pub(super) size: usize,
    /// When it is too old.
    pub(super) expires: Instant,
}

/// What the cache has for a command.
pub(super) enum Found<L> {
    Reply(Arc<Value>),
    Load(L),
    Nothing,
}

/// A part of the cache. `L` identifies a load.
pub(super) struct Shard<L> {
    contents: Contents<L>,
    /// The limit of `contents.size`.
    limit: usize,
    /// The limit of the size of one reply.
    max_entry: usize,
    pub(super) counts: Counts,
}

/// What a shard has counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) hits: u64,
    pub(super) misses: u64,
    pub(super) coalesced: u64,
    pub(super) invalidated: u64,
    pub(super) discarded: u64,
    pub(super) oversized: u64,
    pub(super) evicted: u64,
    pub(super) expired: u64,
}

/// The entries of a shard.
pub(super) struct Contents<L> {
    /// The entries. A free slot is `None`.
    slots: Vec<Option<Entry<L>>>,
    free: Vec<u32>,
    /// The slots by the hash of the command.
    commands: HashTable<u32>,
    /// The first slot of each key, by the hash of the key.
    keys: HashTable<u32>,
    /// Stored replies, and their size.
    stored: usize,
    size: usize,
    newest: u32,
    oldest: u32,
    /// The next entry that may be evicted, or `NONE` for the oldest.
    hand: u32,
}

struct Entry<L> {
    command: Box<[u8]>,
    key: Range<usize>,
    command_hash: u64,
    key_hash: u64,
    state: State<L>,
    /// The neighbours in the list of the key.
    previous_of_key: u32,
    next_of_key: u32,
    /// The neighbours in the queue, if the reply is stored.
    newer: u32,
    older: u32,
    /// Whether it was read since the hand last passed.
    was_read: bool,
}

enum State<L> {
    Loading(L),
    Stored(Reply),
}

impl<L> Entry<L> {
    fn key(&self) -> &[u8] {
        &self.command[self.key.clone()]
    }
}

impl<L: Clone> Shard<L> {
    pub(super) fn new(limit: usize, max_entry: usize) -> Self {
        let max_entry = max_entry.min(limit);
        Self { contents: Contents::default(), limit, max_entry, counts: Counts::default() }
    }

    /// Returns the number of stored replies, and their size.
    pub(super) fn usage(&self) -> (usize, usize) {
        (self.contents.stored, self.contents.size)
    }

    /// Returns what there is for a command. A reply that is too old is removed.
    #[inline]
    pub(super) fn find(&mut self, read: &Read<'_>, now: Instant) -> Found<L> {
        let Some(slot) = self.contents.find(read) else { return Found::Nothing };
        let entry = self.contents.entry_mut(slot);
        match &entry.state {
            State::Loading(load) => Found::Load(load.clone()),
            State::Stored(reply) if reply.expires > now => {
                entry.was_read = true;
                Found::Reply(Arc::clone(&reply.value))
            }
            State::Stored(_) => {
                self.contents.remove(slot);
                self.counts.expired += 1;
                Found::Nothing
            }
        }
    }

    /// Adds an entry for a command that has none: its load begins.
    pub(super) fn begin(&mut self, read: &Read<'_>, load: L) {
        self.contents.insert(read, load);
    }

    /// Ends a load. Its reply is kept if there is one, and if the entry of the load was not removed meanwhile.
    pub(super) fn complete(&mut self, read: &Read<'_>, is_same: impl Fn(&L) -> bool, reply: Option<Reply>) {
        let slot = self.contents.find(read).filter(|slot| match &self.contents.entry(*slot).state {
            State::Loading(load) => is_same(load),
            State::Stored(_) => false,
        });
        match (slot, reply) {
            (None, None) => {}
            (None, Some(_)) => self.counts.discarded += 1,
            (Some(slot), None) => drop(self.contents.remove(slot)),
            (Some(slot), Some(reply)) if reply.size > self.max_entry => {
                self.contents.remove(slot);
                self.counts.oversized += 1;
            }
            (Some(slot), Some(reply)) => {
                while self.contents.size > self.limit - reply.size {
                    self.contents.evict();
                    self.counts.evicted += 1;
                }
                self.contents.store(slot, reply);
            }
        }
    }

    /// Removes all entries of a key, also those that are being loaded.
    pub(super) fn invalidate(&mut self, key: &[u8], key_hash: u64) {
        while let Some(slot) = self.contents.first_of_key(key, key_hash) {
            let removed = self.contents.remove(slot);
            self.counts.invalidated += u64::from(matches!(removed.state, State::Stored(_)));
        }
    }

    /// Removes all entries and returns them.
    pub(super) fn clear(&mut self) -> Contents<L> {
        std::mem::take(&mut self.contents)
    }
}

impl<L> Default for Contents<L> {
    fn default() -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            commands: HashTable::new(),
            keys: HashTable::new(),
            stored: 0,
            size: 0,
            newest: NONE,
            oldest: NONE,
            hand: NONE,
        }
    }
}

impl<L> Contents<L> {
    /// Returns the number of slots, which is about the work of dropping it.
    pub(super) fn slots(&self) -> usize {
        self.slots.len()
    }

    /// Drops a part of the entries.
    pub(super) fn truncate(&mut self, slots: usize) {
        self.slots.truncate(slots);
    }

    fn entry(&self, slot: u32) -> &Entry<L> {
        self.slots[slot as usize].as_ref().expect("only used slots are linked")
    }

    fn entry_mut(&mut self, slot: u32) -> &mut Entry<L> {
        self.slots[slot as usize].as_mut().expect("only used slots are linked")
    }

    #[inline]
    fn find(&self, read: &Read<'_>) -> Option<u32> {
        self.commands.find(read.command_hash, |slot| *self.entry(*slot).command == *read.command).copied()
    }

    fn first_of_key(&self, key: &[u8], key_hash: u64) -> Option<u32> {
        self.keys.find(key_hash, |slot| self.entry(*slot).key() == key).copied()
    }

    fn insert(&mut self, read: &Read<'_>, load: L) {
        let next_of_key = self.first_of_key(&read.command[read.key.clone()], read.key_hash);
        let entry = Entry {
            command: read.command.into(),
            key: read.key.clone(),
            command_hash: read.command_hash,
            key_hash: read.key_hash,
            state: State::Loading(load),
            previous_of_key: NONE,
            next_of_key: next_of_key.unwrap_or(NONE),
            newer: NONE,
            older: NONE,
            was_read: false,
        };
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            u32::try_from(self.slots.len() - 1).expect("2^32 entries do not fit in memory")
        });
        self.slots[slot as usize] = Some(entry);
        let slots = &self.slots;
        let hash = |slot: &u32, of: fn(&Entry<L>) -> u64| slots[*slot as usize].as_ref().map_or(0, of);
        self.commands.insert_unique(read.command_hash, slot, |slot| hash(slot, |entry| entry.command_hash));
        match next_of_key {
            // The index refers to the first entry of the key, which is now this one.
            Some(next) => {
                self.entry_mut(next).previous_of_key = slot;
                if let Some(first) = self.keys.find_mut(read.key_hash, |first| *first == next) {
                    *first = slot;
                }
            }
            None => {
                self.keys.insert_unique(read.key_hash, slot, |slot| hash(slot, |entry| entry.key_hash));
            }
        }
    }

    /// Stores the reply of an entry that is being loaded.
    fn store(&mut self, slot: u32, reply: Reply) {
        self.stored += 1;
        self.size += reply.size;
        let older = std::mem::replace(&mut self.newest, slot);
        let entry = self.entry_mut(slot);
        entry.state = State::Stored(reply);
        entry.older = older;
        match older {
            NONE => self.oldest = slot,
            older => self.entry_mut(older).newer = slot,
        }
    }

    /// Evicts the first entry from the hand on that was not read since the hand last passed. There is at least one stored entry.
    fn evict(&mut self) {
        let mut slot = self.hand;
        loop {
            if slot == NONE {
                slot = self.oldest;
            }
            let entry = self.entry_mut(slot);
            if !std::mem::take(&mut entry.was_read) {
                break;
            }
            slot = entry.newer;
        }
        self.hand = slot;
        self.remove(slot);
    }

    /// Removes an entry from all lists. The hand moves on if it points to it.
    fn remove(&mut self, slot: u32) -> Entry<L> {
        let entry = self.slots[slot as usize].take().expect("only used slots are linked");
        self.free.push(slot);
        if let Ok(found) = self.commands.find_entry(entry.command_hash, |found| *found == slot) {
            found.remove();
        }
        let (previous, next) = (entry.previous_of_key, entry.next_of_key);
        if next != NONE {
            self.entry_mut(next).previous_of_key = previous;
        }
        if previous != NONE {
            self.entry_mut(previous).next_of_key = next;
        } else if let Ok(mut first) = self.keys.find_entry(entry.key_hash, |first| *first == slot) {
            if next == NONE {
                first.remove();
            } else {
                *first.get_mut() = next;
            }
        }
        if let State::Stored(reply) = &entry.state {
            self.stored -= 1;
            self.size -= reply.size;
            if self.hand == slot {
                self.hand = entry.newer;
            }
            match entry.newer {
                NONE => self.newest = entry.older,
                newer => self.entry_mut(newer).older = entry.older,
            }
            match entry.older {
                NONE => self.oldest = entry.newer,
                older => self.entry_mut(older).newer = entry.newer,
            }
        }
        entry
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet};
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    const LIMIT: usize = 2000;

    /// Returns a read of field `field` of a key. The hashes collide often.
    fn read(command: (u8, u8)) -> (Vec<u8>, u64, u64) {
        (vec![b'k', command.0, command.1], u64::from(command.0 ^ command.1) & 3, u64::from(command.0) & 1)
    }

    fn with<R>(command: (u8, u8), f: impl FnOnce(&Read<'_>) -> R) -> R {
        let (bytes, command_hash, key_hash) = read(command);
        f(&Read { command: &bytes, key: 1..2, command_hash, key_hash })
    }

    #[derive(Debug, Clone)]
    enum Step {
        Begin((u8, u8)),
        Complete { load: usize, size: usize, is_kept: bool },
        Find((u8, u8)),
        Invalidate(u8),
        Clear,
        Wait(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        let command = || (0..4_u8, 0..4_u8);
        prop_oneof![
            6 => command().prop_map(Step::Begin),
            6 => (any::<usize>(), 1..LIMIT + 200, any::<bool>())
                .prop_map(|(load, size, is_kept)| Step::Complete { load, size: size / 3, is_kept }),
            1 => (any::<usize>(), 1..LIMIT + 200).prop_map(|(load, size)| Step::Complete { load, size, is_kept: true }),
            6 => command().prop_map(Step::Find),
            2 => (0..4_u8).prop_map(Step::Invalidate),
            1 => Just(Step::Clear),
            1 => (0..20_u64).prop_map(Step::Wait),
        ]
    }

    /// What a command may have in a model without eviction.
    #[derive(Debug, Clone, Copy, PartialEq)]
    enum Modelled {
        Loading(usize),
        Stored { load: usize, expires: Instant },
    }

    impl Shard<usize> {
        /// Checks that all lists agree with each other.
        fn check(&self) {
            let contents = &self.contents;
            let used: Vec<u32> = (0..u32::try_from(contents.slots.len()).unwrap())
                .filter(|slot| contents.slots[*slot as usize].is_some())
                .collect();
            assert_eq!(contents.commands.len(), used.len());
            assert_eq!(contents.free.len() + used.len(), contents.slots.len());
            let (mut queued, mut size, mut slot) = (HashSet::new(), 0, contents.oldest);
            while slot != NONE {
                let State::Stored(reply) = &contents.entry(slot).state else { panic!("a load is in the queue") };
                assert!(queued.insert(slot), "the queue has a cycle");
                size += reply.size;
                let newer = contents.entry(slot).newer;
                assert_eq!(if newer == NONE { contents.newest } else { contents.entry(newer).older }, slot);
                slot = newer;
            }
            assert_eq!((queued.len(), size), self.usage());
            assert!(size <= self.limit, "{size} bytes");
            assert!(contents.hand == NONE || queued.contains(&contents.hand), "the hand points to a removed entry");
            let mut of_keys = 0;
            for first in &contents.keys {
                let (mut slot, mut previous) = (*first, NONE);
                while slot != NONE {
                    of_keys += 1;
                    assert_eq!(contents.entry(slot).previous_of_key, previous);
                    assert_eq!(contents.entry(slot).key(), contents.entry(*first).key());
                    (previous, slot) = (slot, contents.entry(slot).next_of_key);
                }
            }
            assert_eq!(of_keys, used.len());
        }
    }

    proptest! {
        #[test]
        fn shard_is_a_map_with_a_limit(steps in prop::collection::vec(step(), 1..200)) {
            let mut shard = Shard::new(LIMIT, LIMIT);
            let mut model: HashMap<(u8, u8), Modelled> = HashMap::new();
            let mut loads: Vec<(u8, u8)> = Vec::new();
            let mut now = Instant::now();
            for step in steps {
                match step {
                    Step::Begin(command) => {
                        if !model.contains_key(&command) && matches!(with(command, |read| shard.find(read, now)), Found::Nothing) {
                            with(command, |read| shard.begin(read, loads.len()));
                            model.insert(command, Modelled::Loading(loads.len()));
                            loads.push(command);
                        }
                    }
                    Step::Complete { load, size, is_kept } => {
                        if loads.is_empty() {
                            continue;
                        }
                        let load = load % loads.len();
                        let command = loads[load];
                        let expires = now + Duration::from_secs(10);
                        let value = Arc::new(Value::Integer(i64::try_from(load).unwrap()));
                        let reply = is_kept.then_some(Reply { value, size, expires });
                        with(command, |read| shard.complete(read, |found| *found == load, reply));
                        if model.get(&command) == Some(&Modelled::Loading(load)) {
                            if is_kept && size <= LIMIT {
                                model.insert(command, Modelled::Stored { load, expires });
                            } else {
                                model.remove(&command);
                            }
                        }
                    }
                    Step::Find(command) => match with(command, |read| shard.find(read, now)) {
                        Found::Reply(value) => {
                            let Some(Modelled::Stored { load, expires }) = model.get(&command) else {
                                panic!("found a reply that was removed");
                            };
                            prop_assert_eq!(&*value, &Value::Integer(i64::try_from(*load).unwrap()));
                            prop_assert!(*expires > now);
                        }
                        Found::Load(load) => prop_assert_eq!(model.get(&command), Some(&Modelled::Loading(load))),
                        // It may have been evicted.
                        Found::Nothing => {
                            prop_assert!(!matches!(model.get(&command), Some(Modelled::Loading(_))));
                            model.remove(&command);
                        }
                    },
                    Step::Invalidate(key) => {
                        shard.invalidate(&[key], u64::from(key) & 1);
                        model.retain(|command, _| command.0 != key);
                    }
                    Step::Clear => {
                        shard.clear();
                        model.clear();
                    }
                    Step::Wait(seconds) => now += Duration::from_secs(seconds),
                }
                shard.check();
            }
        }
    }

    /// Stores replies of 100 bytes for these commands, in order.
    fn shard_with(limit: usize, commands: impl IntoIterator<Item = u8>) -> Shard<u8> {
        let mut shard = Shard::new(limit, limit);
        for command in commands {
            store(&mut shard, command);
        }
        shard
    }

    fn store(shard: &mut Shard<u8>, command: u8) {
        let reply = Reply { value: Arc::new(Value::Null), size: 100, expires: Instant::now() + Duration::from_mins(1) };
        with((command, 0), |read| {
            shard.begin(read, command);
            shard.complete(read, |load| *load == command, Some(reply));
        });
    }

    fn has(shard: &mut Shard<u8>, command: u8) -> bool {
        with((command, 0), |read| matches!(shard.find(read, Instant::now()), Found::Reply(_)))
    }

    #[test]
    fn entries_that_are_read_survive_a_scan() {
        let mut shard = shard_with(1000, 0..10);
        assert!(has(&mut shard, 3) && has(&mut shard, 7));
        for command in 10..200 {
            store(&mut shard, command);
            assert!(has(&mut shard, 3) && has(&mut shard, 7), "{command} evicted an entry that is read");
        }
        assert_eq!((shard.usage(), shard.counts.evicted), ((10, 1000), 190));
    }

    #[test]
    fn oldest_of_the_entries_that_are_not_read_is_evicted() {
        let mut shard = shard_with(300, 0..4);
        assert_eq!([0, 1, 2, 3].map(|command| has(&mut shard, command)), [false, true, true, true]);
    }

    #[test]
    fn reply_larger_than_the_limit_is_not_kept_and_evicts_nothing() {
        let mut shard = shard_with(300, 0..3);
        with((9, 0), |read| {
            shard.begin(read, 9);
            let expires = Instant::now() + Duration::from_mins(1);
            let reply = Reply { value: Arc::new(Value::Null), size: 301, expires };
            shard.complete(read, |load| *load == 9, Some(reply));
        });
        assert_eq!((shard.usage(), shard.counts.oversized, shard.counts.evicted), ((3, 300), 1, 0));
    }
}
