//! Live queries, through the public interface.

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
