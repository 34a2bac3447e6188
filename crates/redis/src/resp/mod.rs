//! RESP3 and RESP2, without I/O and without a clock.
//!
//! A [`Decoder`] takes replies and pushes from the front of the input, however it is split. [`encode_command`] writes commands, and
//! [`Value::encode`](crate::Value::encode) writes what a server answers.

mod decode;
mod encode;
mod error;
mod limits;
mod line;
mod open;
pub(crate) mod value;

pub use decode::Decoder;
pub(crate) use encode::encode_argument;
pub use encode::{EncodeError, Output, Version, encode_command};
pub use error::{DecodeError, DecodeErrorKind};
pub use limits::DecoderOptions;
pub(crate) use value::Value;
pub use value::{Attributed, Message};
