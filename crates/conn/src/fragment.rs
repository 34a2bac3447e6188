//! Fragmentation: large frames are sent in fragments, so that an urgent frame need not wait until a large one is written.
//!
//! The adapter wraps another codec. A frame that fits into one fragment is sent with a prefix of one byte. A larger frame is split
//! into fragments that carry the number of their message, and the actor may write other frames between them. The peer reassembles
//! the message. Handlers and pushers are not affected.
//!
//! A fragment is a frame of the inner codec, and any codec may encode a frame in parts ([`Codec::encode_part`]). So fragments
//! need no support in the outbox, and endless reply streams are not a special case.
//!
//! ```text
//! whole message    1 byte  0b11                                            payload
//! first fragment   1 byte  0b01   message: u32   total length: u64         payload
//! next fragments   1 byte  0b00   message: u32                             payload
//! last fragment    1 byte  0b10   message: u32                             payload
//! ```
//!
//! Numbers are big-endian. Every fragment except the last has a payload, so the length of a message limits its number of fragments.

use bytes::{Buf, Bytes, BytesMut};

use crate::codec::{Batch, Codec, EncodePosition};
use crate::{Frame, Head};

const FIRST: u8 = 0b01;
const LAST: u8 = 0b10;

/// Splits large frames of another codec into fragments, and reassembles them: see [`Codec::encode_part`].
///
/// ```
/// use bytes::{Bytes, BytesMut};
/// use tidewire_conn::Frame;
/// use tidewire_conn::codec::{Batch, Codec, FragmentOptions, Fragmented, LengthDelimited};
///
/// let mut codec = Fragmented::new(LengthDelimited::default(), FragmentOptions::default());
/// let large = Frame::from(Bytes::from(vec![7; 100_000]));
/// let mut batch = Batch::default();
/// let rest = codec.encode_part(&large, Default::default(), &mut batch)?;
/// // Only a part has been encoded, and an urgent frame can follow.
/// assert!(rest.is_some() && batch.len() < 20_000);
/// codec.encode(&Frame::from(Bytes::from_static(b"urgent")), &mut batch)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Fragmented<C> {
    inner: C,
    options: FragmentOptions,
    /// The number of messages that were sent in fragments.
    sent: u64,
    /// The number of messages whose first fragment has arrived.
    begun: u64,
    /// Incomplete messages, in the order in which they began.
    assemblies: Vec<Assembly>,
    /// The total payload of the incomplete messages, in bytes.
    held: usize,
}

/// An incomplete message.
#[derive(Debug)]
struct Assembly {
    message: u32,
    /// The position among all messages that have begun, counted from one.
    ordinal: u64,
    total: usize,
    payload: BytesMut,
}

/// Options of [`Fragmented`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct FragmentOptions {
    /// Number of bytes of a message in each fragment. Default: 16 KiB, so that four fragments fill a batch.
    pub fragment_bytes: usize,
    /// Limit of a message, sent or received, in bytes. Default: 64 MiB, far more than an unfragmented frame may have.
    pub max_message: usize,
    /// Limit of the messages that are incomplete at one time. Default: 8, more than the three that an actor of this crate sends at a
    /// time.
    pub max_assemblies: usize,
    /// Limit of the bytes that incomplete messages hold together; their buffers may be twice as large. Default: 64 MiB, one
    /// message of the largest size.
    pub max_held: usize,
}

impl FragmentOptions {
    /// Sets [`fragment_bytes`](#structfield.fragment_bytes).
    #[must_use]
    pub fn fragment_bytes(mut self, fragment_bytes: usize) -> Self {
        self.fragment_bytes = fragment_bytes;
        self
    }

    /// Sets [`max_message`](#structfield.max_message).
    #[must_use]
    pub fn max_message(mut self, max_message: usize) -> Self {
        self.max_message = max_message;
        self
    }

    /// Sets [`max_assemblies`](#structfield.max_assemblies).
    #[must_use]
    pub fn max_assemblies(mut self, max_assemblies: usize) -> Self {
        self.max_assemblies = max_assemblies;
        self
    }

    /// Sets [`max_held`](#structfield.max_held).
    #[must_use]
    pub fn max_held(mut self, max_held: usize) -> Self {
        self.max_held = max_held;
        self
    }
}

impl Default for FragmentOptions {
    fn default() -> Self {
        Self { fragment_bytes: 16 * 1024, max_message: 64 << 20, max_assemblies: 8, max_held: 64 << 20 }
    }
}

/// An error of [`Fragmented`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FragmentError<E: std::error::Error + 'static> {
    /// The inner codec failed.
    #[error(transparent)]
    Codec(#[from] E),
    /// The first byte of a fragment has unknown flags, or the fragment is too short for its header.
    #[error(
        "invalid header in a fragment of {len} bytes: expected flags from 0x00 to 0x03 and their fields, got {flags:#04x}"
    )]
    InvalidHeader {
        /// The first byte, or zero if the fragment is empty.
        flags: u8,
        /// The length of the fragment, in bytes.
        len: usize,
    },
    /// A message is above the limit.
    #[error("message of {len} bytes exceeds the limit of {max}")]
    TooLarge {
        /// The actual or announced length, in bytes.
        len: u64,
        /// The limit.
        max: usize,
    },
    /// Too many messages are incomplete.
    #[error("too many incomplete messages; the limit is {max}")]
    TooManyMessages {
        /// The limit.
        max: usize,
    },
    /// Incomplete messages hold too many bytes.
    #[error("incomplete messages exceed the limit of {max} bytes")]
    TooManyBytes {
        /// The limit.
        max: usize,
    },
    /// A second first fragment of the same message.
    #[error("message {message} has two first fragments")]
    DuplicateFirst {
        /// The number of the message.
        message: u32,
    },
    /// A fragment continues a message that has not begun, or is already complete.
    #[error("fragment of message {message}, which has no first fragment")]
    UnknownMessage {
        /// The number of the message.
        message: u32,
    },
    /// A fragment that is not the last has no payload.
    #[error("empty fragment of message {message}; only the last fragment may be empty")]
    EmptyFragment {
        /// The number of the message.
        message: u32,
    },
    /// A message has more or fewer bytes than its first fragment announced.
    #[error("message {message} has {len} bytes, but {announced} were announced")]
    LengthMismatch {
        /// The number of the message.
        message: u32,
        /// The announced length, in bytes.
        announced: usize,
        /// The actual length, in bytes.
        len: usize,
    },
    /// The stream ended before a message was complete.
    #[error("the stream ended before message {message} was complete")]
    Truncated {
        /// The number of the message.
        message: u32,
    },
}

/// The header of a fragment.
struct Header {
    flags: u8,
    message: u32,
    total: u64,
}

impl Header {
    /// Returns a buffer with the encoded header, and its length.
    fn bytes(self) -> ([u8; 13], usize) {
        let mut bytes = [0; 13];
        bytes[0] = self.flags;
        bytes[1..5].copy_from_slice(&self.message.to_be_bytes());
        bytes[5..].copy_from_slice(&self.total.to_be_bytes());
        (bytes, Self::len(self.flags))
    }

    fn len(flags: u8) -> usize {
        match flags & (FIRST | LAST) {
            FIRST => 13,
            0 | LAST => 5,
            _ => 1,
        }
    }

    fn parse<E: std::error::Error>(payload: &mut Bytes) -> Result<Self, FragmentError<E>> {
        let (len, flags) = (payload.len(), payload.first().copied());
        let malformed = FragmentError::InvalidHeader { flags: flags.unwrap_or(0), len };
        let flags = flags.filter(|flags| flags & !(FIRST | LAST) == 0).ok_or(malformed)?;
        if len < Self::len(flags) {
            return Err(FragmentError::InvalidHeader { flags, len });
        }
        payload.advance(1);
        let message = if flags == FIRST | LAST { 0 } else { payload.get_u32() };
        let total = if flags == FIRST { payload.get_u64() } else { 0 };
        Ok(Self { flags, message, total })
    }
}

impl<C: Codec<Frame = Frame>> Fragmented<C> {
    /// Wraps another codec, whose frame limit must be at least the fragment size plus 13 bytes.
    pub fn new(inner: C, options: FragmentOptions) -> Self {
        let options = options.fragment_bytes(options.fragment_bytes.max(1));
        Self { inner, options, sent: 0, begun: 0, assemblies: Vec::new(), held: 0 }
    }

    /// Returns a fragment with at most `len` bytes of a frame, beginning at byte `from`, and the number of these bytes. The head of the
    /// fragment has the header, and as much of the frame's head as fits after it.
    fn fragment(frame: &Frame, from: usize, len: usize, header: &[u8]) -> (Frame, usize) {
        let head = frame.head().get(from..).unwrap_or_default();
        let head_len = head.len().min(len).min(Head::CAPACITY - header.len());
        let mut bytes = [0; Head::CAPACITY];
        bytes[..header.len()].copy_from_slice(header);
        bytes[header.len()..header.len() + head_len].copy_from_slice(&head[..head_len]);
        // Never too long, because `head_len` is limited above.
        let fragment_head = Head::new(&bytes[..header.len() + head_len]).unwrap_or_default();
        let body = if head_len < head.len() {
            Bytes::new()
        } else {
            let start = (from + head_len) - frame.head().len();
            frame.body().slice(start..frame.body().len().min(start + len - head_len))
        };
        let taken = head_len + body.len();
        (Frame::new(fragment_head, body), taken)
    }

    /// Adds a fragment to its message. Returns the message if it is complete.
    fn assemble(&mut self, fragment: Frame) -> Result<Option<Frame>, FragmentError<C::Error>> {
        // Decoded frames usually have no head.
        let mut payload = if fragment.head().is_empty() {
            fragment.body().clone()
        } else {
            Bytes::from([fragment.head(), fragment.body()].concat())
        };
        drop(fragment);
        let Header { flags, message, total } = Header::parse(&mut payload)?;
        if flags == FIRST | LAST {
            let max = self.options.max_message;
            if payload.len() > max {
                return Err(FragmentError::TooLarge { len: payload.len() as u64, max });
            }
            return Ok(Some(Frame::from(payload)));
        }
        let index = self.assemblies.iter().position(|assembly| assembly.message == message);
        let index = if flags == FIRST {
            self.begin(index, message, total)?
        } else {
            index.ok_or(FragmentError::UnknownMessage { message })?
        };
        if flags != LAST && payload.is_empty() {
            return Err(FragmentError::EmptyFragment { message });
        }
        self.held += payload.len();
        if self.held > self.options.max_held {
            return Err(FragmentError::TooManyBytes { max: self.options.max_held });
        }
        let assembly = &mut self.assemblies[index];
        assembly.payload.extend_from_slice(&payload);
        let (announced, len) = (assembly.total, assembly.payload.len());
        if len > announced || flags == LAST && len < announced {
            return Err(FragmentError::LengthMismatch { message, announced, len });
        }
        if flags != LAST {
            return Ok(None);
        }
        let complete = self.assemblies.remove(index).payload;
        self.held -= complete.len();
        if self.assemblies.is_empty() {
            self.assemblies = Vec::new();
        }
        Ok(Some(Frame::from(complete.freeze())))
    }

    /// Begins a message, unless it is `known` or a limit is reached. Returns its index.
    fn begin(&mut self, known: Option<usize>, message: u32, total: u64) -> Result<usize, FragmentError<C::Error>> {
        let FragmentOptions { max_message: max, max_assemblies, .. } = self.options;
        if known.is_some() {
            return Err(FragmentError::DuplicateFirst { message });
        }
        let Some(total) = usize::try_from(total).ok().filter(|total| *total <= max) else {
            return Err(FragmentError::TooLarge { len: total, max });
        };
        if self.assemblies.len() >= max_assemblies {
            return Err(FragmentError::TooManyMessages { max: max_assemblies });
        }
        self.begun += 1;
        self.assemblies.push(Assembly { message, ordinal: self.begun, total, payload: BytesMut::new() });
        Ok(self.assemblies.len() - 1)
    }
}

impl<C: Codec<Frame = Frame>> Codec for Fragmented<C> {
    type Frame = Frame;
    type Error = FragmentError<C::Error>;

    fn decode(&mut self, input: &mut BytesMut) -> Result<Option<Frame>, Self::Error> {
        while let Some(fragment) = self.inner.decode(input)? {
            if let Some(message) = self.assemble(fragment)? {
                return Ok(Some(message));
            }
        }
        Ok(None)
    }

    fn finish(&mut self, input: &BytesMut) -> Result<(), Self::Error> {
        self.inner.finish(input)?;
        match self.assemblies.first() {
            None => Ok(()),
            Some(&Assembly { message, .. }) => Err(FragmentError::Truncated { message }),
        }
    }

    fn has_partial_frame(&self, input: &BytesMut) -> bool {
        self.inner.has_partial_frame(input)
    }

    fn partial_message(&self) -> Option<u64> {
        self.assemblies.first().map(|assembly| assembly.ordinal)
    }

    fn held_bytes(&self) -> usize {
        self.held + self.inner.held_bytes()
    }

    /// Encodes all fragments of a frame.
    fn encode(&mut self, frame: &Frame, output: &mut Batch) -> Result<(), Self::Error> {
        let mut position = Some(EncodePosition::default());
        while let Some(next) = position {
            position = self.encode_part(frame, next, output)?;
        }
        Ok(())
    }

    fn encode_part(
        &mut self,
        frame: &Frame,
        position: EncodePosition,
        output: &mut Batch,
    ) -> Result<Option<EncodePosition>, Self::Error> {
        let FragmentOptions { fragment_bytes, max_message: max, .. } = self.options;
        let EncodePosition { mut message, offset } = position;
        let total = frame.len();
        if total > max {
            return Err(FragmentError::TooLarge { len: total as u64, max });
        }
        // The longest head does not fit into one fragment together with the flags.
        let head_fits = frame.head().len() < Head::CAPACITY;
        let flags = match (offset == 0, total - offset <= fragment_bytes) {
            (true, true) if head_fits => FIRST | LAST,
            (true, _) => FIRST,
            (false, true) => LAST,
            (false, false) => 0,
        };
        if flags == FIRST {
            self.sent += 1;
            message = self.sent;
        }
        #[expect(clippy::cast_possible_truncation, reason = "message numbers wrap around")]
        let header = Header { flags, message: message as u32, total: total as u64 };
        let (header, header_len) = header.bytes();
        let (fragment, len) = Self::fragment(frame, offset, fragment_bytes, &header[..header_len]);
        self.inner.encode(&fragment, output)?;
        Ok((flags & LAST == 0).then_some(EncodePosition { message, offset: offset + len }))
    }

    fn encode_control(&mut self, output: &mut Batch, is_last: bool) {
        self.inner.encode_control(output, is_last);
    }

    fn is_closing(&self) -> bool {
        self.inner.is_closing()
    }

    fn is_closed(&self) -> bool {
        self.inner.is_closed()
    }
}

#[cfg(test)]
mod tests {
    use std::io::IoSlice;

    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;
    use crate::codec::{LengthDelimited, LengthDelimitedError};

    type Error = FragmentError<LengthDelimitedError>;

    fn codec(fragment_bytes: usize) -> Fragmented<LengthDelimited> {
        Fragmented::new(LengthDelimited::default(), FragmentOptions::default().fragment_bytes(fragment_bytes))
    }

    fn bytes(batch: &Batch) -> Vec<u8> {
        let mut slices = vec![IoSlice::new(&[]); 4096];
        let filled = batch.slices(&mut slices);
        slices[..filled].iter().flat_map(|slice| slice.iter()).copied().collect()
    }

    fn decode_all(codec: &mut Fragmented<LengthDelimited>, input: &mut BytesMut) -> Result<Vec<Frame>, Error> {
        std::iter::from_fn(|| codec.decode(input).transpose()).collect()
    }

    /// Decodes frames with these payloads, as a peer would send them.
    fn decode_fragments(codec: &mut Fragmented<LengthDelimited>, fragments: &[&[u8]]) -> Result<Vec<Frame>, Error> {
        let mut batch = Batch::default();
        for fragment in fragments {
            LengthDelimited::default().encode(&Frame::from(Bytes::copy_from_slice(fragment)), &mut batch).unwrap();
        }
        decode_all(codec, &mut BytesMut::from(&bytes(&batch)[..]))
    }

    fn frames() -> impl Strategy<Value = Vec<Frame>> {
        let head = vec(any::<u8>(), 0..=Head::CAPACITY).prop_map(|head| Head::new(&head).unwrap());
        let body = vec(any::<u8>(), 0..500).prop_map(Bytes::from);
        vec((head, body).prop_map(|(head, body)| Frame::new(head, body)), 1..4)
    }

    proptest! {
        /// The parts of several frames are interleaved in any order, and the input is split anywhere.
        #[test]
        fn interleaved_fragments_are_reassembled(
            frames in frames(),
            fragment in prop_oneof![1..20_usize, 80..100_usize, 400..700_usize],
            turns in vec(any::<prop::sample::Index>(), 0..2000),
            cut in any::<prop::sample::Index>(),
        ) {
            let mut sender = codec(fragment);
            let mut batch = Batch::default();
            let mut parts: Vec<_> = frames.iter().map(|frame| (frame, EncodePosition::default())).collect();
            let mut expected = Vec::new();
            let mut turns = turns.into_iter();
            while !parts.is_empty() {
                let turn = turns.next().map_or(0, |turn| turn.index(parts.len()));
                let (frame, part) = parts[turn];
                match sender.encode_part(frame, part, &mut batch).unwrap() {
                    Some(next) => parts[turn].1 = next,
                    None => expected.push(parts.remove(turn).0.clone()),
                }
            }
            let wire = bytes(&batch);
            let mut receiver = codec(1);
            let (first, second) = wire.split_at(cut.index(wire.len() + 1));
            let mut input = BytesMut::from(first);
            let mut received = decode_all(&mut receiver, &mut input).unwrap();
            input.extend_from_slice(second);
            received.extend(decode_all(&mut receiver, &mut input).unwrap());
            prop_assert_eq!(received, expected);
            prop_assert_eq!(receiver.finish(&input), Ok(()));
            prop_assert_eq!((receiver.held, receiver.partial_message()), (0, None));
        }

        #[test]
        fn invalid_fragments_do_not_panic(fragments in vec(vec(any::<u8>(), 0..20), 0..10)) {
            let fragments: Vec<&[u8]> = fragments.iter().map(Vec::as_slice).collect();
            let _ = decode_fragments(&mut codec(1), &fragments);
        }
    }

    /// Returns the first fragment of a message with this number and length, with one byte of payload.
    fn first(message: u8, total: u64) -> Vec<u8> {
        [&[FIRST, 0, 0, 0, message][..], &total.to_be_bytes(), b"x"].concat()
    }

    #[test]
    fn every_invalid_fragment_has_its_error() {
        let next = |flags, payload: &[u8]| [&[flags, 0, 0, 0, 1][..], payload].concat();
        let max = FragmentOptions::default().max_message;
        let cases: [(&[Vec<u8>], Error); 9] = [
            (&[vec![]], FragmentError::InvalidHeader { flags: 0, len: 0 }),
            (&[vec![4, 0, 0, 0, 0]], FragmentError::InvalidHeader { flags: 4, len: 5 }),
            (&[first(1, 2)[..12].to_vec()], FragmentError::InvalidHeader { flags: FIRST, len: 12 }),
            (&[next(0, b"x")], FragmentError::UnknownMessage { message: 1 }),
            (&[first(1, 9), first(1, 9)], FragmentError::DuplicateFirst { message: 1 }),
            (&[first(1, max as u64 + 1)], FragmentError::TooLarge { len: max as u64 + 1, max }),
            (&[first(1, 9), next(0, b"")], FragmentError::EmptyFragment { message: 1 }),
            (&[first(1, 2), next(0, b"xx")], FragmentError::LengthMismatch { message: 1, announced: 2, len: 3 }),
            (&[first(1, 9), next(LAST, b"xx")], FragmentError::LengthMismatch { message: 1, announced: 9, len: 3 }),
        ];
        for (fragments, error) in cases {
            let fragments: Vec<&[u8]> = fragments.iter().map(Vec::as_slice).collect();
            assert_eq!(decode_fragments(&mut codec(1), &fragments), Err(error), "{fragments:?}");
        }
    }

    #[test]
    fn incomplete_messages_are_limited() {
        let options = FragmentOptions::default().max_assemblies(3).max_held(100);
        let mut receiver = Fragmented::new(LengthDelimited::default(), options);
        let many: Vec<_> = (1..=4).map(|message| first(message, 1000)).collect();
        assert_eq!(decode_fragments(&mut receiver, &[&many[0], &many[1], &many[2]]), Ok(vec![]));
        assert_eq!(receiver.partial_message(), Some(1));
        assert_eq!(receiver.finish(&BytesMut::new()), Err(FragmentError::Truncated { message: 1 }));
        let much = [&[0, 0, 0, 0, 1][..], &[0; 98]].concat();
        assert_eq!(decode_fragments(&mut receiver, &[&much]), Err(FragmentError::TooManyBytes { max: 100 }));
        assert_eq!(decode_fragments(&mut receiver, &[&many[3]]), Err(FragmentError::TooManyMessages { max: 3 }));
    }
}
