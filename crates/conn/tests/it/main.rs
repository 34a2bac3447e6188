//! Integration tests of connection actors.

mod client;
mod connection;
mod examples;
mod fragments;
mod input_limit;
mod memory_limit;
mod on_drained;
mod on_wake;
mod push;
mod push_api;
mod redis_example;
mod regressions;
mod reply_in_turn;
mod request_options;
mod sequence_numbers;
mod service_order;
mod test_server;
mod ticks;
mod timeouts;
mod unsent_frames;
mod websocket;
