//! The operations of the wire protocol.

pub(crate) mod auth;
pub(crate) mod command;
pub(crate) mod handler;
pub(crate) mod store_reads;
pub(crate) mod store_writes;
pub(crate) mod subscribe;
pub(crate) mod table;
