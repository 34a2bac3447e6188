//! A client of Redis and Valkey. So far there is its codec: RESP3 and RESP2 without I/O, for clients and for servers.
//!
//! A [`Decoder`] takes replies and pushes from the front of what was read, whatever the pieces in which it came. Strings are
//! parts of the input, not copies. [`encode_command`] writes commands, and a [`Value`] or [`Message`] encodes itself.
//!
//! ```
//! use bytes::BytesMut;
//! use tidewire_redis::{Decoder, Message, Value, encode_command};
//!
//! let mut output = BytesMut::new();
//! encode_command(&["GET", "tide"], &mut output);
//! assert_eq!(output, "*2\r\n$3\r\nGET\r\n$4\r\ntide\r\n");
//!
//! // A push may come before the reply. It is told apart by its type.
//! let mut decoder = Decoder::default();
//! let mut input = BytesMut::from(">2\r\n+invalidate\r\n*1\r\n$4\r\ntide\r\n$4\r\nhi");
//! assert!(matches!(decoder.decode(&mut input)?, Some(Message::Push(_))));
//! assert_eq!(decoder.decode(&mut input)?, None);
//!
//! input.extend_from_slice(b"gh\r\n");
//! assert_eq!(decoder.decode(&mut input)?, Some(Message::Reply(Value::from("high"))));
//! # Ok::<(), tidewire_redis::DecodeError>(())
//! ```

mod resp;

pub use resp::{
    Attributed, DecodeError, DecodeErrorKind, Decoder, DecoderOptions, EncodeError, Message, Output, Value, Version,
    command_len, encode_argument, encode_command, encode_command_head,
};
