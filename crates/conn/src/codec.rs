//! Codecs: bytes to frames and back.
//!
//! A [`Codec`] has no I/O and no clock, so that every split of the input can be tested. [`LengthDelimited`] is for frames with a
//! length prefix, [`Fragmented`] cuts large frames into pieces, and [`WebSocket`](crate::websocket::WebSocket) is a codec too.

use bytes::{Buf, BytesMut};

pub use crate::batch::Batch;
pub use crate::fragment::{FragmentError, FragmentOptions, Fragmented};
use crate::{Frame, FrameLike};

/// Decodes bytes to frames and encodes frames to bytes, without I/O. The input may be split at any byte.
pub trait Codec: Send + 'static {
    /// The unit that is decoded and encoded.
    type Frame: FrameLike;
    /// The error of invalid input, or of a frame that cannot be encoded.
    type Error: std::error::Error + Send + Sync + 'static;

    /// Takes the next frame from the front of `input`. Returns `None` if it is incomplete. After an error the connection is closed.
    ///
    /// The codec may reserve capacity in `input` for the rest of a frame. It limits the memory of `input`, if the caller reserves
    /// capacity only when none is left.
    fn decode(&mut self, input: &mut BytesMut) -> Result<Option<Self::Frame>, Self::Error>;

    /// Called at the end of the stream. Returns an error if `input` must not end here.
    fn finish(&mut self, input: &BytesMut) -> Result<(), Self::Error>;

    /// Appends a frame to the output. After an error `output` is unchanged.
    fn encode(&mut self, frame: &Self::Frame, output: &mut Batch) -> Result<(), Self::Error>;

    /// Appends the next part of a frame, from `position` on. Returns where the following part begins, or `None` when the frame is
    /// complete. Other frames may be encoded between two parts. Default: a frame has one part.
    fn encode_part(
        &mut self,
        frame: &Self::Frame,
        position: EncodePosition,
        output: &mut Batch,
    ) -> Result<Option<EncodePosition>, Self::Error> {
        let _ = position;
        self.encode(frame, output).map(|()| None)
    }

    /// Returns the number of the oldest message that is being assembled from several frames. Each message has a different number.
    /// The [`frame`](crate::Timeouts::frame) timeout applies to the message. Default: `None`.
    fn partial_message(&self) -> Option<u64> {
        None
    }

    /// Whether a frame is incomplete, where `input` is the remaining input after the last [`decode`](Self::decode).
    fn has_partial_frame(&self, input: &BytesMut) -> bool {
        !input.is_empty()
    }

    /// Appends control frames of the codec: replies to pings, its part of a closing handshake, the close frame after an error. Called
    /// after [`decode`](Self::decode), but not while the peer does not read, so the codec must limit the control frames that it keeps.
    /// If `is_last` is true, all requests have been answered. The close frame may be appended only then.
    fn encode_control(&mut self, output: &mut Batch, is_last: bool) {
        let _ = (output, is_last);
    }

    /// Returns the bytes of incomplete frames that the codec holds in addition to `input`. They count for the
    /// [memory limit](crate::MemoryLimit). Default: zero.
    fn held_bytes(&self) -> usize {
        0
    }

    /// Replaces the limit of a frame that is read, in bytes, from the next frame on: see
    /// [`ConnectionContext::limit_input`](crate::ConnectionContext::limit_input). Default: the codec keeps its limit.
    fn set_max_frame(&mut self, bytes: usize) {
        let _ = bytes;
    }

    /// Whether the peer has begun a closing handshake, or has violated the protocol. If true, nothing more is decoded, streams are cut
    /// off, other replies are completed, and the codec may append its own close frame. Default: false.
    fn is_closing(&self) -> bool {
        false
    }

    /// Whether the codec has encoded its close frame. If true, nothing more is encoded or read, and the connection ends when all output
    /// is written. Default: false.
    fn is_closed(&self) -> bool {
        false
    }
}

/// The position of a part within a frame: see [`Codec::encode_part`]. The default is the beginning of the frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EncodePosition {
    /// The number of the message, chosen by the codec.
    pub message: u64,
    /// The number of bytes of the frame that have been encoded.
    pub offset: usize,
}

/// A codec of frames with a length prefix.
///
/// A decoded frame has an empty head, and a body that is a slice of the input, not a copy: keeping a small frame keeps the whole
/// read buffer in memory.
///
/// A length above the limit is an error before the body arrives. For a length within the limit, capacity is reserved as bytes arrive: at
/// most twice the bytes that have arrived, and at most the largest frame, plus 4 KiB. So a length alone costs no memory.
///
/// ```
/// use bytes::{Bytes, BytesMut};
/// use tidewire_conn::Frame;
/// use tidewire_conn::codec::{Codec, LengthDelimited};
///
/// let mut codec = LengthDelimited::default();
/// let mut input = BytesMut::from(&b"\0\0\0\x04tide\0\0"[..]);
/// assert_eq!(codec.decode(&mut input)?, Some(Frame::from(Bytes::from_static(b"tide"))));
/// assert_eq!(codec.decode(&mut input)?, None);
/// assert!(codec.finish(&input).is_err());
/// # Ok::<(), tidewire_conn::codec::LengthDelimitedError>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct LengthDelimited {
    /// Checked by `new`: the prefix and the body of the largest frame fit into one allocation.
    options: LengthDelimitedOptions,
}

/// Options of [`LengthDelimited`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct LengthDelimitedOptions {
    /// The width of the length prefix. Default: [`Four`](LengthPrefix::Four) bytes, enough for any sensible limit.
    pub prefix: LengthPrefix,
    /// The byte order of the length prefix. Default: [`Big`](ByteOrder::Big), the network byte order.
    pub order: ByteOrder,
    /// Limit of a frame, sent or received, without its prefix, in bytes. Default: 1 MiB, far above a usual message, and a
    /// thousand peers that all send the largest frame fit in 1 GiB.
    pub max_frame: usize,
}

impl LengthDelimitedOptions {
    /// Sets [`prefix`](#structfield.prefix).
    #[must_use]
    pub fn prefix(mut self, prefix: LengthPrefix) -> Self {
        self.prefix = prefix;
        self
    }

    /// Sets [`order`](#structfield.order).
    #[must_use]
    pub fn order(mut self, order: ByteOrder) -> Self {
        self.order = order;
        self
    }

    /// Sets [`max_frame`](#structfield.max_frame).
    #[must_use]
    pub fn max_frame(mut self, max_frame: usize) -> Self {
        self.max_frame = max_frame;
        self
    }
}

impl Default for LengthDelimitedOptions {
    fn default() -> Self {
        Self { prefix: LengthPrefix::Four, order: ByteOrder::Big, max_frame: 1 << 20 }
    }
}

/// The width of the length before a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum LengthPrefix {
    /// Frames of up to 255 bytes.
    One = 1,
    /// Frames of less than 64 KiB.
    Two = 2,
    /// Frames of less than 4 GiB.
    Four = 4,
    /// Frames of any size.
    Eight = 8,
}

impl LengthPrefix {
    const fn bytes(self) -> usize {
        self as usize
    }

    /// Returns the size of the largest frame that the prefix can announce and that fits into one allocation with the prefix.
    fn max_frame(self) -> usize {
        let announced = u64::MAX >> (64 - 8 * self.bytes());
        let allocated = isize::MAX.unsigned_abs() - (self.bytes() + READ_AHEAD_BYTES);
        usize::try_from(announced).map_or(allocated, |announced| announced.min(allocated))
    }
}

/// The order of the bytes of a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ByteOrder {
    /// The most significant byte first.
    Big,
    /// The least significant byte first.
    Little,
}

/// An error of [`LengthDelimited`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LengthDelimitedError {
    /// The options allow only empty frames.
    #[error("`max_frame` must be at least 1, got 0")]
    ZeroMaxFrame,
    /// The options allow frames that the prefix cannot announce.
    #[error("`max_frame` must be at most {max} with a length prefix of {} bytes, got {max_frame}", prefix.bytes())]
    HugeMaxFrame {
        /// The value of the option.
        max_frame: usize,
        /// The width of the prefix.
        prefix: LengthPrefix,
        /// The maximum with this prefix.
        max: usize,
    },
    /// The peer announced a frame above the limit.
    #[error("the peer announced a frame of {len} bytes; the limit is {max_frame}")]
    Announced {
        /// The announced length, in bytes.
        len: u64,
        /// The limit.
        max_frame: usize,
    },
    /// The stream ended within a length.
    #[error("the stream ended {missing} bytes before the end of a length prefix")]
    TruncatedPrefix {
        /// The number of missing bytes.
        missing: usize,
    },
    /// The stream ended within a frame, or right after its length.
    #[error("the stream ended {missing} bytes before the end of a frame")]
    TruncatedFrame {
        /// The number of missing bytes.
        missing: usize,
    },
    /// A frame to be sent is above the limit.
    #[error("cannot send a frame of {len} bytes; the limit is {max_frame}")]
    TooLarge {
        /// The length of the frame, in bytes.
        len: usize,
        /// The limit.
        max_frame: usize,
    },
}

/// Capacity that is reserved beyond the end of a frame, so that one read gets the end of the frame and the bytes after it.
const READ_AHEAD_BYTES: usize = 4096;

impl LengthDelimited {
    /// Creates a codec with these options.
    pub fn new(options: LengthDelimitedOptions) -> Result<Self, LengthDelimitedError> {
        let LengthDelimitedOptions { prefix, max_frame, .. } = options;
        let max = prefix.max_frame();
        if max_frame == 0 {
            return Err(LengthDelimitedError::ZeroMaxFrame);
        }
        if max_frame > max {
            return Err(LengthDelimitedError::HugeMaxFrame { max_frame, prefix, max });
        }
        Ok(Self { options })
    }

    /// Returns the value of the length prefix at the front of `input`, if it is complete.
    fn announced_len(&self, input: &[u8]) -> Result<Option<usize>, LengthDelimitedError> {
        let LengthDelimitedOptions { prefix, order, max_frame } = self.options;
        let Some(prefix) = input.get(..prefix.bytes()) else { return Ok(None) };
        let mut bytes = [0; 8];
        let len = match order {
            ByteOrder::Big => {
                bytes[8 - prefix.len()..].copy_from_slice(prefix);
                u64::from_be_bytes(bytes)
            }
            ByteOrder::Little => {
                bytes[..prefix.len()].copy_from_slice(prefix);
                u64::from_le_bytes(bytes)
            }
        };
        match usize::try_from(len) {
            Ok(len) if len <= max_frame => Ok(Some(len)),
            _ => Err(LengthDelimitedError::Announced { len, max_frame }),
        }
    }
}

impl Codec for LengthDelimited {
    type Frame = Frame;
    type Error = LengthDelimitedError;

    fn decode(&mut self, input: &mut BytesMut) -> Result<Option<Frame>, LengthDelimitedError> {
        let Some(len) = self.announced_len(input)? else { return Ok(None) };
        let prefix = self.options.prefix.bytes();
        if input.len() < prefix + len {
            grow_input(input, prefix + len);
            return Ok(None);
        }
        // Usually the frame is the whole input. Taking the input itself avoids a reference count.
        let frame = if input.len() == prefix + len { std::mem::take(input) } else { input.split_to(prefix + len) };
        let mut body = frame.freeze();
        body.advance(prefix);
        Ok(Some(Frame::from(body)))
    }

    fn finish(&mut self, input: &BytesMut) -> Result<(), LengthDelimitedError> {
        let prefix = self.options.prefix.bytes();
        let mut rest = &input[..];
        while !rest.is_empty() {
            let Some(len) = self.announced_len(rest)? else {
                return Err(LengthDelimitedError::TruncatedPrefix { missing: prefix - rest.len() });
            };
            let Some(next) = rest.get(prefix + len..) else {
                return Err(LengthDelimitedError::TruncatedFrame { missing: prefix + len - rest.len() });
            };
            rest = next;
        }
        Ok(())
    }

    fn encode(&mut self, frame: &Frame, output: &mut Batch) -> Result<(), LengthDelimitedError> {
        let LengthDelimitedOptions { prefix, order, max_frame } = self.options;
        let len = frame.len();
        if len > max_frame {
            return Err(LengthDelimitedError::TooLarge { len, max_frame });
        }
        match order {
            ByteOrder::Big => output.put(&(len as u64).to_be_bytes()[8 - prefix.bytes()..]),
            ByteOrder::Little => output.put(&(len as u64).to_le_bytes()[..prefix.bytes()]),
        }
        output.put(frame.head());
        // Small bodies are copied, not cloned: a clone would change the reference count that all receivers share.
        if frame.body().len() < Batch::MIN_SHARED_BYTES {
            output.put(frame.body());
        } else {
            output.put_shared(frame.body().clone());
        }
        Ok(())
    }
}

/// Grows `input` if it is full: to twice its length or to `needed` bytes, whichever is less, plus the read-ahead. `BytesMut::reserve`
/// would double the capacity beyond the limit.
pub(crate) fn grow_input(input: &mut BytesMut, needed: usize) {
    if input.len() < input.capacity() {
        return;
    }
    let target = needed.min(input.len().saturating_mul(2)).saturating_add(READ_AHEAD_BYTES);
    if !input.try_reclaim(target - input.len()) {
        let mut larger = BytesMut::with_capacity(target);
        larger.extend_from_slice(input);
        *input = larger;
    }
}

#[cfg(test)]
mod tests {
    use std::io::IoSlice;

    use bytes::{BufMut, Bytes};
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;
    use crate::Head;

    fn codec(prefix: LengthPrefix, order: ByteOrder, max_frame: usize) -> LengthDelimited {
        LengthDelimited::new(LengthDelimitedOptions { prefix, order, max_frame }).unwrap()
    }

    fn prefixes() -> impl Strategy<Value = LengthPrefix> {
        prop::sample::select(vec![LengthPrefix::One, LengthPrefix::Two, LengthPrefix::Four, LengthPrefix::Eight])
    }

    fn orders() -> impl Strategy<Value = ByteOrder> {
        prop::sample::select(vec![ByteOrder::Big, ByteOrder::Little])
    }

    fn frames(max_body: usize) -> impl Strategy<Value = Vec<Frame>> {
        let head = vec(any::<u8>(), 0..=Head::CAPACITY).prop_map(|head| Head::new(&head).unwrap());
        let head = prop_oneof![Just(Head::default()), head];
        let body = prop_oneof![vec(any::<u8>(), 0..4), vec(any::<u8>(), 0..=max_body)].prop_map(Bytes::from);
        vec((head, body).prop_map(|(head, body)| Frame::new(head, body)), 0..8)
    }

    /// A codec and frames within its limit.
    fn sessions() -> impl Strategy<Value = (LengthDelimited, Vec<Frame>)> {
        (prefixes(), orders()).prop_flat_map(|(prefix, order)| {
            let max_frame = prefix.max_frame().min(3000);
            frames(max_frame - Head::CAPACITY).prop_map(move |frames| (codec(prefix, order, max_frame), frames))
        })
    }

    fn encode(codec: &mut LengthDelimited, frames: &[Frame]) -> Vec<u8> {
        let mut batch = Batch::default();
        for frame in frames {
            codec.encode(frame, &mut batch).unwrap();
        }
        let mut slices = [IoSlice::new(&[]); 64];
        let filled = batch.slices(&mut slices);
        slices[..filled].iter().flat_map(|slice| slice.iter()).copied().collect()
    }

    fn decode_all(codec: &mut LengthDelimited, input: &mut BytesMut) -> Result<Vec<Frame>, LengthDelimitedError> {
        std::iter::from_fn(|| codec.decode(input).transpose()).collect()
    }

    /// Feeds `bytes` as an actor does: fills the free capacity, and reserves more only when none is left.
    fn feed(
        codec: &mut LengthDelimited,
        input: &mut BytesMut,
        mut bytes: &[u8],
        decoded: &mut Vec<Frame>,
    ) -> Result<(), LengthDelimitedError> {
        while !bytes.is_empty() {
            if input.len() == input.capacity() {
                input.reserve(64);
            }
            let n = bytes.len().min(input.capacity() - input.len());
            input.put_slice(&bytes[..n]);
            bytes = &bytes[n..];
            decoded.extend(decode_all(codec, input)?);
        }
        Ok(())
    }

    proptest! {
        #[test]
        fn input_in_chunks_decodes_to_the_same_frames(
            (mut codec, frames) in sessions(),
            sizes in vec(1..2000usize, 1..20),
        ) {
            let wire = encode(&mut codec, &frames);
            for sizes in [sizes, vec![1], vec![usize::MAX]] {
                let (mut input, mut decoded, mut rest) = (BytesMut::new(), Vec::new(), &wire[..]);
                let mut sizes = sizes.iter().cycle();
                while !rest.is_empty() {
                    let (piece, next) = rest.split_at(rest.len().min(*sizes.next().unwrap()));
                    feed(&mut codec, &mut input, piece, &mut decoded).unwrap();
                    rest = next;
                }
                prop_assert_eq!(&decoded, &frames);
                prop_assert!(decoded.iter().all(|frame| frame.head().is_empty()));
                prop_assert_eq!(codec.finish(&input), Ok(()));
            }
        }

        #[test]
        fn truncation_is_reported_except_between_frames(
            prefix in prefixes(),
            order in orders(),
            frames in frames(100),
        ) {
            let mut codec = codec(prefix, order, 255);
            let wire = encode(&mut codec, &frames);
            let (mut start, mut complete) = (0, 0);
            for cut in 0..=wire.len() {
                while frames.get(complete).is_some_and(|frame| start + prefix.bytes() + frame.len() <= cut) {
                    start += prefix.bytes() + frames[complete].len();
                    complete += 1;
                }
                let expected = match cut - start {
                    0 => Ok(()),
                    n if n < prefix.bytes() => {
                        Err(LengthDelimitedError::TruncatedPrefix { missing: prefix.bytes() - n })
                    }
                    n => {
                        let missing = prefix.bytes() + frames[complete].len() - n;
                        Err(LengthDelimitedError::TruncatedFrame { missing })
                    }
                };
                let mut input = BytesMut::from(&wire[..cut]);
                prop_assert_eq!(codec.finish(&input), expected);
                prop_assert_eq!(&decode_all(&mut codec, &mut input).unwrap(), &frames[..complete]);
                prop_assert_eq!(codec.finish(&input), expected);
            }
        }

        #[test]
        fn input_split_anywhere_decodes_to_the_same_frames(
            prefix in prefixes(),
            order in orders(),
            frames in frames(100),
        ) {
            let mut codec = codec(prefix, order, 255);
            let wire = encode(&mut codec, &frames);
            for cut in 0..=wire.len() {
                let (mut input, mut decoded) = (BytesMut::new(), Vec::new());
                feed(&mut codec, &mut input, &wire[..cut], &mut decoded).unwrap();
                feed(&mut codec, &mut input, &wire[cut..], &mut decoded).unwrap();
                prop_assert_eq!(&decoded, &frames);
            }
        }

        #[test]
        fn memory_of_invalid_input_is_bounded(
            prefix in prefixes(),
            order in orders(),
            max_frame in 1..100_000usize,
            // Small bytes make lengths within the limit.
            pieces in vec(prop_oneof![vec(any::<u8>(), 0..3000), vec(0..2u8, 0..3000)], 0..40),
            keeps_frames in any::<bool>(),
        ) {
            let mut codec = codec(prefix, order, max_frame.min(prefix.max_frame()));
            let bound = codec.options.max_frame + prefix.bytes() + READ_AHEAD_BYTES;
            let (mut input, mut decoded) = (BytesMut::new(), Vec::new());
            for piece in pieces {
                let fed = feed(&mut codec, &mut input, &piece, &mut decoded);
                prop_assert!(input.capacity() <= bound, "{} of {bound}", input.capacity());
                if fed.is_err() {
                    break;
                }
                if !keeps_frames {
                    decoded.clear();
                }
            }
            _ = codec.finish(&input);
        }
    }

    #[test]
    fn largest_frame_is_read_within_the_memory_bound() {
        let mut codec = LengthDelimited::default();
        let frame = Frame::from(Bytes::from(vec![b'x'; 1 << 20]));
        let wire = encode(&mut codec, &[frame.clone(), frame.clone()]);
        let (mut input, mut decoded) = (BytesMut::new(), Vec::new());
        for piece in wire.chunks(1000) {
            feed(&mut codec, &mut input, piece, &mut decoded).unwrap();
            assert!(input.capacity() <= (1 << 20) + 4 + READ_AHEAD_BYTES);
        }
        assert_eq!(decoded, [frame.clone(), frame]);
    }

    #[test]
    fn announced_length_alone_reserves_no_memory() {
        let mut codec = codec(LengthPrefix::Eight, ByteOrder::Big, 1 << 40);
        let mut input = BytesMut::from(&(1u64 << 40).to_be_bytes()[..]);
        assert_eq!(codec.decode(&mut input), Ok(None));
        assert!(input.capacity() <= 2 * 8 + READ_AHEAD_BYTES);
    }

    #[test]
    fn length_above_the_limit_fails_before_the_body_arrives() {
        for (prefix, len) in [(LengthPrefix::Two, 101), (LengthPrefix::Four, 1 << 31), (LengthPrefix::Eight, u64::MAX)]
        {
            let mut codec = codec(prefix, ByteOrder::Little, 100);
            let mut input = BytesMut::from(&len.to_le_bytes()[..prefix.bytes()]);
            let capacity = input.capacity();
            let expected = LengthDelimitedError::Announced { len, max_frame: 100 };
            assert_eq!(codec.decode(&mut input), Err(expected));
            assert_eq!(codec.finish(&input), Err(expected));
            assert_eq!(input.capacity(), capacity);
        }
    }

    #[test]
    fn encode_error_leaves_the_batch_unchanged() {
        let mut codec = codec(LengthPrefix::Two, ByteOrder::Big, 3000);
        let mut batch = Batch::default();
        let head = Head::new(b"h").unwrap();
        codec.encode(&Frame::new(head, Bytes::from(vec![0; 2999])), &mut batch).unwrap();
        assert_eq!(batch.len(), 3002);
        let refused = codec.encode(&Frame::new(head, Bytes::from(vec![0; 3000])), &mut batch);
        assert_eq!(refused, Err(LengthDelimitedError::TooLarge { len: 3001, max_frame: 3000 }));
        assert_eq!(batch.len(), 3002);
    }

    #[test]
    fn bodies_are_slices_of_the_input() {
        let mut codec = codec(LengthPrefix::One, ByteOrder::Big, 255);
        let mut input = BytesMut::from(&b"\x02ab"[..]);
        let body = input[1..].as_ptr();
        assert_eq!(codec.decode(&mut input).unwrap().unwrap().body().as_ptr(), body);
    }

    #[test]
    fn limit_must_fit_the_prefix() {
        let new = |prefix, max_frame| {
            LengthDelimited::new(LengthDelimitedOptions { prefix, max_frame, ..Default::default() }).map(|_| ())
        };
        for (prefix, max) in [(LengthPrefix::One, 255), (LengthPrefix::Two, 65_535)] {
            assert_eq!(new(prefix, max), Ok(()));
            let max_frame = max + 1;
            assert_eq!(new(prefix, max_frame), Err(LengthDelimitedError::HugeMaxFrame { max_frame, prefix, max }));
        }
        assert_eq!(new(LengthPrefix::Four, 0), Err(LengthDelimitedError::ZeroMaxFrame));
        let message = new(LengthPrefix::Eight, usize::MAX).unwrap_err().to_string();
        assert!(message.ends_with("with a length prefix of 8 bytes, got 18446744073709551615"), "{message}");
        assert_eq!(new(LengthDelimitedOptions::default().prefix, LengthDelimitedOptions::default().max_frame), Ok(()));
    }
}
