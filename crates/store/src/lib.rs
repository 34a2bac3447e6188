//! An embedded database of JSON records with schemas, indexes, queries and transactions.
//!
//! A [`Store`] is opened in a directory, or in memory. Reads see the newest committed state and never block. Writes are serial and
//! atomic, and by default they are acknowledged when they are durable. Followers see every commit, in order.
//!
//! ```
//! use serde_json::json;
//! use tidewire_store::Direction::Desc;
//! use tidewire_store::{Query, Store, StoreOptions};
//!
//! let store = Store::memory(StoreOptions::default());
//! let schema = json!({"id": {"type": "number"}, "port": {"type": "string"}});
//! store.define_bucket("tides", json!({"key": "id", "schema": schema, "indexes": ["port"]})).wait()?;
//! for (id, port, metres) in [(1, "Husum", 3.5), (2, "Emden", 3.9), (3, "Husum", 4.1)] {
//!     store.insert("tides", json!({"id": id, "port": port, "metres": metres})).wait()?;
//! }
//! let highest = Query::new("tides").filter(json!({"port": "Husum"}))?.sort("metres", Desc).limit(1).fields(["id"]);
//! assert_eq!(store.query(&highest)?.into_records(), [json!({"id": 3})]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Common types are at the crate root. Other types are in modules by topic: bucket definitions and validation errors in [`schema`],
//! parts of queries and their budgets in [`query`], lists of operations in [`transaction`], buckets of the embedding program in
//! [`system`], durability and the disk in [`engine`]. A [`State`], a [`Draft`] and an [`Engine`](engine::Engine) can also be used
//! without a store.

mod bucket;
mod budget;
mod catalog;
mod check;
mod draft;
pub mod engine;
mod error;
mod filter;
mod key;
mod limits;
mod lock;
mod page;
mod position;
pub mod query;
mod record;
mod replies;
mod row;
pub mod schema;
mod state;
mod store;
mod sum;
pub mod system;
pub mod transaction;
mod value;

pub use bucket::{Bucket, BucketIdentity};
pub use draft::{Change, Draft, ReferenceFilter};
pub use error::StoreError;
pub use filter::Filter;
pub use limits::Limits;
pub use position::{Cause, Position};
pub use query::aggregate::Aggregate;
pub use query::builder::{Direction, Query};
pub use query::output::QueryOutput;
pub use record::IntoRecord;
pub use row::{Field, Row, RowError};
pub use state::State;
pub use store::{
    BucketList, BucketStats, Clock, Commit, FollowError, Follower, ImportError, ImportProblem, Imported, InvalidData,
    MaintenanceError, Pending, Snapshot, Store, StoreOpenError, StoreOptions, StoreStats, WriteError, WriteOptions,
};
pub use value::Value;

/// Compiles the example of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

/// Compiles the examples of the manual.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/store.md")]
struct Manual;
