//! Tests of the engines, through their API.

mod contract;
mod damage;
mod disk;
mod failure;
mod kill;
mod model;
mod simulation;
mod speed;
