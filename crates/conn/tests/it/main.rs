//! Connection actors, over real sockets.

mod choices;
mod client;
mod connection;
mod drained;
mod examples;
mod fragments;
mod input_limit;
mod memory_limit;
mod push;
mod redis;
mod regressions;
mod requests;
mod sequence;
mod server;
mod surface;
mod ticks;
mod timeouts;
mod turns;
mod unsent;
mod wakes;
mod websocket;
