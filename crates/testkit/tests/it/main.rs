//! The test kit, tested on real processes and sockets.

mod example;
mod port;
mod process;
mod proxy;
mod redis;
mod wait;
