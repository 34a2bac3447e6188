//! The wire protocol: requests, replies, pushes, error codes and close codes.

pub(crate) mod error;
mod failure;
pub(crate) mod reply;
pub(crate) mod request;
