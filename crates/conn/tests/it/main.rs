//! Connection actors, over real sockets.

mod choices;
mod client;
mod connection;
mod examples;
mod fragments;
mod push;
mod regressions;
mod server;
mod surface;
mod timeouts;
mod websocket;
