//! All buckets at one moment.

use std::sync::Arc;

use imbl::{OrdMap, Vector};

use crate::catalog;
use crate::{Bucket, BucketDefinition, Row, StoreError, Value};

/// All buckets at one moment. A clone shares everything, so a reader keeps the one that it was given while the next is made.
#[derive(Debug, Clone)]
pub struct State {
    /// Those of the store itself have names that begin with `$`.
    buckets: OrdMap<Arc<str>, Arc<Bucket>>,
    /// The names of the others, in the order in which they were defined.
    names: Vector<Arc<str>>,
}

impl Default for State {
    fn default() -> Self {
        let own = catalog::own_buckets();
        let buckets = own.map(|(name, definition)| (Arc::from(name), Arc::new(Bucket::new(definition)))).collect();
        Self { buckets, names: Vector::new() }
    }
}

impl State {
    /// Without any bucket.
    pub fn new() -> Self {
        Self::default()
    }

    /// The bucket of that name.
    pub fn bucket(&self, name: &str) -> Result<&Bucket, StoreError> {
        let bucket = if catalog::is_own(name) { None } else { self.buckets.get(name) };
        bucket.map(|bucket| &**bucket).ok_or_else(|| StoreError::BucketNotDefined { bucket: name.to_owned() })
    }

    /// The names of all buckets, in the order in which they were defined.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.names.iter().map(|name| &**name)
    }

    /// All buckets, in the order in which they were defined.
    pub fn buckets(&self) -> impl Iterator<Item = (&str, &Bucket)> {
        self.names.iter().filter_map(|name| Some((&**name, &**self.buckets.get(name)?)))
    }

    /// A record that has not expired by then.
    pub fn get(&self, bucket: &str, key: &Value<'_>, now: u64) -> Result<Option<&Row>, StoreError> {
        let bucket = self.bucket(bucket)?;
        Ok(bucket.get(key).filter(|row| bucket.is_live(row, now)))
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

    /// All buckets: first those of the store, so that whoever reads rows in this order knows the definitions first.
    pub(crate) fn all(&self) -> impl Iterator<Item = (&str, &Bucket)> {
        let own = catalog::own_buckets().filter_map(|(name, _)| Some((name, &**self.buckets.get(name)?)));
        own.chain(self.buckets())
    }

    /// Puts a bucket in place: a new one, or one in place of another.
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
        self.names.retain(|known| **known != *name);
    }
}
