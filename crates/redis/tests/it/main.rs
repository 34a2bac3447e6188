//! The client and its parts, through the public interface.

mod budget;
mod calls;
mod cancelling;
mod commands;
mod connection;
mod deadlines;
mod ending;
mod equivalence;
mod faults;
mod flooding;
mod forms;
mod hostile;
mod lifecycle;
mod logins;
mod naive;
mod observing;

mod pauses;
mod peers;
mod scripts;
mod server;
mod servers;
mod sharing;
mod structs;
mod truth;
mod types;
mod unsent;
mod unusual_options;
mod wire;
