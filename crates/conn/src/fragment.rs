//! Fragments: large frames in pieces, so that an urgent frame need not wait for the end of a large one.
//!
//! The adapter sits between the frames of the application and another codec. A frame of up to one fragment passes with one byte
//! before it. A larger one is cut into fragments that name their message, and the actor writes other frames between them. The
//! peer assembles them. Handlers and pushers do not notice.
//!
//! A fragment is a frame of the inner codec, and any codec may encode a frame in parts ([`Codec::encode_part`]). So fragments
//! need no support in the outbox, and a reply without an end is not a special case.
//!
//! ```text
//! whole message    1 byte  0b11                                            payload
//! first fragment   1 byte  0b01   message: u32   length of all: u64        payload
//! next ones        1 byte  0b00   message: u32                             payload
//! last fragment    1 byte  0b10   message: u32                             payload
//! ```
//!
//! Numbers are big-endian. A fragment that is not the last has a payload, so the number of fragments is bounded by the bytes.

use bytes::{Buf, Bytes, BytesMut};

use crate::codec::{Batch, Codec, Part};
use crate::{Frame, Head};

const FIRST: u8 = 0b01;
const LAST: u8 = 0b10;

/// Cuts large frames of another codec into fragments, and puts them together again: see [`Codec::encode_part`].
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
/// // Only a part of it has been encoded. Meanwhile something urgent may go out.
/// assert!(rest.is_some() && batch.len() < 20_000);
/// codec.encode(&Frame::from(Bytes::from_static(b"urgent")), &mut batch)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Fragmented<C> {
    inner: C,
    options: FragmentOptions,
    /// Messages that were cut so far.
    sent: u64,
    /// Messages of which a first fragment has come so far.
    begun: u64,
    /// In the order in which they began.
    assemblies: Vec<Assembly>,
    /// The bytes that they hold together.
    held: usize,
}

/// A message that is not whole.
#[derive(Debug)]
struct Assembly {
    message: u32,
    /// Counted from one.
    ordinal: u64,
    total: usize,
    payload: BytesMut,
}

/// Options of [`Fragmented`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct FragmentOptions {
    /// Size of a fragment, in bytes of its message. Default: 16 KiB, so that four of them fill a batch.
    pub fragment_bytes: usize,
    /// Limit of a message, sent or received, in bytes. Default: 64 MiB, far more than an unfragmented frame may have.
    pub max_message: usize,
    /// Limit of the messages that are incomplete at one time. Default: 8, twice as many as our own actor sends.
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

/// What can be wrong with fragments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FragmentError<E: std::error::Error + 'static> {
    /// The codec below failed.
    #[error(transparent)]
    Codec(#[from] E),
    /// A frame is too short for what its first byte announces, or that byte is none of ours.
    #[error(
        "a fragment of {len} bytes that begins with {flags:#04x}: expected 0x00 to 0x03 and the header that goes with it"
    )]
    Header {
        /// Its first byte, zero if there is none.
        flags: u8,
        /// The bytes it has.
        len: usize,
    },
    /// A message is above the limit.
    #[error("a message of {len} bytes: at most {max} are allowed")]
    TooLarge {
        /// What it has, or was announced to have.
        len: u64,
        /// The limit.
        max: usize,
    },
    /// Too many messages are incomplete.
    #[error("more than {max} messages are incomplete")]
    TooMany {
        /// The limit.
        max: usize,
    },
    /// Incomplete messages hold too much together.
    #[error("incomplete messages hold more than {max} bytes")]
    TooMuchHeld {
        /// The limit.
        max: usize,
    },
    /// A message began that had begun.
    #[error("message {message} begins twice")]
    Twice {
        /// Its number.
        message: u32,
    },
    /// A fragment continues a message that has not begun, or is complete.
    #[error("a fragment continues message {message}, which has not begun")]
    Unknown {
        /// Its number.
        message: u32,
    },
    /// A fragment that is not the last has no payload.
    #[error("an empty fragment of message {message}")]
    Empty {
        /// Its number.
        message: u32,
    },
    /// A message has more or fewer bytes than were announced.
    #[error("message {message} was announced with {announced} bytes and has {len}")]
    Length {
        /// Its number.
        message: u32,
        /// What its first fragment said.
        announced: usize,
        /// What it has.
        len: usize,
    },
    /// The stream ended before a message was whole.
    #[error("the stream ended before message {message} was whole")]
    Truncated {
        /// Its number.
        message: u32,
    },
}

/// What precedes the payload of a fragment.
struct Header {
    flags: u8,
    message: u32,
    total: u64,
}

impl Header {
    /// The first so many of these.
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
        let malformed = FragmentError::Header { flags: flags.unwrap_or(0), len };
        let flags = flags.filter(|flags| flags & !(FIRST | LAST) == 0).ok_or(malformed)?;
        if len < Self::len(flags) {
            return Err(FragmentError::Header { flags, len });
        }
        payload.advance(1);
        let message = if flags == FIRST | LAST { 0 } else { payload.get_u32() };
        let total = if flags == FIRST { payload.get_u64() } else { 0 };
        Ok(Self { flags, message, total })
    }
}

impl<C: Codec<Frame = Frame>> Fragmented<C> {
    /// Fragments over the frames of another codec, whose limit must leave room for a fragment and 13 bytes.
    pub fn new(inner: C, options: FragmentOptions) -> Self {
        let options = options.fragment_bytes(options.fragment_bytes.max(1));
        Self { inner, options, sent: 0, begun: 0, assemblies: Vec::new(), held: 0 }
    }

    /// A piece of a frame, of at most `len` bytes, behind a header, and how many bytes it has. Of the frame's own head it has
    /// what fits behind the header.
    fn piece(frame: &Frame, from: usize, len: usize, header: &[u8]) -> (Frame, usize) {
        let head = frame.head().get(from..).unwrap_or_default();
        let own = head.len().min(len).min(Head::CAPACITY - header.len());
        let mut bytes = [0; Head::CAPACITY];
        bytes[..header.len()].copy_from_slice(header);
        bytes[header.len()..header.len() + own].copy_from_slice(&head[..own]);
        // It fits by construction.
        let inline = Head::new(&bytes[..header.len() + own]).unwrap_or_default();
        let body = if own < head.len() {
            Bytes::new()
        } else {
            let start = (from + own) - frame.head().len();
            frame.body().slice(start..frame.body().len().min(start + len - own))
        };
        let taken = own + body.len();
        (Frame::new(inline, body), taken)
    }

    /// Takes in a fragment, and gives the message if it is whole.
    fn assemble(&mut self, fragment: Frame) -> Result<Option<Frame>, FragmentError<C::Error>> {
        // What a codec decodes has no head of its own, as a rule.
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
        let place = self.assemblies.iter().position(|assembly| assembly.message == message);
        let place = if flags == FIRST {
            self.begin(place, message, total)?
        } else {
            place.ok_or(FragmentError::Unknown { message })?
        };
        if flags != LAST && payload.is_empty() {
            return Err(FragmentError::Empty { message });
        }
        self.held += payload.len();
        if self.held > self.options.max_held {
            return Err(FragmentError::TooMuchHeld { max: self.options.max_held });
        }
        let assembly = &mut self.assemblies[place];
        assembly.payload.extend_from_slice(&payload);
        let (announced, len) = (assembly.total, assembly.payload.len());
        if len > announced || flags == LAST && len < announced {
            return Err(FragmentError::Length { message, announced, len });
        }
        if flags != LAST {
            return Ok(None);
        }
        let whole = self.assemblies.remove(place).payload;
        self.held -= whole.len();
        if self.assemblies.is_empty() {
            self.assemblies = Vec::new();
        }
        Ok(Some(Frame::from(whole.freeze())))
    }

    fn begin(&mut self, known: Option<usize>, message: u32, total: u64) -> Result<usize, FragmentError<C::Error>> {
        let FragmentOptions { max_message: max, max_assemblies, .. } = self.options;
        if known.is_some() {
            return Err(FragmentError::Twice { message });
        }
        let Some(total) = usize::try_from(total).ok().filter(|total| *total <= max) else {
            return Err(FragmentError::TooLarge { len: total, max });
        };
        if self.assemblies.len() >= max_assemblies {
            return Err(FragmentError::TooMany { max: max_assemblies });
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
            if let Some(whole) = self.assemble(fragment)? {
                return Ok(Some(whole));
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

    fn is_midway(&self, input: &BytesMut) -> bool {
        self.inner.is_midway(input)
    }

    fn assembling(&self) -> Option<u64> {
        self.assemblies.first().map(|assembly| assembly.ordinal)
    }

    fn held_bytes(&self) -> usize {
        self.held + self.inner.held_bytes()
    }

    /// The whole frame, in as many fragments as it takes.
    fn encode(&mut self, frame: &Frame, output: &mut Batch) -> Result<(), Self::Error> {
        let mut part = Some(Part::default());
        while let Some(next) = part {
            part = self.encode_part(frame, next, output)?;
        }
        Ok(())
    }

    fn encode_part(&mut self, frame: &Frame, part: Part, output: &mut Batch) -> Result<Option<Part>, Self::Error> {
        let FragmentOptions { fragment_bytes, max_message: max, .. } = self.options;
        let Part { mut message, offset } = part;
        let total = frame.len();
        if total > max {
            return Err(FragmentError::TooLarge { len: total as u64, max });
        }
        // With a byte before it, the longest head is too long for one piece.
        let fits = frame.head().len() < Head::CAPACITY;
        let flags = match (offset == 0, total - offset <= fragment_bytes) {
            (true, true) if fits => FIRST | LAST,
            (true, _) => FIRST,
            (false, true) => LAST,
            (false, false) => 0,
        };
        if flags == FIRST {
            self.sent += 1;
            message = self.sent;
        }
        #[expect(clippy::cast_possible_truncation, reason = "a number may come again when its message is long whole")]
        let header = Header { flags, message: message as u32, total: total as u64 };
        let (header, header_len) = header.bytes();
        let (piece, taken) = Self::piece(frame, offset, fragment_bytes, &header[..header_len]);
        self.inner.encode(&piece, output)?;
        Ok((flags & LAST == 0).then_some(Part { message, offset: offset + taken }))
    }

    fn control(&mut self, output: &mut Batch, is_last: bool) {
        self.inner.control(output, is_last);
    }

    fn is_leaving(&self) -> bool {
        self.inner.is_leaving()
    }

    fn is_over(&self) -> bool {
        self.inner.is_over()
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

    /// What a peer sends: frames of this payload.
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
        /// Parts of several frames in any order, and the bytes cut anywhere: every frame arrives as it was.
        #[test]
        fn what_is_cut_and_mixed_comes_whole(
            frames in frames(),
            fragment in prop_oneof![1..20_usize, 80..100_usize, 400..700_usize],
            turns in vec(any::<prop::sample::Index>(), 0..2000),
            cut in any::<prop::sample::Index>(),
        ) {
            let mut sender = codec(fragment);
            let mut batch = Batch::default();
            let mut parts: Vec<_> = frames.iter().map(|frame| (frame, Part::default())).collect();
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
            prop_assert_eq!((receiver.held, receiver.assembling()), (0, None));
        }

        #[test]
        fn rubbish_is_an_error_and_never_a_panic(fragments in vec(vec(any::<u8>(), 0..20), 0..10)) {
            let fragments: Vec<&[u8]> = fragments.iter().map(Vec::as_slice).collect();
            let _ = decode_fragments(&mut codec(1), &fragments);
        }
    }

    /// The first fragment of a message with that number and length, with a byte of payload.
    fn first(message: u8, total: u64) -> Vec<u8> {
        [&[FIRST, 0, 0, 0, message][..], &total.to_be_bytes(), b"x"].concat()
    }

    #[test]
    fn bad_fragments_are_told_apart() {
        let next = |flags, payload: &[u8]| [&[flags, 0, 0, 0, 1][..], payload].concat();
        let max = FragmentOptions::default().max_message;
        let cases: [(&[Vec<u8>], Error); 9] = [
            (&[vec![]], FragmentError::Header { flags: 0, len: 0 }),
            (&[vec![4, 0, 0, 0, 0]], FragmentError::Header { flags: 4, len: 5 }),
            (&[first(1, 2)[..12].to_vec()], FragmentError::Header { flags: FIRST, len: 12 }),
            (&[next(0, b"x")], FragmentError::Unknown { message: 1 }),
            (&[first(1, 9), first(1, 9)], FragmentError::Twice { message: 1 }),
            (&[first(1, max as u64 + 1)], FragmentError::TooLarge { len: max as u64 + 1, max }),
            (&[first(1, 9), next(0, b"")], FragmentError::Empty { message: 1 }),
            (&[first(1, 2), next(0, b"xx")], FragmentError::Length { message: 1, announced: 2, len: 3 }),
            (&[first(1, 9), next(LAST, b"xx")], FragmentError::Length { message: 1, announced: 9, len: 3 }),
        ];
        for (fragments, error) in cases {
            let fragments: Vec<&[u8]> = fragments.iter().map(Vec::as_slice).collect();
            assert_eq!(decode_fragments(&mut codec(1), &fragments), Err(error), "{fragments:?}");
        }
    }

    #[test]
    fn what_incomplete_messages_hold_is_limited() {
        let options = FragmentOptions::default().max_assemblies(3).max_held(100);
        let mut receiver = Fragmented::new(LengthDelimited::default(), options);
        let many: Vec<_> = (1..=4).map(|message| first(message, 1000)).collect();
        assert_eq!(decode_fragments(&mut receiver, &[&many[0], &many[1], &many[2]]), Ok(vec![]));
        assert_eq!(receiver.assembling(), Some(1));
        assert_eq!(receiver.finish(&BytesMut::new()), Err(FragmentError::Truncated { message: 1 }));
        let much = [&[0, 0, 0, 0, 1][..], &[0; 98]].concat();
        assert_eq!(decode_fragments(&mut receiver, &[&much]), Err(FragmentError::TooMuchHeld { max: 100 }));
        assert_eq!(decode_fragments(&mut receiver, &[&many[3]]), Err(FragmentError::TooMany { max: 3 }));
    }
}
