//! RESP3 and RESP2, bytes to values and back, without I/O or a clock.

mod decode;
mod encode;
mod error;
mod limits;
mod line;
mod open;
mod value;

pub use decode::Decoder;
pub use encode::{EncodeError, Output, Version, command_len, encode_argument, encode_command, encode_command_head};
pub use error::{DecodeError, DecodeErrorKind};
pub use limits::DecoderOptions;
pub use value::{Attributed, Message, Value};
