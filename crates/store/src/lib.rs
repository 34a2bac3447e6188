//! JSON buckets with a schema, indexes, queries and transactions, at memory speed.
//!
//! A [`Store`] is opened in a directory, or in memory. Reads take its state as it is and never wait; writes are done one after the
//! other, each all or nothing, and answered when they are durable. Followers see every commit, in order.
//!
//! ```
//! use serde_json::json;
//! use tidewire_store::{Answer, Query, Store, StoreOptions};
//!
//! let store = Store::memory(StoreOptions::default());
//! let config = json!({"key": "id", "schema": {"id": {"type": "number"}, "tide": {"type": "string"}}, "indexes": ["tide"]});
//! store.define_bucket("harbours", config).wait()?;
//! for (id, tide) in [(1, "high"), (2, "low"), (3, "high")] {
//!     store.insert("harbours", json!({"id": id, "tide": tide})).wait()?;
//! }
//! let query = Query::parse(&json!({"bucket": "harbours", "filter": {"tide": "high"}, "fields": ["id"]}))?;
//! assert_eq!(store.query(&query)?, Answer::Records(vec![json!({"id": 1}), json!({"id": 3})]));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Underneath, and of use without a store: a [`State`] holds buckets at one moment, a [`Query`] reads them, a [`Draft`] makes the
//! next state out of one, and an [`Engine`] keeps commits: [`Memory`] keeps none, [`Embedded`] keeps them in a log and snapshots
//! in a directory.

mod bucket;
mod budget;
mod catalog;
mod check;
mod draft;
mod engine;
mod error;
mod filter;
mod key;
mod limits;
mod page;
mod query;
mod record;
mod replies;
mod row;
mod schema;
mod state;
mod store;
mod sum;
mod system;
mod transaction;
mod value;

pub use bucket::{Bucket, BucketIdentity, NotUnique};
pub use budget::{Budget, Exceeded};
pub use catalog::{BUCKETS, QUERIES};
pub use check::{Issue, ValidationError};
pub use draft::{Change, Draft, ReferenceFilter};
pub use engine::{
    Backup, BackupError, Cause, Checkpoint, CheckpointError, CopyError, Corruption, Cut, Disk, DiskDir, DiskFile,
    Durability, Embedded, EmbeddedOptions, Engine, EngineError, EngineStats, Files, LogPressure, Memory, OpenError,
    Position, Recovered, Recovery, StoredRow, Write, WriteSet, Writes,
};
pub use error::{Referrer, StoreError};
pub use filter::{Comparison, Filter, FilterError, Parameters, Scalar, Scalars, Test};
pub use key::IndexKey;
pub use limits::Limits;
pub use page::Page;
pub use query::aggregate::Aggregate;
pub use query::answer::Answer;
pub use query::builder::{Direction, Query};
pub use query::{AggregateFunction, QueryError};
pub use record::IntoRecord;
pub use row::{Field, Row, RowError};
pub use schema::{BucketDefinition, DefinitionError, FieldRule, Format, Generated, Kind, OnDelete, Reference};
pub use state::State;
pub use store::{
    BucketList, BucketStats, Clock, Commit, FollowError, Follower, ImportError, ImportProblem, Imported, Pending,
    Snapshot, Store, StoreOpenError, StoreOptions, StoreStats, Unreadable, UpkeepError, WriteError, WriteOptions,
};
pub use sum::Sum;
pub use system::{Incompatibility, SystemBucketError, SystemBuckets};
pub use transaction::{Action, Operation, OperationResult, Problem, TransactionError};
pub use value::Value;
