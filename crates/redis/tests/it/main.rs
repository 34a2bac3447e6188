//! The client and its parts, through the public interface.

mod calls;
mod commands;
mod connection;
mod equivalence;
mod faults;
mod forms;
mod hostile;
mod lifecycle;
mod logins;
mod naive;
mod observing;
mod peers;
mod server;
mod servers;
mod sharing;
mod structs;
mod types;
mod wire;
