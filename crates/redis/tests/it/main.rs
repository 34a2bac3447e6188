//! The client and its parts, through the public interface.

mod calls;
mod cancellation;
mod closing;
mod commands;
mod connection;
mod deadlines;
mod equivalence;
mod faults;
mod flooding;
mod forms;
mod hostile;
mod lifecycle;
mod logins;
mod observability;
mod permits;
mod reference_decoder;

mod backoff;
mod outcomes;
mod peers;
mod scripts;
mod server;
mod servers;
mod sharing;
mod structs;
mod types;
mod unsent;
mod unusual_options;
mod wire;
