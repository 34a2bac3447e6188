//! Tests of the engines, through their API.

mod contract;
mod copies;
mod damage;
mod descriptors;
pub(crate) mod disk;
mod failure;
mod model;
mod modes;
mod simulation;
mod speed;
