//! The encoding of commands.

use bytes::BytesMut;
use tidewire_redis::Value;
use tidewire_redis::resp::{Decoder, Message, encode_command};

#[test]
fn command_is_an_array_of_strings() {
    let mut output = BytesMut::new();
    encode_command(&[&b"SET"[..], b"key", b"\r\n\0"], &mut output);
    encode_command(&["PING"], &mut output);
    let mut decoder = Decoder::default();
    let set = Value::Array(vec!["SET".into(), "key".into(), "\r\n\0".into()]);
    assert_eq!(decoder.decode(&mut output), Ok(Some(Message::Reply(set))));
    assert_eq!(decoder.decode(&mut output), Ok(Some(Message::Reply(Value::Array(vec!["PING".into()])))));
    assert_eq!(decoder.decode(&mut output), Ok(None));
}
