//! Tests of the engines, through their API.

mod contract;
mod damage;
pub(crate) mod disk;
mod failure;
mod model;
mod simulation;
mod speed;
