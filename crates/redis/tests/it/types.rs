//! All types, as in the specification of RESP3 and as servers encode them.

use bytes::{Bytes, BytesMut};
use tidewire_redis::Value;
use tidewire_redis::resp::{Attributed, Decoder, DecoderOptions, EncodeError, Message, Version};

use crate::wire::{decode_pieces, keeping_attributes};

/// Decodes the only reply of a stream, whole and byte by byte.
fn reply(wire: &str) -> Value {
    replies(keeping_attributes(), wire).pop().unwrap()
}

fn replies(options: DecoderOptions, wire: &str) -> Vec<Value> {
    let received = decode_pieces(options, wire.as_bytes(), &[1]);
    if !wire.contains("nan") {
        assert_eq!(received, decode_pieces(options, wire.as_bytes(), &[]));
    }
    assert_eq!(received.1, Ok(()), "{wire:?}");
    received
        .0
        .into_iter()
        .map(|message| if let Message::Reply(value) = message { value } else { panic!("{message:?}") })
        .collect()
}

fn simple(text: &'static str) -> Value {
    Value::Simple(text.into())
}

fn attributed(attributes: Vec<(Value, Value)>, value: Value) -> Value {
    Value::Attributed(Box::new(Attributed { attributes, value }))
}

#[test]
fn scalars() {
    assert_eq!(reply("+OK\r\n"), simple("OK"));
    assert_eq!(reply("+QUEUED\r\n"), simple("QUEUED"));
    assert_eq!(reply("+hello world\r\n"), simple("hello world"));
    assert_eq!(reply("+\r\n"), simple(""));
    assert_eq!(reply("-ERR unknown\r\n"), Value::SimpleError("ERR unknown".into()));
    assert_eq!(reply(":1234\r\n"), Value::Integer(1234));
    assert_eq!(reply(":-1\r\n"), Value::Integer(-1));
    assert_eq!(reply(":-9223372036854775808\r\n"), Value::Integer(i64::MIN));
    assert_eq!(reply(":9223372036854775807\r\n"), Value::Integer(i64::MAX));
    assert_eq!(reply(",1.23\r\n"), Value::Double(1.23));
    assert_eq!(reply(",10\r\n"), Value::Double(10.0));
    assert_eq!(reply(",inf\r\n"), Value::Double(f64::INFINITY));
    assert_eq!(reply(",-inf\r\n"), Value::Double(f64::NEG_INFINITY));
    assert!(matches!(reply(",nan\r\n"), Value::Double(value) if value.is_nan()));
    assert_eq!(reply("#t\r\n"), Value::Boolean(true));
    assert_eq!(reply("#f\r\n"), Value::Boolean(false));
    assert_eq!(reply("_\r\n"), Value::Null);
    let digits = "3492890328409238509324850943850943825024385";
    assert_eq!(reply(&format!("({digits}\r\n")), Value::BigNumber(digits.into()));
    assert_eq!(reply("(-12\r\n"), Value::BigNumber("-12".into()));
}

#[test]
fn strings() {
    assert_eq!(reply("$11\r\nhello world\r\n"), Value::from("hello world"));
    assert_eq!(reply("$0\r\n\r\n"), Value::from(""));
    assert_eq!(reply("$4\r\n\r\n\r\n\r\n"), Value::from("\r\n\r\n"));
    assert_eq!(reply("!21\r\nSYNTAX invalid syntax\r\n"), Value::BlobError("SYNTAX invalid syntax".into()));
    assert_eq!(reply("=15\r\ntxt:Some string\r\n"), Value::Verbatim(*b"txt", "Some string".into()));
    assert_eq!(reply("=4\r\nmkd:\r\n"), Value::Verbatim(*b"mkd", "".into()));
}

#[test]
fn strings_in_chunks() {
    assert_eq!(reply("$?\r\n;4\r\nHell\r\n;5\r\no wor\r\n;1\r\nd\r\n;0\r\n"), Value::from("Hello word"));
    assert_eq!(reply("$?\r\n;0\r\n"), Value::from(""));
    let array = Value::Array(vec!["ab".into(), "c".into()]);
    assert_eq!(reply("*2\r\n$?\r\n;1\r\na\r\n;1\r\nb\r\n;0\r\n$1\r\nc\r\n"), array);
}

#[test]
fn nulls_of_resp2_are_decoded() {
    assert_eq!(reply("$-1\r\n"), Value::Null);
    assert_eq!(reply("*-1\r\n"), Value::Null);
    assert_eq!(reply("*2\r\n$-1\r\n*-1\r\n"), Value::Array(vec![Value::Null, Value::Null]));
}

#[test]
fn aggregates() {
    assert_eq!(reply("*0\r\n"), Value::Array(vec![]));
    assert_eq!(reply("~0\r\n"), Value::Set(vec![]));
    assert_eq!(reply("%0\r\n"), Value::Map(vec![]));
    assert_eq!(reply("*3\r\n:1\r\n:2\r\n:3\r\n"), Value::Array(vec![1.into(), 2.into(), 3.into()]));
    assert_eq!(reply("~2\r\n+a\r\n#t\r\n"), Value::Set(vec![simple("a"), Value::Boolean(true)]));
    let map = Value::Map(vec![(simple("first"), 1.into()), (simple("second"), Value::Array(vec![2.into()]))]);
    assert_eq!(reply("%2\r\n+first\r\n:1\r\n+second\r\n*1\r\n:2\r\n"), map);
    let nested =
        Value::Array(vec![Value::Array(vec![]), Value::Map(vec![(Value::Set(vec![]), Value::Null)]), 7.into()]);
    assert_eq!(reply("*3\r\n*0\r\n%1\r\n~0\r\n_\r\n:7\r\n"), nested);
}

#[test]
fn streamed_aggregates_are_decoded() {
    assert_eq!(reply("*?\r\n.\r\n"), Value::Array(vec![]));
    assert_eq!(reply("*?\r\n:1\r\n*?\r\n:2\r\n.\r\n.\r\n"), Value::Array(vec![1.into(), Value::Array(vec![2.into()])]));
    assert_eq!(
        reply("%?\r\n+a\r\n:1\r\n+b\r\n:2\r\n.\r\n"),
        Value::Map(vec![(simple("a"), 1.into()), (simple("b"), 2.into())])
    );
    assert_eq!(reply("~?\r\n*1\r\n:1\r\n.\r\n"), Value::Set(vec![Value::Array(vec![1.into()])]));
}

#[test]
fn attributes_belong_to_the_value_after_them() {
    // The examples of the specification.
    let wire =
        "|1\r\n+key-popularity\r\n%2\r\n$1\r\na\r\n,0.1923\r\n$1\r\nb\r\n,0.0012\r\n*2\r\n:2039123\r\n:9543892\r\n";
    let popularity = Value::Map(vec![("a".into(), Value::Double(0.1923)), ("b".into(), Value::Double(0.0012))]);
    let array = Value::Array(vec![2_039_123.into(), 9_543_892.into()]);
    assert_eq!(reply(wire), attributed(vec![(simple("key-popularity"), popularity)], array.clone()));
    assert_eq!(replies(DecoderOptions::default(), wire), [array]);

    let wire = "*3\r\n:1\r\n:2\r\n|1\r\n+ttl\r\n:3600\r\n:3\r\n";
    let ttl = || vec![(simple("ttl"), 3600.into())];
    assert_eq!(reply(wire), Value::Array(vec![1.into(), 2.into(), attributed(ttl(), 3.into())]));
    assert_eq!(replies(DecoderOptions::default(), wire), [Value::Array(vec![1.into(), 2.into(), 3.into()])]);

    // Attributes of a key and of a value, none at all, and attributes of a value within attributes.
    let wire = "%1\r\n|1\r\n+ttl\r\n:3600\r\n+k\r\n|0\r\n|1\r\n+ttl\r\n|1\r\n+ttl\r\n:3600\r\n:3600\r\n*0\r\n";
    let inner = vec![(simple("ttl"), attributed(ttl(), 3600.into()))];
    let map = vec![(attributed(ttl(), simple("k")), attributed(inner, Value::Array(vec![])))];
    assert_eq!(reply(wire), Value::Map(map));
    assert_eq!(replies(DecoderOptions::default(), wire), [Value::Map(vec![(simple("k"), Value::Array(vec![]))])]);
}

#[test]
fn push_is_decoded_between_replies() {
    let wire = b"+a\r\n>2\r\n+message\r\n*1\r\n$1\r\nx\r\n|1\r\n+a\r\n+b\r\n>0\r\n*1\r\n:1\r\n";
    let push = Message::Push(vec![simple("message"), Value::Array(vec!["x".into()])]);
    let expected =
        vec![Message::Reply(simple("a")), push, Message::Push(vec![]), Message::Reply(Value::Array(vec![1.into()]))];
    assert_eq!(decode_pieces(keeping_attributes(), wire, &[]), (expected.clone(), Ok(())));
    assert_eq!(decode_pieces(keeping_attributes(), wire, &[1]), (expected, Ok(())));
}

#[test]
fn strings_are_slices_of_the_input() {
    let mut input = BytesMut::from("*3\r\n$5\r\nhello\r\n+simple\r\n$5\r\nworld\r\n");
    let range = input.as_ptr_range();
    let Some(Message::Reply(Value::Array(items))) = Decoder::default().decode(&mut input).unwrap() else { panic!() };
    for item in &items {
        assert!(range.contains(&item.as_bytes().unwrap().as_ptr()), "{item:?} was copied");
    }
    assert!(input.is_empty());
}

#[test]
fn all_values_are_encoded_in_resp2() {
    let value = Value::Array(vec![
        Value::Map(vec![(simple("k"), Value::Double(1.5))]),
        Value::Set(vec![Value::Boolean(true), Value::Boolean(false)]),
        attributed(vec![(1.into(), 2.into())], Value::Null),
        Value::BigNumber("123".into()),
        Value::Verbatim(*b"txt", "text".into()),
        Value::BlobError("ERR no".into()),
    ]);
    let mut output = BytesMut::new();
    value.encode(Version::Resp2, &mut output).unwrap();
    let expected = "*6\r\n*2\r\n+k\r\n$3\r\n1.5\r\n*2\r\n:1\r\n:0\r\n$-1\r\n$3\r\n123\r\n$4\r\ntext\r\n-ERR no\r\n";
    assert_eq!(output, expected);

    output.clear();
    Message::Push(vec![1.into()]).encode(Version::Resp2, &mut output).unwrap();
    assert_eq!(output, "*1\r\n:1\r\n");
}

#[test]
fn invalid_values_are_not_encoded() {
    let mut output = BytesMut::from("before");
    for (value, expected) in [
        (Value::Simple("a\r\n+b".into()), EncodeError::LineBreak),
        (Value::SimpleError("a\nb".into()), EncodeError::LineBreak),
        (Value::BigNumber(Bytes::new()), EncodeError::BigNumber),
        (Value::BigNumber("1\r\n".into()), EncodeError::BigNumber),
    ] {
        for version in [Version::Resp2, Version::Resp3] {
            let items = vec![1.into(), value.clone()];
            assert_eq!(Value::Array(items.clone()).encode(version, &mut output), Err(expected));
            assert_eq!(Message::Push(items).encode(version, &mut output), Err(expected));
        }
    }
    assert_eq!(Value::BlobError("a\nb".into()).encode(Version::Resp2, &mut output), Err(EncodeError::LineBreak));
    assert_eq!(output, "before");
}
