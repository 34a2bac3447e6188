//! Arbitrary bytes, in arbitrary pieces: no panic, bounded memory, the same messages or error as in one piece, and decoded messages
//! can be encoded and decoded again.

#![no_main]

use bytes::{BufMut, BytesMut};
use libfuzzer_sys::fuzz_target;
use tidewire_fuzz::split;
use tidewire_redis::resp::{DecodeError, Decoder, DecoderOptions, Message, Version};

/// Bytes of a first read, the read-ahead, and the spare capacity of the reader.
const MAX_INPUT_BYTES: usize = (64 << 10) + (4 << 10) + 64;

/// Returns the messages, their number and the result at the end of the stream. Messages are encoded, because NaN is not equal to
/// itself.
fn decode_pieces(options: DecoderOptions, wire: &[u8], sizes: &[u8]) -> (BytesMut, usize, Result<(), DecodeError>) {
    let (mut decoder, mut input, mut encoded, mut messages) =
        (Decoder::new(options), BytesMut::new(), BytesMut::new(), 0);
    let (mut rest, mut sizes) = (wire, sizes.iter().cycle());
    while !rest.is_empty() {
        let size = sizes.next().map_or(rest.len(), |&size| usize::from(size).clamp(1, rest.len()));
        if input.len() == input.capacity() {
            input.reserve(64);
        }
        let n = size.min(input.capacity() - input.len());
        input.put_slice(&rest[..n]);
        rest = &rest[n..];
        loop {
            match decoder.decode(&mut input) {
                Ok(Some(message)) => {
                    messages += 1;
                    write(&message, &mut encoded);
                }
                Ok(None) => break,
                Err(error) => return (encoded, messages, Err(error)),
            }
        }
        let max_capacity = MAX_INPUT_BYTES.max(2 * wire.len());
        assert!(
            input.capacity() <= max_capacity,
            "the input buffer has {} bytes, at most {max_capacity} are allowed",
            input.capacity()
        );
    }
    (encoded, messages, decoder.finish(&input))
}

fn write(message: &Message, output: &mut BytesMut) {
    message.encode(Version::Resp3, output).expect("a decoded message can be encoded");
}

fuzz_target!(|data: &[u8]| {
    let Some(([bulk, elements, depth, flags], sizes, wire)) = split(data) else { return };
    let mut options = DecoderOptions::default().keep_attributes(flags & 1 > 0);
    if flags & 2 > 0 {
        options = options.max_bulk(bulk.into()).max_elements(elements.into());
        options = options.max_depth(depth.into()).max_line(flags.into());
    }
    let whole = decode_pieces(options, wire, &[]);
    assert_eq!(whole, decode_pieces(options, wire, &sizes));
    assert_eq!(whole, decode_pieces(options, wire, &[1]));

    // Without limits, because the encoding of a double may be longer than the original.
    let options = DecoderOptions::default().keep_attributes(true);
    assert_eq!(decode_pieces(options, &whole.0, &sizes), (whole.0.clone(), whole.1, Ok(())));
});
