//! Errors of reads and writes.

use std::fmt::{self, Write};
use std::time::Duration;

use serde_json::Value as Json;

use crate::RowError;
use crate::query::{Exceeded, QueryError};
use crate::schema::{DefinitionError, NotUnique, ValidationError};
use crate::transaction::TransactionError;

/// An error of a rejected operation. The state is unchanged.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The bucket is not defined.
    #[error("bucket \"{bucket}\" is not defined")]
    BucketNotDefined {
        /// The name of the bucket.
        bucket: String,
    },
    /// A bucket with this name is already defined.
    #[error("bucket \"{bucket}\" is already defined")]
    BucketExists {
        /// The name of the bucket.
        bucket: String,
    },
    /// A bucket cannot be dropped, because fields of other buckets refer to it.
    #[error("bucket \"{bucket}\" is referenced by {}; drop those buckets first", list(by, *others))]
    BucketReferenced {
        /// The bucket.
        bucket: String,
        /// The fields that refer to the bucket, at most [`MAX_REFERRERS`](Referrer::MAX_REFERRERS) of them.
        by: Vec<Referrer>,
        /// The number of fields that are not listed.
        others: usize,
    },
    /// The named query is not defined.
    #[error("query \"{query}\" is not defined")]
    QueryNotDefined {
        /// The name of the query.
        query: String,
    },
    /// A query with this name is already defined.
    #[error("query \"{query}\" is already defined")]
    QueryExists {
        /// The name of the query.
        query: String,
    },
    /// The name of a bucket or query is invalid.
    #[error(
        "invalid name \"{name}\": expected 1 to {max} bytes that do not begin with `$` and do not name a system bucket"
    )]
    Name {
        /// The first characters of the name.
        name: String,
        /// Limit of the length of a name in bytes.
        max: usize,
    },
    /// The limit of definitions is reached.
    #[error("too many definitions: the limit is {max}; drop one, or raise the limit")]
    TooManyDefinitions {
        /// The limit.
        max: usize,
    },
    /// The record does not exist.
    #[error("record {key} not found in bucket \"{bucket}\"")]
    NotFound {
        /// The bucket.
        bucket: String,
        /// The key of the record.
        key: Json,
    },
    /// The record does not have the expected version.
    #[error("version conflict: record {key} in bucket \"{bucket}\" has version {current}")]
    Conflict {
        /// The bucket.
        bucket: String,
        /// The key of the record.
        key: Json,
        /// The version of the record.
        current: u64,
    },
    /// A record does not match the schema of its bucket.
    #[error(transparent)]
    Validation(#[from] ValidationError),
    /// The definition is invalid.
    #[error(transparent)]
    Definition(#[from] DefinitionError),
    /// The query is invalid.
    #[error(transparent)]
    Query(#[from] QueryError),
    /// Two records of a bucket would have the same value in a unique field.
    #[error("bucket \"{bucket}\": {source}")]
    NotUnique {
        /// The bucket.
        bucket: String,
        /// The field and the value.
        source: NotUnique,
    },
    /// A record is too large.
    #[error(transparent)]
    Row(#[from] RowError),
    /// A record does not match the [row filter](crate::Draft::with_row_filter) of the write, before or after it.
    #[error("permission denied: the write affects a record of bucket \"{bucket}\" that the caller may not write")]
    Forbidden {
        /// The bucket.
        bucket: String,
    },
    /// The idempotency key was already used for another request.
    #[error("idempotency key \"{key}\" was already used for another request")]
    KeyReused {
        /// The key.
        key: String,
    },
    /// The reply is too large to be stored for an idempotency key.
    #[error("the reply of {len} bytes exceeds the limit of {max} for idempotency keys; retry without a key")]
    LongReply {
        /// The length of the reply in bytes.
        len: usize,
        /// The limit.
        max: usize,
    },
    /// The records of the store would grow beyond the limit: see
    /// [`Limits::max_store_bytes`](crate::Limits::max_store_bytes).
    #[error(
        "the store is full: its records would take {bytes} bytes, the limit is {max}; delete records or raise the limit"
    )]
    StoreFull {
        /// The bytes of all records after the write.
        bytes: usize,
        /// The limit.
        max: usize,
    },
    /// One of several records could not be written.
    #[error("data[{index}]: {source}")]
    Record {
        /// The index of the record in the list.
        index: usize,
        /// The error.
        source: Box<StoreError>,
    },
    /// The reads of a write examine too many records. They are limited because all other writes wait for them.
    #[error("the reads of the write exceed the limit of {} ms in bucket \"{bucket}\": {}", max.as_millis(), advice(missing_index.as_deref()))]
    LongRead {
        /// The bucket.
        bucket: String,
        /// The limit of the time of the reads, which is estimated from the examined records.
        max: Duration,
        /// A field whose index would make the read faster.
        missing_index: Option<String>,
    },
    /// A read exceeded another limit of its budget.
    #[error(transparent)]
    Exceeded(#[from] Exceeded),
    /// An operation of a transaction failed.
    #[error(transparent)]
    Transaction(#[from] TransactionError),
}

/// A field that refers to records of another bucket.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Referrer {
    /// The bucket of the field.
    pub bucket: String,
    /// The field.
    pub field: String,
}

impl Referrer {
    /// Limit of the referrers that an error lists.
    pub const MAX_REFERRERS: usize = 20;
}

impl fmt::Display for Referrer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\" (field {})", self.bucket, self.field)
    }
}

fn advice(missing_index: Option<&str>) -> String {
    match missing_index {
        Some(field) => format!("define an index on \"{field}\", or read before the transaction"),
        None => "use a filter that an index can serve, or read before the transaction".to_owned(),
    }
}

fn list(by: &[Referrer], others: usize) -> String {
    let mut text = by.iter().map(Referrer::to_string).collect::<Vec<_>>().join(", ");
    if others > 0 {
        // Writing to a string does not fail.
        let _ = write!(text, " and {others} other fields");
    }
    text
}
