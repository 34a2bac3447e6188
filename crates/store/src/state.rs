//! A state: all buckets at one moment.

use std::sync::Arc;

use imbl::{OrdMap, Vector};

use crate::catalog;
use crate::{Bucket, BucketDefinition, StoreError};

/// All buckets at one moment. A clone shares everything, so a reader keeps its state while the next one is made.
#[derive(Debug, Clone)]
pub struct State {
    /// All of them: those of the store itself, system buckets and ordinary ones.
    buckets: OrdMap<Arc<str>, Arc<Bucket>>,
    /// The names of the ordinary ones, in the order in which they were defined.
    names: Vector<Arc<str>>,
    /// The names of system buckets, and whether the program declares them.
    system: OrdMap<Arc<str>, bool>,
}

impl Default for State {
    fn default() -> Self {
        let own = catalog::own_buckets();
        let buckets = own.map(|(name, definition)| (Arc::from(name), Arc::new(Bucket::new(definition)))).collect();
        Self { buckets, names: Vector::new(), system: OrdMap::new() }
    }
}

impl State {
    /// Without any bucket.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the bucket of that name. System buckets are not found: see [`system_bucket`](Self::system_bucket).
    pub fn bucket(&self, name: &str) -> Result<&Bucket, StoreError> {
        let bucket = if self.is_hidden(name) { None } else { self.buckets.get(name) };
        bucket.map(|bucket| &**bucket).ok_or_else(|| StoreError::BucketNotDefined { bucket: name.to_owned() })
    }

    /// Returns the system bucket of that name, if the program has declared it: see
    /// [`StoreOptions::system_buckets`](crate::StoreOptions::system_buckets).
    pub fn system_bucket(&self, name: &str) -> Result<&Bucket, StoreError> {
        let bucket = if self.system.get(name) == Some(&true) { self.buckets.get(name) } else { None };
        bucket.map(|bucket| &**bucket).ok_or_else(|| StoreError::BucketNotDefined { bucket: name.to_owned() })
    }

    /// Whether ordinary requests do not find a bucket of that name: it is the store's own, or a system bucket.
    pub(crate) fn is_hidden(&self, name: &str) -> bool {
        catalog::is_own(name) || name.starts_with('_') && self.system.contains_key(name)
    }

    /// The names of all ordinary buckets, in the order in which they were defined.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.names.iter().map(|name| &**name)
    }

    /// All ordinary buckets, in the order in which they were defined.
    pub fn buckets(&self) -> impl Iterator<Item = (&str, &Bucket)> {
        self.names.iter().filter_map(|name| Some((&**name, &**self.buckets.get(name)?)))
    }

    /// One of all buckets, those of the store included.
    pub(crate) fn any(&self, name: &str) -> Result<(&Arc<str>, &Bucket), StoreError> {
        let found = self.buckets.get_key_value(name).map(|(name, bucket)| (name, &**bucket));
        found.ok_or_else(|| StoreError::BucketNotDefined { bucket: name.to_owned() })
    }

    pub(crate) fn any_mut(&mut self, name: &str) -> Result<&mut Bucket, StoreError> {
        let bucket = self.buckets.get_mut(name).map(Arc::make_mut);
        bucket.ok_or_else(|| StoreError::BucketNotDefined { bucket: name.to_owned() })
    }

    /// All buckets: first those of the store, so that a reader of rows in this order knows the definitions first.
    pub(crate) fn all(&self) -> impl Iterator<Item = (&str, &Bucket)> {
        let own = catalog::own_buckets().filter_map(|(name, _)| Some((name, &**self.buckets.get(name)?)));
        own.chain(self.system_buckets()).chain(self.buckets())
    }

    /// All system buckets, by name, also those that the program does not declare.
    pub(crate) fn system_buckets(&self) -> impl Iterator<Item = (&str, &Bucket)> {
        self.system.keys().filter_map(|name| Some((&**name, &**self.buckets.get(name)?)))
    }

    /// The buckets whose records may refer to records of this one: system buckets refer to system buckets, ordinary ones to
    /// ordinary ones, and none to those of the store.
    pub(crate) fn peers(&self, name: &str) -> impl Iterator<Item = (&str, &Bucket)> {
        let is_system = self.system.contains_key(name);
        let is_ordinary = !is_system && !catalog::is_own(name);
        let all_if = |is_wanted: bool| if is_wanted { usize::MAX } else { 0 };
        self.system_buckets().take(all_if(is_system)).chain(self.buckets().take(all_if(is_ordinary)))
    }

    /// Puts a system bucket in place: a new one, or one in place of another.
    pub(crate) fn install_system(&mut self, name: &str, bucket: Bucket, is_declared: bool) {
        let name: Arc<str> = name.into();
        self.buckets.insert(Arc::clone(&name), Arc::new(bucket));
        self.system.insert(name, is_declared);
    }

    /// Puts an ordinary bucket in place: a new one, or one in place of another.
    pub(crate) fn install(&mut self, name: &str, bucket: Bucket) {
        let name: Arc<str> = name.into();
        if self.buckets.insert(Arc::clone(&name), Arc::new(bucket)).is_none() {
            self.names.push_back(name);
        }
    }

    /// An empty bucket of that definition.
    pub(crate) fn install_new(&mut self, name: &str, definition: BucketDefinition) {
        self.install(name, Bucket::new(Arc::new(definition)));
    }

    /// Takes a bucket away, with all that is in it.
    pub(crate) fn uninstall(&mut self, name: &str) {
        self.buckets.remove(name);
        self.system.remove(name);
        self.names.retain(|known| **known != *name);
    }
}
