//! Tests of the engines, through their API.

mod disk;
mod model;
mod simulation;
