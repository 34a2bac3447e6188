//! A buffer that gathers encoded frames for one write.
//!
//! One write per frame costs an order of magnitude more than one write per batch. Small frames are copied next to each other, so
//! a batch of them is one slice and needs no allocation once its buffer has grown. Large bodies are not copied: they are separate
//! slices of a vectored write.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::iter;

use bytes::{Buf, Bytes, BytesMut};

/// A queue of bytes to write, in order, with as few vectored writes as possible.
///
/// The queue has no limit: the caller checks [`len`](Self::len).
///
/// ```
/// use std::io::{IoSlice, Write};
/// use bytes::Bytes;
/// use tidewire_conn::codec::Batch;
///
/// let mut batch = Batch::default();
/// batch.put(b"copied, ");
/// batch.put_shared(Bytes::from(vec![b'.'; 2000]));
///
/// let mut socket = Vec::new();
/// while !batch.is_empty() {
///     let mut slices = [IoSlice::new(&[]); 16];
///     let filled = batch.slices(&mut slices);
///     let written = socket.write_vectored(&slices[..filled])?;
///     batch.advance(written);
/// }
/// assert_eq!(socket.len(), 2008);
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct Batch {
    /// All copied bytes that are not yet written, in order.
    copied: BytesMut,
    /// The bodies kept by reference, in order. None of them is empty.
    bodies: VecDeque<SharedBody>,
    /// The number of copied bytes before the last body, which is the sum of all `copied_before`.
    before_last_body: usize,
    /// The number of bytes of the bodies that are not yet written.
    shared_bytes: usize,
}

/// A body kept by reference.
#[derive(Debug)]
struct SharedBody {
    /// The number of copied bytes between the previous body and this one.
    copied_before: usize,
    body: Bytes,
    /// The length of the whole body, which stays in memory until the last byte is written.
    size: usize,
}

impl Batch {
    /// Bodies of at least this size are kept by reference. Copying a smaller one is faster than writing another slice.
    pub const MIN_SHARED_BYTES: usize = 1024;

    /// The capacity that an idle batch keeps for copied bytes: enough for a ping or a short reply, and little compared with the rest of
    /// a connection.
    const IDLE_BYTES: usize = 256;
    /// The capacity that an idle batch keeps for bodies.
    const IDLE_BODIES: usize = 4;

    /// Appends a copy of these bytes.
    pub fn put(&mut self, bytes: &[u8]) {
        self.copied.extend_from_slice(bytes);
    }

    /// Appends a body: by reference if it has [`MIN_SHARED_BYTES`](Self::MIN_SHARED_BYTES) or more, otherwise by copying it.
    pub fn put_shared(&mut self, body: Bytes) {
        if body.len() < Self::MIN_SHARED_BYTES {
            return self.put(&body);
        }
        let copied_before = self.copied.len() - self.before_last_body;
        self.before_last_body += copied_before;
        self.shared_bytes += body.len();
        let size = body.len();
        self.bodies.push_back(SharedBody { copied_before, body, size });
    }

    /// Returns the number of bytes that are not yet written.
    pub fn len(&self) -> usize {
        self.copied.len() + self.shared_bytes
    }

    /// Whether everything has been written.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the bytes that the batch holds in memory. A body counts in full until its last byte is written.
    pub(crate) fn held_bytes(&self) -> usize {
        self.copied.len() + self.bodies.iter().map(|shared| shared.size).sum::<usize>()
    }

    /// Reserves capacity for `bytes` more copied bytes.
    pub(crate) fn reserve(&mut self, bytes: usize) {
        self.copied.reserve(bytes);
    }

    /// Returns the whole batch if it is one slice.
    pub(crate) fn only_slice(&self) -> Option<&[u8]> {
        self.bodies.is_empty().then_some(&self.copied)
    }

    /// Fills `slices` for a vectored write, in order, and returns the number of filled slices. No filled slice is empty. If there are
    /// too few slices, they contain the beginning of the batch.
    pub fn slices<'a>(&'a self, slices: &mut [IoSlice<'a>]) -> usize {
        let (mut rest, tail) = self.copied.split_at(self.before_last_body);
        let pieces = self.bodies.iter().flat_map(|shared| {
            let (before, after) = rest.split_at(shared.copied_before);
            rest = after;
            [before, &shared.body]
        });
        let pieces = pieces.chain(iter::once(tail)).filter(|piece| !piece.is_empty());
        let filled = slices.iter_mut().zip(pieces).map(|(slice, piece)| *slice = IoSlice::new(piece));
        filled.count()
    }

    /// Removes `n` bytes from the front, after they have been written.
    ///
    /// # Panics
    ///
    /// Panics if the batch has fewer than `n` bytes.
    pub fn advance(&mut self, mut n: usize) {
        assert!(n <= self.len(), "cannot advance by {n} bytes: the batch has {}", self.len());
        while let Some(front) = self.bodies.front_mut() {
            let before = n.min(front.copied_before);
            self.copied.advance(before);
            self.before_last_body -= before;
            front.copied_before -= before;
            n -= before;

            // If copied bytes remain before the body, `n` is zero.
            let within = n.min(front.body.len());
            front.body.advance(within);
            self.shared_bytes -= within;
            n -= within;
            if !front.body.is_empty() {
                return;
            }
            self.bodies.pop_front();
        }
        self.copied.advance(n);
    }

    /// Drops all bytes that are not written. The memory is kept for later use.
    pub fn clear(&mut self) {
        self.copied.clear();
        self.bodies.clear();
        self.before_last_body = 0;
        self.shared_bytes = 0;
    }

    /// Releases the memory of an empty batch, except for a few hundred bytes. Call it when a connection becomes idle. Does nothing if the
    /// batch is not empty.
    pub fn shrink(&mut self) {
        if !self.is_empty() {
            return;
        }
        // `capacity` would exclude the bytes at the front of the allocation that are already written.
        if self.copied.try_reclaim(Self::IDLE_BYTES + 1) {
            self.copied = BytesMut::new();
        }
        self.bodies.shrink_to(Self::IDLE_BODIES);
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    /// Returns the bytes that a vectored write of up to `slices` slices would see.
    fn front(batch: &Batch, slices: usize) -> Vec<u8> {
        let mut filled = vec![IoSlice::new(&[]); slices];
        let count = batch.slices(&mut filled);
        assert!(filled[..count].iter().all(|slice| !slice.is_empty()));
        filled[..count].iter().flat_map(|slice| slice.iter()).copied().collect()
    }

    #[derive(Debug, Clone)]
    enum Step {
        Put(Vec<u8>),
        PutShared(Vec<u8>),
        /// A partial write of at most this many slices and bytes.
        Write(usize, usize),
        Clear,
        Shrink,
    }

    fn step() -> impl Strategy<Value = Step> {
        let around = Batch::MIN_SHARED_BYTES - 2..Batch::MIN_SHARED_BYTES + 3;
        prop_oneof![
            4 => vec(any::<u8>(), 0..50).prop_map(Step::Put),
            1 => vec(any::<u8>(), 0..3000).prop_map(Step::Put),
            2 => vec(any::<u8>(), 0..50).prop_map(Step::PutShared),
            3 => vec(any::<u8>(), around).prop_map(Step::PutShared),
            4 => (0..5usize, 0..3000usize).prop_map(|(slices, n)| Step::Write(slices, n)),
            2 => (0..5usize, 0..4usize).prop_map(|(slices, n)| Step::Write(slices, n)),
            2 => Just(Step::Write(64, usize::MAX)),
            1 => Just(Step::Clear),
            1 => Just(Step::Shrink),
        ]
    }

    proptest! {
        #[test]
        fn writes_all_bytes_in_order(steps in vec(step(), 0..60)) {
            let mut batch = Batch::default();
            let mut expected: Vec<u8> = Vec::new();
            for step in steps {
                match step {
                    Step::Put(bytes) => {
                        batch.put(&bytes);
                        expected.extend(bytes);
                    }
                    Step::PutShared(bytes) => {
                        expected.extend(&bytes);
                        batch.put_shared(bytes.into());
                    }
                    Step::Write(slices, n) => {
                        let seen = front(&batch, slices);
                        prop_assert!(expected.starts_with(&seen));
                        prop_assert!(slices == 0 || seen.is_empty() == expected.is_empty());
                        let n = n.min(seen.len());
                        batch.advance(n);
                        expected.drain(..n);
                    }
                    Step::Clear => {
                        batch.clear();
                        expected.clear();
                    }
                    Step::Shrink => batch.shrink(),
                }
                prop_assert_eq!(batch.len(), expected.len());
                prop_assert_eq!(batch.is_empty(), expected.is_empty());
                prop_assert_eq!(front(&batch, 200), expected.clone());
            }
        }
    }

    #[test]
    fn partial_write_can_end_at_any_byte() {
        let shared: Vec<u8> = (0..=250).cycle().take(Batch::MIN_SHARED_BYTES).collect();
        let build = || {
            let mut batch = Batch::default();
            batch.put(b"ab");
            batch.put_shared(shared.clone().into());
            batch.put_shared(shared.clone().into());
            batch.put(b"c");
            batch
        };
        let whole = front(&build(), 4);
        assert_eq!(whole, [b"ab", &shared[..], &shared, b"c"].concat());
        for n in 0..=whole.len() {
            let mut batch = build();
            batch.advance(n);
            assert_eq!(front(&batch, 4), whole[n..]);
            batch.put(b"d");
            assert_eq!(front(&batch, 4), [&whole[n..], b"d"].concat());
        }
    }

    #[test]
    #[should_panic(expected = "cannot advance by 3 bytes: the batch has 2")]
    fn advancing_past_the_end_panics() {
        let mut batch = Batch::default();
        batch.put(b"ab");
        batch.advance(3);
    }

    #[test]
    fn large_bodies_are_not_copied() {
        let body = Bytes::from(vec![0; Batch::MIN_SHARED_BYTES]);
        let mut batch = Batch::default();
        batch.put(b"head");
        batch.put_shared(body.clone());
        let mut slices = [IoSlice::new(&[]); 3];
        assert_eq!(batch.slices(&mut slices), 2);
        assert_eq!(slices[1].as_ptr(), body.as_ptr());
    }

    #[test]
    fn small_frames_reuse_one_buffer() {
        let mut batch = Batch::default();
        let round = |batch: &mut Batch, written: usize| {
            for _ in 0..100 {
                batch.put(b"prefix");
                batch.put_shared(Bytes::from_static(b"a small body"));
            }
            batch.advance(written.min(batch.len()));
        };
        // A peer that never reads everything: 1800 bytes are put and written in each round, and some always remain.
        round(&mut batch, 1000);
        for _ in 0..10 {
            round(&mut batch, 1800);
        }
        let buffers: Vec<_> = (0..1000)
            .map(|_| {
                round(&mut batch, 1800);
                batch.copied.as_ptr()
            })
            .collect();
        let (low, high) = (buffers.iter().min().unwrap(), buffers.iter().max().unwrap());
        assert!(high.addr() - low.addr() < 8192, "the buffer was reallocated");
        assert_eq!(batch.bodies.capacity(), 0);
    }

    #[test]
    fn shrink_releases_memory() {
        let mut batch = Batch::default();
        batch.put(b"a short reply");
        batch.advance(13);
        batch.shrink();
        assert!(batch.copied.try_reclaim(13), "a little is kept");

        batch.put(&[0; 5000]);
        for _ in 0..50 {
            batch.put_shared(vec![0; Batch::MIN_SHARED_BYTES].into());
        }
        batch.shrink();
        assert_eq!(batch.len(), 5000 + 50 * Batch::MIN_SHARED_BYTES);
        batch.advance(batch.len());
        batch.shrink();
        assert!(!batch.copied.try_reclaim(1));
        assert!(batch.bodies.capacity() <= Batch::IDLE_BODIES);
    }
}
