//! Frames: a head for one receiver and a body that receivers share.
//!
//! A push names the subscription of its receiver, while its data is the same for all. The head is therefore stored in the frame
//! itself, and the body is reference-counted: a broadcast allocates once, whatever the number of receivers. Only an unusually
//! long head is allocated, so queues of frames stay small.

use std::fmt;

use bytes::Bytes;

/// What goes over a connection.
pub trait FrameLike: Send + 'static {
    /// What it counts for in queues bounded by bytes.
    fn size(&self) -> usize;
}

impl FrameLike for Bytes {
    fn size(&self) -> usize {
        self.len()
    }
}

impl FrameLike for Vec<u8> {
    fn size(&self) -> usize {
        self.len()
    }
}

impl FrameLike for String {
    fn size(&self) -> usize {
        self.len()
    }
}

impl FrameLike for Frame {
    fn size(&self) -> usize {
        self.len()
    }
}

/// A head and a body that follow each other on the wire.
///
/// Where one ends and the other begins is a matter of the sender: frames are equal if their bytes are. A clone copies the head
/// and shares the body.
///
/// ```
/// use bytes::Bytes;
/// use tidewire_conn::{Frame, Head};
///
/// let body = Bytes::from_static(b" is up");
/// let frame = Frame::new(Head::new(b"the tide")?, body.clone());
/// assert_eq!(frame.len(), 14);
/// assert_eq!(frame, Frame::from(Bytes::from_static(b"the tide is up")));
/// # Ok::<(), tidewire_conn::HeadTooLong>(())
/// ```
#[derive(Clone, Default)]
pub struct Frame {
    head: Own,
    body: Bytes,
}

/// The head of a frame, where it takes least.
#[derive(Clone)]
enum Own {
    /// Of these, the first `len` count.
    Short {
        len: u8,
        bytes: [u8; Self::SHORT],
    },
    Long(Box<Head>),
}

impl Own {
    /// As long as a head may be for a [`Frame`] of 64 bytes, a cache line.
    const SHORT: usize = 30;
}

impl Default for Own {
    fn default() -> Self {
        Self::Short { len: 0, bytes: [0; Self::SHORT] }
    }
}

impl Frame {
    /// A frame of both.
    #[inline]
    pub fn new(head: Head, body: Bytes) -> Self {
        let head = if usize::from(head.len) > Own::SHORT {
            Own::Long(Box::new(head))
        } else {
            let mut bytes = [0; Own::SHORT];
            bytes.copy_from_slice(&head.bytes[..Own::SHORT]);
            Own::Short { len: head.len, bytes }
        };
        Self { head, body }
    }

    /// Its own part, which comes first.
    pub fn head(&self) -> &[u8] {
        match &self.head {
            Own::Short { len, bytes } => &bytes[..usize::from(*len)],
            Own::Long(head) => head.as_ref().as_ref(),
        }
    }

    /// The part that other frames may share.
    pub fn body(&self) -> &Bytes {
        &self.body
    }

    /// The bytes of head and body together.
    pub fn len(&self) -> usize {
        self.head().len() + self.body.len()
    }

    /// Whether both are empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl From<Bytes> for Frame {
    fn from(body: Bytes) -> Self {
        Self { head: Own::default(), body }
    }
}

impl PartialEq for Frame {
    fn eq(&self, other: &Self) -> bool {
        let (long, short) = if self.head().len() < other.head().len() { (other, self) } else { (self, other) };
        if long.len() != short.len() {
            return false;
        }
        let (first, middle) = long.head().split_at(short.head().len());
        let (rest_of_head, last) = short.body.split_at(middle.len());
        first == short.head() && middle == rest_of_head && long.body == last
    }
}

impl Eq for Frame {}

impl fmt::Debug for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let start: Vec<u8> = self.head().iter().chain(&self.body).copied().take(SHOWN).collect();
        f.debug_struct("Frame")
            .field("head", &self.head().len())
            .field("body", &self.body.len())
            .field("start", &String::from_utf8_lossy(&start))
            .finish()
    }
}

/// So much of a frame is shown for debugging.
const SHOWN: usize = 32;

/// The part of a [`Frame`] that is its own: a few bytes. Up to 30 of them are kept in the frame itself.
#[derive(Clone, Copy)]
pub struct Head {
    /// At most `CAPACITY`.
    len: u8,
    /// Of these, the first `len` count.
    bytes: [u8; Self::CAPACITY],
}

impl Head {
    /// The longest head.
    pub const CAPACITY: usize = 94;

    /// A copy of these bytes.
    #[inline]
    pub fn new(bytes: &[u8]) -> Result<Self, HeadTooLong> {
        let too_long = HeadTooLong { len: bytes.len() };
        let len = u8::try_from(bytes.len()).map_err(|_| too_long)?;
        let mut head = Self { len, ..Self::default() };
        head.bytes.get_mut(..bytes.len()).ok_or(too_long)?.copy_from_slice(bytes);
        Ok(head)
    }
}

impl Default for Head {
    fn default() -> Self {
        Self { len: 0, bytes: [0; Self::CAPACITY] }
    }
}

impl AsRef<[u8]> for Head {
    fn as_ref(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

impl PartialEq for Head {
    fn eq(&self, other: &Self) -> bool {
        self.as_ref() == other.as_ref()
    }
}

impl Eq for Head {}

impl fmt::Debug for Head {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Head").field(&String::from_utf8_lossy(self.as_ref())).finish()
    }
}

/// The head has more bytes than [`Head::CAPACITY`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a head of {len} bytes: at most {max} fit, the rest belongs in the body", max = Head::CAPACITY)]
#[non_exhaustive]
pub struct HeadTooLong {
    /// The bytes it has.
    pub len: usize,
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn split(bytes: &[u8], at: usize) -> Frame {
        let (head, body) = bytes.split_at(at.min(bytes.len()));
        Frame::new(Head::new(head).unwrap(), Bytes::copy_from_slice(body))
    }

    #[test]
    fn sizes_in_memory() {
        assert_eq!(size_of::<Head>(), 95);
        assert_eq!(size_of::<Frame>(), 64);
    }

    #[test]
    fn a_head_holds_its_capacity_and_no_more() {
        for len in [0, 1, 30, 31, 93, 94] {
            let head = Head::new(&vec![7; len]).unwrap();
            assert_eq!(head.as_ref(), vec![7; len]);
            assert_eq!(Frame::new(head, Bytes::new()).head(), vec![7; len]);
        }
        for len in [95, 255, 256, 256 + 94, 70_000] {
            assert_eq!(Head::new(&vec![7; len]), Err(HeadTooLong { len }));
        }
    }

    #[test]
    fn debug_is_short() {
        let frame = Frame::new(Head::new(b"7:\xff").unwrap(), Bytes::from(vec![b'x'; 100_000]));
        let shown = format!("{frame:?}");
        assert_eq!(shown, format!("Frame {{ head: 3, body: 100000, start: \"7:\u{fffd}{}\" }}", "x".repeat(29)));
    }

    proptest! {
        #[test]
        fn equality_and_size_are_those_of_the_bytes(
            bytes in vec(any::<u8>(), 0..200),
            cuts in (0..=Head::CAPACITY, 0..=Head::CAPACITY),
            flipped in any::<prop::sample::Index>(),
        ) {
            let (one, two) = (split(&bytes, cuts.0), split(&bytes, cuts.1));
            prop_assert_eq!(&one, &two);
            prop_assert_eq!(&one, &one.clone());
            prop_assert_eq!(one.size(), bytes.len());
            prop_assert_eq!(one.is_empty(), bytes.is_empty());
            prop_assert_eq!([one.head(), one.body()].concat(), bytes.clone());

            let mut longer = bytes.clone();
            longer.push(0);
            prop_assert_ne!(&one, &split(&longer, cuts.1));
            prop_assert_ne!(&split(&longer, cuts.1), &one);
            if !bytes.is_empty() {
                let mut other = bytes.clone();
                other[flipped.index(bytes.len())] ^= 1;
                prop_assert_ne!(&one, &split(&other, cuts.1));
            }
        }
    }
}
