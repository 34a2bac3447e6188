//! The codec, through the public interface.

mod commands;
mod equivalence;
mod hostile;
mod naive;
mod types;
mod wire;
