//! Queries: how they are planned, evaluated and limited.
//!
//! An index never changes the result of a query, only its cost: the plan chooses which records are examined, in which order, and
//! each of them is checked with the whole filter.

mod access;
pub(crate) mod aggregate;
pub(crate) mod answer;
pub(crate) mod builder;
mod canonical;
#[cfg(test)]
mod model;
mod order;
mod parse;
pub(crate) mod plan;

pub use self::aggregate::AggregateFunction;
pub use self::parse::QueryError;
