//! The codec, through the public interface.

mod commands;
mod equivalence;
mod hostile;
mod naive;
mod server;
mod types;
mod wire;
