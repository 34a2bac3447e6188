//! A state: all buckets at one moment.
//!
//! A write costs what it touches, however many buckets there are. The state therefore keeps what would otherwise be found by
//! visiting all buckets: which of them have records that expire, which of them refer to which, and totals. All parts are
//! persistent, so a snapshot has its own and undoing a write restores them.

use std::sync::Arc;

use imbl::{OrdMap, OrdSet};

use crate::catalog::{self, REPLIES};
use crate::replies;
use crate::schema::BucketDefinition;
use crate::{Bucket, StoreError};

/// All buckets at one moment. A clone shares everything, so a reader keeps its state while the next one is made.
#[derive(Debug, Clone)]
pub struct State {
    /// All of them: internal, system and ordinary buckets.
    buckets: OrdMap<Arc<str>, Installed>,
    /// The names of the ordinary ones, in the order in which they were defined.
    names: OrdMap<Place, Arc<str>>,
    /// The names of system buckets, and whether the program declares them.
    system: OrdMap<Arc<str>, bool>,
    next_place: Place,
    /// The first expiry of each bucket that has records that expire.
    expiries: OrdSet<(u64, Arc<str>)>,
    /// The names of buckets with fields that refer to a bucket, by the name of that bucket, in the order of definition.
    referring: OrdMap<Arc<str>, OrdMap<Place, Arc<str>>>,
    /// The sum over ordinary buckets.
    totals: Totals,
}

/// The place of a bucket in the order of definition.
type Place = u64;

#[derive(Debug, Clone)]
struct Installed {
    bucket: Arc<Bucket>,
    place: Place,
    is_ordinary: bool,
}

/// The number of records in ordinary buckets, and their memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    pub(crate) records: usize,
    pub(crate) bytes: usize,
}

/// The parts of a bucket that the state keeps account of.
#[derive(Debug, Clone, Copy, Default)]
struct Account {
    expiry: Option<u64>,
    totals: Totals,
}

impl Account {
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
            next_place: 0,
            expiries: OrdSet::new(),
            referring: OrdMap::new(),
            totals: Totals::default(),
        };
        for (name, definition) in catalog::internal_buckets() {
            let bucket = Bucket::new(definition);
            let bucket = if name == REPLIES { bucket.with_owners(replies::user_of) } else { bucket };
            state.put(name.into(), bucket, false);
        }
        state
    }
}

impl State {
    /// Returns a state without ordinary buckets.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the bucket of that name. System buckets are not found: see [`system_bucket`](Self::system_bucket).
    pub fn bucket(&self, name: &str) -> Result<&Bucket, StoreError> {
        let installed = if self.is_hidden(name) { None } else { self.buckets.get(name) };
        installed.map(|installed| &*installed.bucket).ok_or_else(|| not_defined(name))
    }

    /// Returns the system bucket of that name, if the program has declared it: see
    /// [`StoreOptions::system_buckets`](crate::StoreOptions::system_buckets).
    pub fn system_bucket(&self, name: &str) -> Result<&Bucket, StoreError> {
        let installed = if self.system.get(name) == Some(&true) { self.buckets.get(name) } else { None };
        installed.map(|installed| &*installed.bucket).ok_or_else(|| not_defined(name))
    }

    /// Whether ordinary requests do not find a bucket of that name: it is internal, or a system bucket.
    pub(crate) fn is_hidden(&self, name: &str) -> bool {
        catalog::is_internal(name) || name.starts_with('_') && self.system.contains_key(name)
    }

    /// The names of all ordinary buckets, in the order in which they were defined.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.names.values().map(|name| &**name)
    }

    /// All ordinary buckets, in the order in which they were defined.
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
    pub(crate) fn any(&self, name: &str) -> Result<(&Arc<str>, &Bucket), StoreError> {
        let found = self.buckets.get_key_value(name).map(|(name, installed)| (name, &*installed.bucket));
        found.ok_or_else(|| not_defined(name))
    }

    /// Changes a bucket of any kind.
    pub(crate) fn change<T>(&mut self, name: &str, work: impl FnOnce(&mut Bucket) -> T) -> Result<T, StoreError> {
        let installed = self.buckets.get_mut(name).ok_or_else(|| not_defined(name))?;
        let bucket = Arc::make_mut(&mut installed.bucket);
        let before = Account::of(bucket);
        let done = work(bucket);
        let (after, is_ordinary) = (Account::of(bucket), installed.is_ordinary);
        self.account(name, is_ordinary, before, after);
        Ok(done)
    }

    fn account(&mut self, name: &str, is_ordinary: bool, before: Account, after: Account) {
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

    /// Returns when the first record of any bucket expires.
    pub(crate) fn next_expiry(&self) -> Option<u64> {
        self.expiries.get_min().map(|(expiry, _)| *expiry)
    }

    /// The names of the buckets with records that have expired by then.
    pub(crate) fn expired(&self, now: u64) -> impl Iterator<Item = &Arc<str>> {
        self.expiries.iter().take_while(move |(expiry, _)| *expiry <= now).map(|(_, name)| name)
    }

    /// All buckets: internal ones first, so that a reader of rows in this order gets the definitions first.
    pub(crate) fn all(&self) -> impl Iterator<Item = (&str, &Bucket)> {
        let own = catalog::internal_buckets().filter_map(|(name, _)| self.named(name));
        own.chain(self.system_buckets()).chain(self.buckets())
    }

    /// All system buckets, by name, also those that the program does not declare.
    pub(crate) fn system_buckets(&self) -> impl Iterator<Item = (&str, &Bucket)> {
        self.system.keys().filter_map(|name| self.named(name))
    }

    /// The buckets with fields that refer to this one, in the order of definition. System buckets refer to system buckets,
    /// ordinary ones to ordinary ones, and none to internal ones.
    pub(crate) fn referring(&self, target: &str) -> impl Iterator<Item = (&str, &Bucket)> {
        let is_system = self.system.contains_key(target);
        let is_own = !is_system && catalog::is_internal(target);
        let names = if is_own { None } else { self.referring.get(target) };
        let is_peer = move |name: &&Arc<str>| self.system.contains_key(&**name) == is_system;
        names.into_iter().flat_map(OrdMap::values).filter(is_peer).filter_map(|name| self.named(name))
    }

    /// Installs a system bucket: a new one, or one that replaces another.
    pub(crate) fn install_system(&mut self, name: &str, bucket: Bucket, is_declared: bool) {
        let name: Arc<str> = name.into();
        self.system.insert(Arc::clone(&name), is_declared);
        self.put(name, bucket, false);
    }

    /// Installs an ordinary bucket: a new one, or one that replaces another.
    pub(crate) fn install(&mut self, name: &str, bucket: Bucket) {
        let name: Arc<str> = name.into();
        let place = self.put(Arc::clone(&name), bucket, true);
        self.names.insert(place, name);
    }

    /// Installs an empty bucket of that definition.
    pub(crate) fn install_new(&mut self, name: &str, definition: BucketDefinition) {
        self.install(name, Bucket::new(Arc::new(definition)));
    }

    /// Removes a bucket with all its records.
    pub(crate) fn uninstall(&mut self, name: &str) {
        if let Some(place) = self.take(name) {
            self.names.remove(&place);
        }
        self.system.remove(name);
    }

    /// Panics if the accounts differ from what a visit of all buckets finds.
    #[cfg(test)]
    pub(crate) fn check_accounts(&self) {
        let all = || self.buckets.iter().map(|(name, installed)| (Arc::clone(name), installed));
        let expiries = all().filter_map(|(name, installed)| Some((installed.bucket.next_expiry()?, name)));
        assert_eq!(self.expiries, expiries.collect());
        let mut referring: OrdMap<Arc<str>, OrdMap<Place, Arc<str>>> = OrdMap::new();
        for (name, installed) in all() {
            for target in targets(&installed.bucket) {
                referring.entry(target.into()).or_default().insert(installed.place, Arc::clone(&name));
            }
        }
        assert_eq!(self.referring, referring);
        let (records, bytes) = self
            .buckets()
            .fold((0, 0), |(records, bytes), (_, bucket)| (records + bucket.len(), bytes + bucket.bytes()));
        assert_eq!(self.totals, Totals { records, bytes });
        assert!(self.names.iter().all(|(place, name)| self.buckets[name].place == *place));
    }

    fn put(&mut self, name: Arc<str>, bucket: Bucket, is_ordinary: bool) -> Place {
        let place = self.take(&name).unwrap_or(self.next_place);
        self.next_place = self.next_place.max(place + 1);
        for target in targets(&bucket) {
            self.referring.entry(target.into()).or_default().insert(place, Arc::clone(&name));
        }
        self.account(&name, is_ordinary, Account::default(), Account::of(&bucket));
        self.buckets.insert(name, Installed { bucket: Arc::new(bucket), place, is_ordinary });
        place
    }

    /// Removes a bucket and all account of it. Returns its place.
    fn take(&mut self, name: &str) -> Option<Place> {
        let Installed { bucket, place, is_ordinary } = self.buckets.remove(name)?;
        for target in targets(&bucket) {
            if let Some(referring) = self.referring.get_mut(target) {
                referring.remove(&place);
                if referring.is_empty() {
                    self.referring.remove(target);
                }
            }
        }
        self.account(name, is_ordinary, Account::of(&bucket), Account::default());
        Some(place)
    }
}

/// The buckets that fields of this one refer to.
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
