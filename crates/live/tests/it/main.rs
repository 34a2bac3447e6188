//! Tests of live queries through the public API.

mod background;
mod client;
mod equivalence;
mod example;
mod matcher;
mod pause;
mod regressions;
mod speed;
mod strategies;
mod subscriptions;
mod unchanged_results;
