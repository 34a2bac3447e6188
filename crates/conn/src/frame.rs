//! Frames: a head for one receiver, and a body that all receivers share.
//!
//! A push carries the subscription id of its receiver, while its data is the same for all receivers. The head is therefore stored
//! in the frame itself, and the body is reference-counted: a broadcast allocates once, whatever the number of receivers. Only
//! a head of more than 30 bytes is allocated, so queues of frames stay small.

use std::fmt;

use bytes::Bytes;

/// The unit that a connection reads and writes.
pub trait FrameLike: Send + 'static {
    /// Returns the size in bytes that counts against the limits of queues.
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

/// A head followed by a body.
///
/// The boundary between them is not sent: two frames are equal if their bytes are equal. A clone copies the head and shares the
/// body.
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
    head: HeadStorage,
    body: Bytes,
}

/// The head of a frame: inline if it is short, otherwise boxed.
#[derive(Clone)]
enum HeadStorage {
    /// The first `len` bytes are used.
    Inline {
        len: u8,
        bytes: [u8; Self::INLINE_BYTES],
    },
    Boxed(Box<Head>),
}

impl HeadStorage {
    /// Capacity of an inline head: the largest for which a [`Frame`] fits into a cache line of 64 bytes.
    const INLINE_BYTES: usize = 30;
}

impl Default for HeadStorage {
    fn default() -> Self {
        Self::Inline { len: 0, bytes: [0; Self::INLINE_BYTES] }
    }
}

impl Frame {
    /// Creates a frame.
    #[inline]
    pub fn new(head: Head, body: Bytes) -> Self {
        let head = if usize::from(head.len) > HeadStorage::INLINE_BYTES {
            HeadStorage::Boxed(Box::new(head))
        } else {
            let mut bytes = [0; HeadStorage::INLINE_BYTES];
            bytes.copy_from_slice(&head.bytes[..HeadStorage::INLINE_BYTES]);
            HeadStorage::Inline { len: head.len, bytes }
        };
        Self { head, body }
    }

    /// Returns the head, which comes first.
    pub fn head(&self) -> &[u8] {
        match &self.head {
            HeadStorage::Inline { len, bytes } => &bytes[..usize::from(*len)],
            HeadStorage::Boxed(head) => head.as_ref().as_ref(),
        }
    }

    /// Returns the body, which other frames may share.
    pub fn body(&self) -> &Bytes {
        &self.body
    }

    /// Returns the length of head and body, in bytes.
    pub fn len(&self) -> usize {
        self.head().len() + self.body.len()
    }

    /// Whether head and body are empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl From<Bytes> for Frame {
    fn from(body: Bytes) -> Self {
        Self { head: HeadStorage::default(), body }
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
        let start: Vec<u8> = self.head().iter().chain(&self.body).copied().take(MAX_DEBUG_BYTES).collect();
        f.debug_struct("Frame")
            .field("head", &self.head().len())
            .field("body", &self.body.len())
            .field("start", &String::from_utf8_lossy(&start))
            .finish()
    }
}

/// The number of bytes of a frame that its `Debug` output contains.
const MAX_DEBUG_BYTES: usize = 32;

/// The part of a [`Frame`] that is not shared. A head of up to 30 bytes is stored without an allocation.
#[derive(Clone, Copy)]
pub struct Head {
    /// At most `CAPACITY`.
    len: u8,
    /// The first `len` bytes are used.
    bytes: [u8; Self::CAPACITY],
}

impl Head {
    /// The maximum length of a head, in bytes.
    pub const CAPACITY: usize = 94;

    /// Creates a head by copying these bytes.
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
#[error("head of {len} bytes is longer than {max} bytes; put the rest into the body", max = Head::CAPACITY)]
#[non_exhaustive]
pub struct HeadTooLong {
    /// The length of the head, in bytes.
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
    fn frame_fits_a_cache_line() {
        assert_eq!(size_of::<Head>(), 95);
        assert_eq!(size_of::<Frame>(), 64);
    }

    #[test]
    fn head_longer_than_capacity_is_rejected() {
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
    fn debug_output_is_truncated() {
        let frame = Frame::new(Head::new(b"7:\xff").unwrap(), Bytes::from(vec![b'x'; 100_000]));
        let shown = format!("{frame:?}");
        assert_eq!(shown, format!("Frame {{ head: 3, body: 100000, start: \"7:\u{fffd}{}\" }}", "x".repeat(29)));
    }

    proptest! {
        #[test]
        fn equality_and_size_ignore_the_split(
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
