//! JSON buckets with a schema, indexes, queries and transactions, durable by default, at memory speed.

mod bucket;
mod check;
mod draft;
mod engine;
mod error;
mod filter;
mod key;
mod query;
mod row;
mod schema;
mod state;
mod transaction;
mod value;

pub use bucket::{Bucket, NotUnique};
pub use check::{Issue, ValidationError};
pub use draft::{Change, Draft};
pub use engine::{
    Backup, BackupError, Checkpoint, CheckpointError, Commit, Corruption, Cut, Disk, DiskFile, Durability, Embedded,
    EmbeddedOptions, Engine, EngineError, EngineStats, Files, LogPressure, Memory, OpenError, Position, Recovered,
    Recovery, StoredRow, Write, Writes,
};
pub use error::StoreError;
pub use filter::{Comparison, Filter, FilterError, Scalar, Test};
pub use key::IndexKey;
pub use query::{Aggregate, AggregateFunction, Answer, Direction, Query, QueryError};
pub use row::{Field, Row, RowError};
pub use schema::{BucketDefinition, DefinitionError, FieldRule, Format, Generated, Kind, OnDelete, Reference};
pub use state::State;
pub use transaction::{Action, Operation, Problem, TransactionError};
pub use value::Value;
