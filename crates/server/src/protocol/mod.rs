//! The wire protocol: client messages, replies, pushes, notices, error codes and close codes.

pub(crate) mod disconnect;
pub(crate) mod error;
pub(crate) mod notice;
pub(crate) mod push;
pub(crate) mod reply;
pub(crate) mod request;
mod store_errors;
