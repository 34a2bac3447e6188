//! Live queries, through the public interface.

mod ends;
mod equivalence;
mod follower;
mod sameness;
mod speed;
mod world;
