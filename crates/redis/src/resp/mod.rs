//! RESP3 and RESP2, bytes to values and back, without I/O or a clock.

mod decode;
mod encode;
mod error;
mod limits;
mod line;
mod open;
mod value;

pub use decode::Decoder;
pub(crate) use encode::encode_argument;
pub use encode::{EncodeError, Output, Version, encode_command};
pub use error::{DecodeError, DecodeErrorKind};
pub use limits::DecoderOptions;
pub use value::{Attributed, Message, Value};
