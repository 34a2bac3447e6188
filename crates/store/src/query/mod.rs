//! The parts of queries and filters, and the limits of their evaluation.
//!
//! [`Query`](crate::Query), [`Filter`](crate::Filter), [`Aggregate`](crate::Aggregate) and [`QueryOutput`](crate::QueryOutput) are at the
//! root of the crate.
//!
//! An index never changes the result of a query, only its cost: the plan chooses the records to examine and their order, and each
//! examined record is checked with the whole filter.

mod access;
pub(crate) mod aggregate;
pub(crate) mod builder;
mod canonical;
#[cfg(test)]
mod model;
mod order;
pub(crate) mod output;
mod parse;
pub(crate) mod plan;

pub use self::aggregate::AggregateFunction;
pub use self::parse::QueryError;
pub use crate::budget::{Budget, Exceeded};
pub use crate::filter::{Comparison, FilterError, Parameters, Scalar, Scalars, Test};
pub use crate::key::IndexKey;
pub use crate::page::Page;
pub use crate::sum::Sum;
