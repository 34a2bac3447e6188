//! JSON buckets with a schema, indexes, queries and transactions, at memory speed.
//!
//! A [`State`] holds buckets at one moment, a [`Query`] reads them, a [`Draft`] makes the next state out of one. An [`Engine`]
//! keeps commits: [`Memory`] keeps none, [`Embedded`] keeps them in a log and snapshots in a directory.
//!
//! ```
//! use serde_json::json;
//! use tidewire_store::{Answer, BucketDefinition, Draft, Query, State};
//!
//! let mut state = State::new();
//! let definition = json!({"key": "id", "schema": {"id": {"type": "number"}, "tide": {"type": "string"}}, "indexes": ["tide"]});
//! state.define("harbours", BucketDefinition::parse(&definition)?)?;
//!
//! let mut draft = Draft::new(state, 1_700_000_000_000);
//! for (id, tide) in [(1, "high"), (2, "low"), (3, "high")] {
//!     draft.insert("harbours", serde_json::from_value(json!({"id": id, "tide": tide}))?)?;
//! }
//! let (state, changes) = draft.finish();
//! assert_eq!(changes.len(), 3);
//!
//! let query = Query::parse(&json!({"bucket": "harbours", "filter": {"tide": "high"}, "fields": ["id"]}), &Default::default())?;
//! let answer = query.answer(state.bucket("harbours")?, 1_700_000_000_000);
//! assert_eq!(answer, Answer::Records(vec![json!({"id": 1}), json!({"id": 3})]));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

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
    Backup, BackupError, Checkpoint, CheckpointError, Corruption, Cut, Disk, DiskFile, Durability, Embedded,
    EmbeddedOptions, Engine, EngineError, EngineStats, Files, LogPressure, Memory, OpenError, Position, Recovered,
    Recovery, StoredRow, Write, WriteSet, Writes,
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
