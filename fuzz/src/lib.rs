//! Feeds bytes to a codec as a connection does, and collects the results, for the fuzz targets.

use std::io::IoSlice;

use bytes::{BufMut, BytesMut};
use tidewire_conn::codec::{Batch, Codec};

/// The result of decoding a stream.
#[derive(Debug, PartialEq)]
pub struct Decoded<F, E> {
    /// The decoded frames.
    pub frames: Vec<F>,
    /// The error that ended decoding.
    pub error: Option<E>,
    /// The result of `Codec::finish` at the end of the input.
    pub finish: Result<(), E>,
    /// The result of `Codec::is_closed` at the end of the input.
    pub is_closed: bool,
}

/// Decodes `wire` in pieces. `sizes` are the lengths of the pieces, repeated. If it is empty, there is one piece. Memory is reserved only
/// when the input buffer is full. Returns the result, and the control frames that the codec wrote.
///
/// # Panics
///
/// If the capacity of the input buffer exceeds `max_capacity`.
pub fn decode_pieces<C: Codec>(
    mut codec: C,
    wire: &[u8],
    sizes: &[u8],
    max_capacity: usize,
) -> (Decoded<C::Frame, C::Error>, Vec<u8>) {
    let (mut input, mut control, mut frames) = (BytesMut::new(), Batch::default(), Vec::new());
    let (mut rest, mut error, mut sizes) = (wire, None, sizes.iter().cycle());
    while !rest.is_empty() && error.is_none() {
        let size = sizes.next().map(|&size| usize::from(size).max(1));
        if input.len() == input.capacity() {
            input.reserve(if size.is_some() { 64 } else { rest.len() });
        }
        let size = size.unwrap_or(usize::MAX);
        let n = rest.len().min(input.capacity() - input.len()).min(size);
        input.put_slice(&rest[..n]);
        rest = &rest[n..];
        loop {
            let decoded = codec.decode(&mut input);
            codec.encode_control(&mut control, true);
            match decoded {
                Ok(Some(frame)) => frames.push(frame),
                Ok(None) => break,
                Err(failed) => {
                    error = Some(failed);
                    break;
                }
            }
        }
        assert!(
            input.capacity() <= max_capacity,
            "the input buffer has {} bytes, at most {max_capacity} are allowed",
            input.capacity()
        );
    }
    // A connection does not call `finish` after an error.
    let finish = if error.is_some() { Ok(()) } else { codec.finish(&input) };
    (Decoded { frames, error, finish, is_closed: codec.is_closed() }, written(&mut control))
}

/// Returns the bytes of a batch.
fn written(batch: &mut Batch) -> Vec<u8> {
    let mut bytes = Vec::new();
    while !batch.is_empty() {
        let mut slices = [IoSlice::new(&[]); 16];
        let filled = batch.slices(&mut slices);
        let before = bytes.len();
        bytes.extend(slices[..filled].iter().flat_map(|slice| slice.iter()));
        batch.advance(bytes.len() - before);
    }
    bytes
}

/// Splits the input of the fuzzer into settings, sizes of pieces, and the bytes to decode.
pub fn split<const N: usize>(data: &[u8]) -> Option<([u8; N], [u8; 4], &[u8])> {
    let (settings, data) = data.split_first_chunk()?;
    let (sizes, wire) = data.split_first_chunk()?;
    Some((*settings, *sizes, wire))
}
