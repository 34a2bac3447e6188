//! Commands, as a server reads them.

use bytes::BytesMut;
use tidewire_redis::{Decoder, Message, Value, encode_argument, encode_command, encode_command_head};

#[test]
fn a_command_is_an_array_of_strings() {
    let mut output = BytesMut::new();
    encode_command(&[&b"SET"[..], b"key", b"\r\n\0"], &mut output);
    encode_command(&["PING"], &mut output);
    let mut decoder = Decoder::default();
    let set = Value::Array(vec!["SET".into(), "key".into(), "\r\n\0".into()]);
    assert_eq!(decoder.decode(&mut output), Ok(Some(Message::Reply(set))));
    assert_eq!(decoder.decode(&mut output), Ok(Some(Message::Reply(Value::Array(vec!["PING".into()])))));
    assert_eq!(decoder.decode(&mut output), Ok(None));
}

#[test]
fn it_is_the_same_argument_by_argument() {
    let arguments = ["MSET", "a", "", "b", "a long value of more than nine bytes"];
    let (mut whole, mut parts) = (Vec::new(), Vec::new());
    encode_command(&arguments, &mut whole);
    encode_command_head(arguments.len(), &mut parts);
    for argument in arguments {
        encode_argument(argument.as_bytes(), &mut parts);
    }
    assert_eq!(whole, parts);
}
