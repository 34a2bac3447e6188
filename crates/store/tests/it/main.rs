//! Tests of the store and of its engines, through their API.

mod engine;
mod example;
mod regressions;
mod store;
