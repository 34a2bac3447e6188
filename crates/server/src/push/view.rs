//! The rows of the store that a caller may see, for programmatic queries.

use serde_json::{Map, Value as Json};
use tidewire_store::query::Budget;
use tidewire_store::{Filter, Query, QueryOutput, Row, Snapshot};

use crate::RequestError;
use crate::ops::table::OperationId;
use crate::session::caller::Caller;
use crate::session::decision::{Decision, Denial};

/// A snapshot of the store, restricted to the rows that a caller may see, for a [`ProgrammaticQuery`](crate::ProgrammaticQuery).
#[derive(Debug)]
pub struct View<'a> {
    pub(crate) snapshot: &'a Snapshot,
    pub(crate) now: u64,
    pub(crate) caller: &'a Caller,
    /// The name of the programmatic query.
    pub(crate) name: &'a str,
}

impl View<'_> {
    /// Returns the record with this key, if the caller may see it.
    pub fn get(&self, bucket: &str, key: &Json) -> Result<Option<Map<String, Json>>, RequestError> {
        let row_filter = self.row_filter(bucket)?;
        let row = self.snapshot.state.bucket(bucket)?.record(key, || self.now);
        let is_visible = |row: &&Row| row_filter.as_ref().is_none_or(|filter| filter.matches(row));
        Ok(row.filter(is_visible).map(Row::to_record))
    }

    /// Runs a query over the rows that the caller may see.
    pub fn query(&self, config: &Json) -> Result<QueryOutput, RequestError> {
        let query = Query::parse(config).map_err(RequestError::invalid)?;
        let query = match self.row_filter(&query.bucket)? {
            Some(filter) => query.restrict(&filter),
            None => query,
        };
        Ok(query.evaluate(self.snapshot.state.bucket(&query.bucket)?, self.now, &Budget::unlimited())?)
    }

    /// Returns the time in milliseconds since 1970.
    pub fn now(&self) -> u64 {
        self.now
    }

    fn row_filter(&self, bucket: &str) -> Result<Option<Filter>, RequestError> {
        match self.caller.decision(OperationId::subscribe(), Some(bucket), self.name) {
            // Not an error here: the store returns one, because system buckets do not exist for a query.
            Decision::Denied(Denial::SystemBucket) => Ok(None),
            Decision::Allowed(_, row_filter) => Ok(row_filter),
            Decision::Denied(denial) => Err(denial.error(OperationId::subscribe().name, self.name)),
        }
    }
}
