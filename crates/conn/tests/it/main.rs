//! Connection actors, over real sockets.

mod connection;
mod examples;
mod push;
mod server;
mod surface;
