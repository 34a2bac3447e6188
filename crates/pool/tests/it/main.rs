//! Tests of the pool through its public API, on real threads or in a simulation.
#![cfg(not(loom))]

mod ask;
mod bounds;
mod builder;
mod example;
mod failure;
mod gate;
mod observe;
mod order;
mod resilience;
mod shutdown;
mod simulation;
mod trace;
