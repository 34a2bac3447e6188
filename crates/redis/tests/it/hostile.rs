//! Invalid input and limits of the decoder.

use bytes::{BufMut, BytesMut};
use tidewire_redis::Value;
use tidewire_redis::resp::{DecodeErrorKind as Kind, Decoder, DecoderOptions, Message};

use crate::wire::{decode_pieces, keeping_attributes};

/// Decodes an invalid stream, whole and byte by byte. Returns the kind of error and its offset.
fn decode_error(options: DecoderOptions, wire: &[u8]) -> (Kind, u64) {
    let whole = decode_pieces(options, wire, &[]).1.expect_err("the input is invalid");
    assert_eq!(decode_pieces(options, wire, &[1]).1, Err(whole), "{}", wire.escape_ascii());
    (whole.kind, whole.offset)
}

#[test]
fn errors_have_a_kind_and_an_offset() {
    let length = |first| Kind::Length { first };
    let max_bulk = 512 << 20;
    let max_elements = 1 << 20;
    for (wire, kind, offset) in [
        ("HTTP/1.1 200 OK\r\n", Kind::UnknownType { byte: b'H' }, 0),
        ("+OK\r\n\0", Kind::UnknownType { byte: 0 }, 5),
        ("*2\r\n:1\r\n@", Kind::UnknownType { byte: b'@' }, 8),
        ("+OK\n", Kind::LineBreak, 0),
        ("+O\rK\r\n", Kind::LineBreak, 0),
        (":1\r\r\n", Kind::LineBreak, 0),
        ("$3\n\nabc\r\n", Kind::LineBreak, 0),
        ("$3\r\nabcd\r\n", Kind::BulkEnd, 7),
        ("$3\r\nabc\n\r", Kind::BulkEnd, 7),
        ("$?\r\n;1\r\nab\r\n", Kind::BulkEnd, 9),
        ("$-2\r\n", length(b'$'), 0),
        ("$+2\r\n", length(b'$'), 0),
        ("$\r\n", length(b'$'), 0),
        ("$1x\r\n", length(b'$'), 0),
        ("*-2\r\n", length(b'*'), 0),
        ("%-1\r\n", length(b'%'), 0),
        ("~-1\r\n", length(b'~'), 0),
        (">-1\r\n", length(b'>'), 0),
        (">?\r\n", length(b'>'), 0),
        ("|-1\r\n", length(b'|'), 0),
        ("|?\r\n", length(b'|'), 0),
        ("!-1\r\n", length(b'!'), 0),
        ("!?\r\n", length(b'!'), 0),
        ("=?\r\n", length(b'='), 0),
        ("$?\r\n;-1\r\n", length(b';'), 4),
        ("$?\r\n;?\r\n", length(b';'), 4),
        ("$536870913\r\n", Kind::BulkTooLong { len: 536_870_913, max: max_bulk }, 0),
        ("=99999999999999999999999\r\n", Kind::BulkTooLong { len: u64::MAX, max: max_bulk }, 0),
        ("$?\r\n;1\r\na\r\n;536870912\r\n", Kind::BulkTooLong { len: 536_870_913, max: max_bulk }, 11),
        ("*1048577\r\n", Kind::TooManyElements { max: max_elements }, 0),
        ("%524289\r\n", Kind::TooManyElements { max: max_elements }, 0),
        ("|524288\r\n", Kind::TooManyElements { max: max_elements }, 0),
        ("%18446744073709551615\r\n", Kind::TooManyElements { max: max_elements }, 0),
        ("*99999999999999999999999\r\n", Kind::TooManyElements { max: max_elements }, 0),
        (":\r\n", Kind::Integer, 0),
        (":-\r\n", Kind::Integer, 0),
        (":1a\r\n", Kind::Integer, 0),
        (":9223372036854775808\r\n", Kind::IntegerRange, 0),
        (":-9223372036854775809\r\n", Kind::IntegerRange, 0),
        (",\r\n", Kind::Double, 0),
        (",1e999\r\n", Kind::Double, 0),
        ("(1.5\r\n", Kind::BigNumber, 0),
        ("(\r\n", Kind::BigNumber, 0),
        ("#x\r\n", Kind::Boolean, 0),
        ("#\r\n", Kind::Boolean, 0),
        ("_0\r\n", Kind::Null, 0),
        ("=3\r\ntxt\r\n", Kind::Verbatim, 0),
        ("=5\r\ntext:\r\n", Kind::Verbatim, 4),
        ("$?\r\n$1\r\na\r\n", Kind::ChunkExpected { byte: b'$' }, 4),
        (";1\r\na\r\n", Kind::StrayChunk, 0),
        (".\r\n", Kind::StrayEnd, 0),
        ("*1\r\n.\r\n", Kind::StrayEnd, 4),
        ("*?\r\n*1\r\n.\r\n", Kind::StrayEnd, 8),
        ("*?\r\n.x\r\n", Kind::StrayEnd, 4),
        ("%?\r\n+k\r\n.\r\n", Kind::OddMap, 8),
        ("*?\r\n|0\r\n.\r\n", Kind::StrayAttributes, 8),
        ("*1\r\n>0\r\n", Kind::NestedPush, 4),
        ("|1\r\n>0\r\n", Kind::NestedPush, 4),
        ("$5\r\nabc", Kind::Truncated, 4),
        ("+OK", Kind::Truncated, 0),
        ("+OK\r", Kind::Truncated, 0),
        ("*2\r\n:1\r\n", Kind::Truncated, 8),
        ("*?\r\n:1\r\n", Kind::Truncated, 8),
        ("$?\r\n;1\r\na\r\n", Kind::Truncated, 11),
        ("|0\r\n", Kind::Truncated, 4),
    ] {
        for options in [DecoderOptions::default(), keeping_attributes()] {
            assert_eq!(decode_error(options, wire.as_bytes()), (kind, offset), "{wire:?}");
        }
    }
}

#[test]
fn limits_can_be_reached_and_not_exceeded() {
    let options = DecoderOptions::default().max_bulk(4).max_elements(6).max_depth(3).max_line(5);
    for wire in [
        "$4\r\nabcd\r\n",
        "$?\r\n;2\r\nab\r\n;2\r\ncd\r\n;0\r\n",
        "+abcde\r\n",
        ":12345\r\n",
        "*6\r\n_\r\n_\r\n_\r\n_\r\n_\r\n_\r\n",
        "*?\r\n_\r\n_\r\n_\r\n_\r\n_\r\n_\r\n.\r\n",
        "*1\r\n*1\r\n*1\r\n_\r\n",
        "%2\r\n_\r\n_\r\n_\r\n*2\r\n_\r\n_\r\n",
        "|1\r\n_\r\n_\r\n*3\r\n_\r\n_\r\n_\r\n",
    ] {
        // Twice, because limits apply to each message.
        let received = decode_pieces(options, wire.repeat(2).as_bytes(), &[1]);
        assert_eq!((received.0.len(), received.1), (2, Ok(())), "{wire:?}");
    }
    let elements = Kind::TooManyElements { max: 6 };
    for (wire, kind) in [
        ("$5\r\n", Kind::BulkTooLong { len: 5, max: 4 }),
        ("$5\r\nabcde\r\n", Kind::BulkTooLong { len: 5, max: 4 }),
        ("*2\r\n$5\r\nabcde\r\n_\r\n", Kind::BulkTooLong { len: 5, max: 4 }),
        ("$?\r\n;2\r\nab\r\n;3\r\n", Kind::BulkTooLong { len: 5, max: 4 }),
        ("+abcdef", Kind::LineTooLong { max: 5 }),
        (":123456\r\n", Kind::LineTooLong { max: 5 }),
        ("*7\r\n", elements),
        ("%4\r\n", elements),
        ("*3\r\n_\r\n*4\r\n", elements),
        ("*?\r\n_\r\n_\r\n_\r\n_\r\n_\r\n_\r\n_\r\n", elements),
        ("|1\r\n_\r\n_\r\n*4\r\n", elements),
        ("|0\r\n|0\r\n|0\r\n|0\r\n|0\r\n|0\r\n|0\r\n", elements),
        ("*1\r\n*1\r\n*1\r\n*0\r\n", Kind::TooDeep { max: 3 }),
        ("*1\r\n|1\r\n%?\r\n~?\r\n", Kind::TooDeep { max: 3 }),
    ] {
        assert_eq!(decode_error(options, wire.as_bytes()).0, kind, "{wire:?}");
    }
    let options = options.max_line(1);
    assert_eq!(decode_error(options, b"+OK\r\n").0, Kind::LineTooLong { max: 1 });
    assert_eq!(decode_error(options, b"$10\r\n").0, Kind::LineTooLong { max: 1 });
}

#[test]
fn endless_nesting_ends_at_the_limit() {
    for level in ["*1\r\n", "*?\r\n", "~1\r\n", "%1\r\n_\r\n", "|1\r\n_\r\n", "%1\r\n", "|1\r\n"] {
        let wire = level.repeat(100_000);
        assert_eq!(decode_error(DecoderOptions::default(), wire.as_bytes()).0, Kind::TooDeep { max: 64 }, "{level:?}");
    }
    // The limit is clamped, so that dropping the value does not overflow the stack.
    let options = DecoderOptions::default().max_depth(usize::MAX);
    assert_eq!(decode_error(options, "*1\r\n".repeat(100_000).as_bytes()).0, Kind::TooDeep { max: 512 });
}

#[test]
fn limits_do_not_overflow() {
    let options = DecoderOptions::default().max_bulk(usize::MAX).max_elements(usize::MAX).max_line(usize::MAX);
    for wire in ["$999999999999999999\r\na", "*99999999999999999999\r\n:1\r\n", "%18446744073709551615\r\n:1\r\n"] {
        assert_eq!(decode_error(options, wire.as_bytes()).0, Kind::Truncated, "{wire:?}");
    }
    let bulk = decode_error(options, b"$18446744073709551615\r\n").0;
    assert_eq!(bulk, Kind::BulkTooLong { len: u64::MAX, max: usize::MAX / 4 });
}

#[test]
fn long_lines_and_strings_can_arrive_byte_by_byte() {
    let options = DecoderOptions::default().max_line(1 << 20);
    let line = vec![b'0'; 1 << 18];
    let count = line.len();
    for (head, tail) in
        [("+", "\r\n"), (":", "\r\n"), ("(", "\r\n"), ("$", "\r\n\r\n"), ("*", "\r\n"), ("$262144\r\n", "\r\n")]
    {
        let wire = [head.as_bytes(), &line, tail.as_bytes()].concat();
        let (mut decoder, mut input, mut messages) = (Decoder::new(options), BytesMut::new(), 0);
        for byte in wire {
            input.put_u8(byte);
            messages += usize::from(decoder.decode(&mut input).unwrap().is_some());
        }
        assert_eq!(messages, 1, "{count} bytes after {head:?}");
    }
}

#[test]
fn reply_of_many_elements_can_arrive_byte_by_byte() {
    let wire = format!("*200000\r\n{}", "$1\r\nx\r\n".repeat(200_000));
    let received = decode_pieces(DecoderOptions::default(), wire.as_bytes(), &[1]);
    let [Message::Reply(Value::Array(items))] = &received.0[..] else { panic!("{:?}", received.1) };
    assert_eq!(items.len(), 200_000);
}
