//! JSON buckets with a schema, indexes, queries and transactions, durable by default, at memory speed.

mod check;
mod filter;
mod key;
mod row;
mod schema;
mod value;

pub use check::{Issue, ValidationError};
pub use filter::{Comparison, Filter, FilterError, Scalar, Test};
pub use key::IndexKey;
pub use row::{Field, Row, RowError};
pub use schema::{BucketDefinition, DefinitionError, FieldRule, Format, Generated, Kind, OnDelete, Reference};
pub use value::Value;
