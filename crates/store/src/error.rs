//! Why something was not done.

use serde_json::Value as Json;

use crate::{DefinitionError, NotUnique, QueryError, RowError, ValidationError};

/// Why something was not done. Nothing of it has happened.
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
}
