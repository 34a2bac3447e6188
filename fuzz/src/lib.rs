//! What the targets share: a codec is fed as an actor does it, and told apart by what comes of it.

use std::io::IoSlice;

use bytes::{BufMut, BytesMut};
use tidewire_conn::codec::{Batch, Codec};

/// What came of a stream.
#[derive(Debug, PartialEq)]
pub struct Heard<F, E> {
    /// What was decoded.
    pub frames: Vec<F>,
    /// What it failed with.
    pub error: Option<E>,
    /// How it ended, had it ended there.
    pub finish: Result<(), E>,
    /// Whether it was over.
    pub is_closed: bool,
}

/// Feeds `wire` in pieces of these sizes, over and over, into the room there is, and reserves some only when there is none.
/// Without sizes, all at once. Returns what came of it, and what the codec said by itself.
///
/// # Panics
///
/// If more memory than `bound` is held for the input.
pub fn hear<C: Codec>(mut codec: C, wire: &[u8], sizes: &[u8], bound: usize) -> (Heard<C::Frame, C::Error>, Vec<u8>) {
    let (mut input, mut said, mut frames) = (BytesMut::new(), Batch::default(), Vec::new());
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
            codec.encode_control(&mut said, true);
            match decoded {
                Ok(Some(frame)) => frames.push(frame),
                Ok(None) => break,
                Err(failed) => {
                    error = Some(failed);
                    break;
                }
            }
        }
        assert!(input.capacity() <= bound, "{} of {bound} bytes", input.capacity());
    }
    // After an error the connection is over, and nobody asks.
    let finish = if error.is_some() { Ok(()) } else { codec.finish(&input) };
    (Heard { frames, error, finish, is_closed: codec.is_closed() }, written(&mut said))
}

/// All that a batch would write.
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

/// Takes some settings and sizes of pieces from the front of what the fuzzer came up with.
pub fn split<const N: usize>(data: &[u8]) -> Option<([u8; N], [u8; 4], &[u8])> {
    let (settings, data) = data.split_first_chunk()?;
    let (sizes, wire) = data.split_first_chunk()?;
    Some((*settings, *sizes, wire))
}
