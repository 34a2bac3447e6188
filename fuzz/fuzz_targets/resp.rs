//! Any replies, split anywhere: no panic, bounded memory, the same messages or error as without splits, and decoded messages can be
//! encoded and decoded again.

#![no_main]

use bytes::{BufMut, BytesMut};
use libfuzzer_sys::fuzz_target;
use tidewire_fuzz::split;
use tidewire_redis::resp::{DecodeError, Decoder, DecoderOptions, Message, Version};

/// Memory for a first read, the read-ahead, and what the reader reserves itself.
const MAX_INPUT_BYTES: usize = (64 << 10) + (4 << 10) + 64;

/// Returns the messages, encoded so that not-a-number is equal to itself, and how the stream ended.
fn hear(options: DecoderOptions, wire: &[u8], sizes: &[u8]) -> (BytesMut, usize, Result<(), DecodeError>) {
    let (mut decoder, mut input, mut anew, mut messages) = (Decoder::new(options), BytesMut::new(), BytesMut::new(), 0);
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
                    write(&message, &mut anew);
                }
                Ok(None) => break,
                Err(error) => return (anew, messages, Err(error)),
            }
        }
        assert!(input.capacity() <= MAX_INPUT_BYTES.max(2 * wire.len()), "{} bytes", input.capacity());
    }
    (anew, messages, decoder.finish(&input))
}

fn write(message: &Message, output: &mut BytesMut) {
    message.encode(Version::Resp3, output).expect("what was decoded can be encoded");
}

fuzz_target!(|data: &[u8]| {
    let Some(([bulk, elements, depth, flags], sizes, wire)) = split(data) else { return };
    let mut options = DecoderOptions::default().keep_attributes(flags & 1 > 0);
    if flags & 2 > 0 {
        options = options.max_bulk(bulk.into()).max_elements(elements.into());
        options = options.max_depth(depth.into()).max_line(flags.into());
    }
    let whole = hear(options, wire, &[]);
    assert_eq!(whole, hear(options, wire, &sizes));
    assert_eq!(whole, hear(options, wire, &[1]));

    // Without limits, because the encoding of a double may be longer than the original.
    let options = DecoderOptions::default().keep_attributes(true);
    assert_eq!(hear(options, &whole.0, &sizes), (whole.0.clone(), whole.1, Ok(())));
});
