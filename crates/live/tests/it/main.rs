//! Live queries, through the public interface.

mod ends;
mod equivalence;
mod follower;
mod speed;
mod world;
