//! What once went wrong: each of these failed before it was mended.

mod connections;
mod conversations;
