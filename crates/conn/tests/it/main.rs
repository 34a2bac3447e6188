//! Integration tests of connection actors.

mod client;
mod connection;
mod drained;
mod examples;
mod fragments;
mod in_turn;
mod input_limit;
mod memory_limit;
mod push;
mod push_api;
mod redis;
mod regressions;
mod requests;
mod sequence;
mod server;
mod service_order;
mod ticks;
mod timeouts;
mod unsent;
mod wakes;
mod websocket;
