//! Tests of live queries through the public API.

mod background;
mod driver;
mod ends;
mod equivalence;
mod example;
mod follower;
mod pause;
mod regressions;
mod sameness;
mod speed;
mod world;
