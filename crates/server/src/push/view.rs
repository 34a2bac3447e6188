//! What somebody may see of the store.

use serde_json::{Map, Value as Json};
use tidewire_store::{Answer, Query, Snapshot};

use crate::ops::table::Operation;
use crate::session::caller::Caller;
use crate::{Code, RequestError};

/// What somebody may see of the store at one moment: for queries that are code of the host.
#[derive(Debug)]
pub struct View<'a> {
    pub(crate) snapshot: &'a Snapshot,
    pub(crate) now: u64,
    pub(crate) caller: &'a Caller,
    /// The name of the query.
    pub(crate) name: &'a str,
}

impl View<'_> {
    /// The record with this key, if it may be seen.
    pub fn get(&self, bucket: &str, key: &Json) -> Result<Option<Map<String, Json>>, RequestError> {
        let rows = self.caller.rows(Operation::StoreSubscribe, Some(bucket), self.name)?;
        let row = self.snapshot.state.bucket(bucket)?.record(key, || self.now);
        Ok(row.filter(|row| rows.as_ref().is_none_or(|rows| rows.matches(row))).map(tidewire_store::Row::to_record))
    }

    /// What a query returns, of what may be seen.
    pub fn query(&self, config: &Json) -> Result<Answer, RequestError> {
        let query = Query::parse(config, &Map::new())
            .map_err(|error| RequestError::new(Code::ValidationError, error.to_string()))?;
        let rows = self.caller.rows(Operation::StoreSubscribe, Some(&query.bucket), self.name)?;
        let query = match &rows {
            Some(rows) => query.restrict(rows),
            None => query,
        };
        Ok(query.answer(self.snapshot.state.bucket(&query.bucket)?, self.now))
    }

    /// The time, in milliseconds since 1970.
    pub fn now(&self) -> u64 {
        self.now
    }
}
