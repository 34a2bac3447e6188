//! Errors of reads and writes.

use std::fmt::{self, Write};
use std::time::Duration;

use serde_json::Value as Json;

use crate::RowError;
use crate::query::{Exceeded, QueryError};
use crate::schema::{DefinitionError, NotUnique, ValidationError};
use crate::transaction::TransactionError;

/// Why an operation was refused. The state is unchanged.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// There is no such bucket.
    #[error("bucket \"{bucket}\" is not defined")]
    BucketNotDefined {
        /// What it was called.
        bucket: String,
    },
    /// There is such a bucket already.
    #[error("bucket \"{bucket}\" is defined already")]
    BucketExists {
        /// What it is called.
        bucket: String,
    },
    /// A bucket cannot be dropped, because fields of other buckets refer to it.
    #[error("bucket \"{bucket}\" is referred to by {}; drop those buckets first", list(by, *others))]
    BucketReferenced {
        /// The bucket.
        bucket: String,
        /// The fields that refer to it, at most [`MAX_REFERRERS`](Referrer::MAX_REFERRERS) of them.
        by: Vec<Referrer>,
        /// The number of fields that are not listed.
        others: usize,
    },
    /// There is no such named query.
    #[error("query \"{query}\" is not defined")]
    QueryNotDefined {
        /// What it was called.
        query: String,
    },
    /// There is such a named query already.
    #[error("query \"{query}\" is defined already")]
    QueryExists {
        /// What it is called.
        query: String,
    },
    /// A bucket or query cannot be called that.
    #[error(
        "\"{name}\" cannot be a name: expected 1 to {max} bytes that do not begin with `$` and do not name a system bucket"
    )]
    Name {
        /// How it begins.
        name: String,
        /// The bytes it may have.
        max: usize,
    },
    /// There are enough definitions.
    #[error("{max} are defined already, and there may be no more")]
    TooManyDefinitions {
        /// How many there may be.
        max: usize,
    },
    /// There is no such record.
    #[error("there is no record {key} in bucket \"{bucket}\"")]
    NotFound {
        /// The bucket.
        bucket: String,
        /// The key that it was asked for.
        key: Json,
    },
    /// A record has another version than expected.
    #[error("record {key} in bucket \"{bucket}\" has version {current}")]
    Conflict {
        /// The bucket.
        bucket: String,
        /// Its key.
        key: Json,
        /// The version that it has.
        current: u64,
    },
    /// A record is not what its bucket's schema says.
    #[error(transparent)]
    Validation(#[from] ValidationError),
    /// A definition is wrong.
    #[error(transparent)]
    Definition(#[from] DefinitionError),
    /// A query is wrong.
    #[error(transparent)]
    Query(#[from] QueryError),
    /// Two records of a bucket would have the same value in a unique field.
    #[error("bucket \"{bucket}\": {source}")]
    NotUnique {
        /// The bucket.
        bucket: String,
        /// Which field and value.
        source: NotUnique,
    },
    /// A record is too large.
    #[error(transparent)]
    Row(#[from] RowError),
    /// A record may not be written as it is or would be.
    #[error("a record of bucket \"{bucket}\" may not be written as it is or would be: a permission does not reach it")]
    Forbidden {
        /// The bucket.
        bucket: String,
    },
    /// A key for a write that may be sent again has come with another request.
    #[error("the idempotency key \"{key}\" was used for another request")]
    KeyReused {
        /// The key.
        key: String,
    },
    /// A reply is too long to be remembered.
    #[error("the reply has {len} bytes, and at most {max} are remembered: send it without an idempotency key")]
    LongReply {
        /// The bytes it has.
        len: usize,
        /// The bytes it may have.
        max: usize,
    },
    /// The records of the store would grow beyond their limit: see
    /// [`Limits::max_store_bytes`](crate::Limits::max_store_bytes).
    #[error(
        "the store is full: its records would take {bytes} bytes, and the limit is {max}; delete records or raise the limit"
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
        /// The place of the record in the list, from zero.
        index: usize,
        /// Why not.
        source: Box<StoreError>,
    },
    /// The reads of a write examine too much. All other writes wait for it, so they are limited.
    #[error("the reads of a write may take {} ms, and bucket \"{bucket}\" takes longer: {}", max.as_millis(), advice(missing_index.as_deref()))]
    LongRead {
        /// The bucket.
        bucket: String,
        /// The time that they may take, by an estimate from what they examine.
        max: Duration,
        /// A field whose index would help.
        missing_index: Option<String>,
    },
    /// A read has reached another limit.
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
