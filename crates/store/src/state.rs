//! All buckets at one moment.

use std::sync::Arc;

use imbl::{OrdMap, Vector};

use crate::{Bucket, BucketDefinition, Row, StoreError, Value};

/// All buckets at one moment. A clone shares everything, so a reader keeps the one that it was given while the next is made.
#[derive(Debug, Clone, Default)]
pub struct State {
    buckets: OrdMap<Arc<str>, Bucket>,
    /// Their names, in the order in which they were defined.
    names: Vector<Arc<str>>,
}

impl State {
    /// Without any bucket.
    pub fn new() -> Self {
        Self::default()
    }

    /// The bucket of that name.
    pub fn bucket(&self, name: &str) -> Result<&Bucket, StoreError> {
        self.buckets.get(name).ok_or_else(|| StoreError::BucketNotDefined { bucket: name.to_owned() })
    }

    pub(crate) fn bucket_mut(&mut self, name: &str) -> Result<&mut Bucket, StoreError> {
        self.buckets.get_mut(name).ok_or_else(|| StoreError::BucketNotDefined { bucket: name.to_owned() })
    }

    /// The names of all buckets, in the order in which they were defined.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.names.iter().map(|name| &**name)
    }

    pub(crate) fn buckets(&self) -> impl Iterator<Item = (&str, &Bucket)> {
        self.names.iter().filter_map(|name| Some((&**name, self.buckets.get(name)?)))
    }

    /// Defines a bucket.
    pub fn define(&mut self, name: &str, definition: BucketDefinition) -> Result<(), StoreError> {
        if self.buckets.contains_key(name) {
            return Err(StoreError::BucketExists { bucket: name.to_owned() });
        }
        let name: Arc<str> = name.into();
        self.buckets.insert(Arc::clone(&name), Bucket::new(Arc::new(definition)));
        self.names.push_back(name);
        Ok(())
    }

    /// Drops a bucket and all that is in it.
    pub fn drop_bucket(&mut self, name: &str) -> Result<(), StoreError> {
        self.bucket(name)?;
        self.buckets.remove(name);
        self.names.retain(|known| **known != *name);
        Ok(())
    }

    /// A record that has not expired by then.
    pub fn get(&self, bucket: &str, key: &Value<'_>, now: u64) -> Result<Option<&Row>, StoreError> {
        let bucket = self.bucket(bucket)?;
        Ok(bucket.get(key).filter(|row| bucket.is_live(row, now)))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn buckets_are_named_in_order_and_dropped_with_all_that_is_in_them() {
        let definition =
            || BucketDefinition::parse(&json!({"key": "id", "schema": {"id": {"type": "number"}}})).unwrap();
        let mut state = State::new();
        for name in ["c", "a", "b"] {
            state.define(name, definition()).unwrap();
        }
        assert_eq!(state.define("a", definition()), Err(StoreError::BucketExists { bucket: "a".to_owned() }));
        let row = Row::new(json!({"id": 1}).as_object().unwrap()).unwrap();
        state.bucket_mut("a").unwrap().put(row).unwrap();
        let before = state.clone();
        state.drop_bucket("a").unwrap();
        assert_eq!(state.names().collect::<Vec<_>>(), ["c", "b"]);
        assert_eq!(state.drop_bucket("a"), Err(StoreError::BucketNotDefined { bucket: "a".to_owned() }));
        state.define("a", definition()).unwrap();
        assert!(state.bucket("a").unwrap().is_empty());
        assert_eq!(before.bucket("a").unwrap().len(), 1, "a clone is as it was");
    }
}
