//! The state: all buckets at one moment.
//!
//! The cost of a write does not depend on the number of buckets. The state therefore maintains the values that would otherwise need
//! a visit of all buckets: expiry times, references between buckets, and totals. All maps are persistent data structures: each
//! snapshot has its own version of them, and undoing a write restores the earlier version.

use std::sync::Arc;

use imbl::{OrdMap, OrdSet};

use crate::catalog::{self, REPLIES};
use crate::replies;
use crate::schema::BucketDefinition;
use crate::{Bucket, StoreError};

/// All buckets at one moment. A clone shares all data, so readers can use a state while the writer creates the next one.
#[derive(Debug, Clone)]
pub struct State {
    /// Internal, system and ordinary buckets.
    buckets: OrdMap<Arc<str>, InstalledBucket>,
    /// The names of ordinary buckets, in the order of definition.
    names: OrdMap<DefinitionIndex, Arc<str>>,
    /// The names of system buckets, and whether the program declares them.
    system: OrdMap<Arc<str>, bool>,
    next_index: DefinitionIndex,
    /// The earliest expiry of each bucket with records that expire.
    expiries: OrdSet<(u64, Arc<str>)>,
    /// The names of buckets with fields that refer to a bucket, by the name of that bucket, in the order of definition.
    referring: OrdMap<Arc<str>, OrdMap<DefinitionIndex, Arc<str>>>,
    /// The totals of ordinary buckets.
    totals: Totals,
}

/// The index of a bucket in the order of definition.
type DefinitionIndex = u64;

#[derive(Debug, Clone)]
struct InstalledBucket {
    bucket: Arc<Bucket>,
    index: DefinitionIndex,
    is_ordinary: bool,
}

/// The number of records in ordinary buckets, and their memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    pub(crate) records: usize,
    pub(crate) bytes: usize,
}

/// The values of a bucket that the state aggregates over all buckets.
#[derive(Debug, Clone, Copy, Default)]
struct BucketSummary {
    expiry: Option<u64>,
    totals: Totals,
}

impl BucketSummary {
    fn of(bucket: &Bucket) -> Self {
        Self { expiry: bucket.next_expiry(), totals: Totals { records: bucket.len(), bytes: bucket.bytes() } }
    }
}

impl Default for State {
    fn default() -> Self {
        let mut state = Self {
            buckets: OrdMap::new(),
            names: OrdMap::new(),
            system: OrdMap::new(),
            next_index: 0,
            expiries: OrdSet::new(),
            referring: OrdMap::new(),
            totals: Totals::default(),
        };
        for (name, definition) in catalog::internal_buckets() {
            let bucket = Bucket::new(definition);
            let bucket = if name == REPLIES { bucket.with_owners(replies::user_of) } else { bucket };
            state.put_bucket(name.into(), bucket, false);
        }
        state
    }
}

impl State {
    /// Returns a state without ordinary buckets.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns an ordinary bucket. For system buckets see [`system_bucket`](Self::system_bucket).
    pub fn bucket(&self, name: &str) -> Result<&Bucket, StoreError> {
        let installed = if self.is_hidden(name) { None } else { self.buckets.get(name) };
        installed.map(|installed| &*installed.bucket).ok_or_else(|| not_defined(name))
    }

    /// Returns a system bucket, if the program has declared it: see
    /// [`StoreOptions::system_buckets`](crate::StoreOptions::system_buckets).
    pub fn system_bucket(&self, name: &str) -> Result<&Bucket, StoreError> {
        let installed = if self.system.get(name) == Some(&true) { self.buckets.get(name) } else { None };
        installed.map(|installed| &*installed.bucket).ok_or_else(|| not_defined(name))
    }

    /// Returns whether the name is that of an internal or system bucket, which ordinary requests cannot access.
    pub(crate) fn is_hidden(&self, name: &str) -> bool {
        catalog::is_internal(name) || name.starts_with('_') && self.system.contains_key(name)
    }

    /// Returns the names of all ordinary buckets, in the order of definition.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.names.values().map(|name| &**name)
    }

    /// Returns all ordinary buckets, in the order of definition.
    pub fn buckets(&self) -> impl Iterator<Item = (&str, &Bucket)> {
        self.names.values().filter_map(|name| self.named(name))
    }

    fn named<'a>(&'a self, name: &'a str) -> Option<(&'a str, &'a Bucket)> {
        #[cfg(test)]
        visits::count();
        Some((name, &*self.buckets.get(name)?.bucket))
    }

    /// Returns the records and bytes of all ordinary buckets.
    pub(crate) fn totals(&self) -> Totals {
        self.totals
    }

    /// Returns a bucket of any kind.
    pub(crate) fn any_bucket(&self, name: &str) -> Result<(&Arc<str>, &Bucket), StoreError> {
        let found = self.buckets.get_key_value(name).map(|(name, installed)| (name, &*installed.bucket));
        found.ok_or_else(|| not_defined(name))
    }

    /// Changes a bucket of any kind.
    pub(crate) fn change_bucket<T>(
        &mut self,
        name: &str,
        work: impl FnOnce(&mut Bucket) -> T,
    ) -> Result<T, StoreError> {
        let installed = self.buckets.get_mut(name).ok_or_else(|| not_defined(name))?;
        let bucket = Arc::make_mut(&mut installed.bucket);
        let before = BucketSummary::of(bucket);
        let done = work(bucket);
        let (after, is_ordinary) = (BucketSummary::of(bucket), installed.is_ordinary);
        self.update_aggregates(name, is_ordinary, before, after);
        Ok(done)
    }

    fn update_aggregates(&mut self, name: &str, is_ordinary: bool, before: BucketSummary, after: BucketSummary) {
        if is_ordinary {
            let Totals { records, bytes } = &mut self.totals;
            *records = *records - before.totals.records + after.totals.records;
            *bytes = *bytes - before.totals.bytes + after.totals.bytes;
        }
        if before.expiry != after.expiry {
            let name: Arc<str> = name.into();
            if let Some(expiry) = before.expiry {
                self.expiries.remove(&(expiry, Arc::clone(&name)));
            }
            if let Some(expiry) = after.expiry {
                self.expiries.insert((expiry, name));
            }
        }
    }

    /// Returns the earliest expiry of a record of any bucket.
    pub(crate) fn next_expiry(&self) -> Option<u64> {
        self.expiries.get_min().map(|(expiry, _)| *expiry)
    }

    /// Returns the names of the buckets with records that have expired at that time.
    pub(crate) fn expired(&self, now: u64) -> impl Iterator<Item = &Arc<str>> {
        self.expiries.iter().take_while(move |(expiry, _)| *expiry <= now).map(|(_, name)| name)
    }

    /// Returns all buckets, internal ones first, so that definitions precede the records of their buckets.
    pub(crate) fn all_buckets(&self) -> impl Iterator<Item = (&str, &Bucket)> {
        let own = catalog::internal_buckets().filter_map(|(name, _)| self.named(name));
        own.chain(self.system_buckets()).chain(self.buckets())
    }

    /// Returns all system buckets by name, including those that the program does not declare.
    pub(crate) fn system_buckets(&self) -> impl Iterator<Item = (&str, &Bucket)> {
        self.system.keys().filter_map(|name| self.named(name))
    }

    /// Returns the buckets with fields that refer to this one, in the order of definition. System buckets refer only to system
    /// buckets, and ordinary buckets to ordinary buckets.
    pub(crate) fn referring(&self, target: &str) -> impl Iterator<Item = (&str, &Bucket)> {
        let is_system = self.system.contains_key(target);
        let is_internal = !is_system && catalog::is_internal(target);
        let names = if is_internal { None } else { self.referring.get(target) };
        let is_peer = move |name: &&Arc<str>| self.system.contains_key(&**name) == is_system;
        names.into_iter().flat_map(OrdMap::values).filter(is_peer).filter_map(|name| self.named(name))
    }

    /// Adds or replaces a system bucket.
    pub(crate) fn install_system(&mut self, name: &str, bucket: Bucket, is_declared: bool) {
        let name: Arc<str> = name.into();
        self.system.insert(Arc::clone(&name), is_declared);
        self.put_bucket(name, bucket, false);
    }

    /// Adds or replaces an ordinary bucket.
    pub(crate) fn install(&mut self, name: &str, bucket: Bucket) {
        let name: Arc<str> = name.into();
        let index = self.put_bucket(Arc::clone(&name), bucket, true);
        self.names.insert(index, name);
    }

    /// Adds an empty bucket with this definition.
    pub(crate) fn install_new(&mut self, name: &str, definition: BucketDefinition) {
        self.install(name, Bucket::new(Arc::new(definition)));
    }

    /// Removes a bucket with all its records.
    pub(crate) fn uninstall(&mut self, name: &str) {
        if let Some(index) = self.remove_bucket(name) {
            self.names.remove(&index);
        }
        self.system.remove(name);
    }

    /// Panics if the maintained values differ from those computed from all buckets.
    #[cfg(test)]
    pub(crate) fn check_aggregates(&self) {
        let all = || self.buckets.iter().map(|(name, installed)| (Arc::clone(name), installed));
        let expiries = all().filter_map(|(name, installed)| Some((installed.bucket.next_expiry()?, name)));
        assert_eq!(self.expiries, expiries.collect());
        let mut referring: OrdMap<Arc<str>, OrdMap<DefinitionIndex, Arc<str>>> = OrdMap::new();
        for (name, installed) in all() {
            for target in targets(&installed.bucket) {
                referring.entry(target.into()).or_default().insert(installed.index, Arc::clone(&name));
            }
        }
        assert_eq!(self.referring, referring);
        let (records, bytes) = self
            .buckets()
            .fold((0, 0), |(records, bytes), (_, bucket)| (records + bucket.len(), bytes + bucket.bytes()));
        assert_eq!(self.totals, Totals { records, bytes });
        assert!(self.names.iter().all(|(index, name)| self.buckets[name].index == *index));
    }

    /// Adds or replaces a bucket, and updates the aggregated values. Returns its index.
    fn put_bucket(&mut self, name: Arc<str>, bucket: Bucket, is_ordinary: bool) -> DefinitionIndex {
        let index = self.remove_bucket(&name).unwrap_or(self.next_index);
        self.next_index = self.next_index.max(index + 1);
        for target in targets(&bucket) {
            self.referring.entry(target.into()).or_default().insert(index, Arc::clone(&name));
        }
        self.update_aggregates(&name, is_ordinary, BucketSummary::default(), BucketSummary::of(&bucket));
        self.buckets.insert(name, InstalledBucket { bucket: Arc::new(bucket), index, is_ordinary });
        index
    }

    /// Removes a bucket and updates the aggregated values. Returns its index.
    fn remove_bucket(&mut self, name: &str) -> Option<DefinitionIndex> {
        let InstalledBucket { bucket, index, is_ordinary } = self.buckets.remove(name)?;
        for target in targets(&bucket) {
            if let Some(referring) = self.referring.get_mut(target) {
                referring.remove(&index);
                if referring.is_empty() {
                    self.referring.remove(target);
                }
            }
        }
        self.update_aggregates(name, is_ordinary, BucketSummary::of(&bucket), BucketSummary::default());
        Some(index)
    }
}

/// Returns the names of the buckets that fields of this one refer to.
fn targets(bucket: &Bucket) -> impl Iterator<Item = &str> {
    bucket.definition().fields.iter().filter_map(|(_, rule)| Some(&*rule.reference.as_ref()?.bucket))
}

fn not_defined(name: &str) -> StoreError {
    StoreError::BucketNotDefined { bucket: name.to_owned() }
}

/// Counts the buckets that iterations of this thread visit.
#[cfg(test)]
pub(crate) mod visits {
    use std::cell::Cell;

    thread_local! {
        static VISITS: Cell<usize> = const { Cell::new(0) };
    }

    pub(crate) fn count() {
        VISITS.set(VISITS.get() + 1);
    }

    pub(crate) fn total() -> usize {
        VISITS.get()
    }
}
