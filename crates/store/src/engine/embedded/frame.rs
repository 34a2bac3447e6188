//! Frames of the log: the format of a group of commits on disk.
//!
//! ```text
//! header    64 bytes, see `FrameHeader`
//! payload   for each commit:  time: u64   origin: u64   depth: u32   writes: u32, and for each write
//!           bucket: u16   key: u32   row: u32 (lengths; a deleted row has 0xffffffff)   their bytes
//! padding   to a multiple of 8
//! ```
//!
//! The version of a segment identifies the layout of its payloads: see [`Layout`]. In version 1 a commit has no time, origin or
//! depth. The time and the cause are logged so that the history can be rebuilt at start.
//!
//! Numbers are little-endian. A header has its own checksum, so its length can be trusted before the payload is read, and the
//! search for headers after an invalid frame takes linear time.
//!
//! A frame has the ids of its log and segment, its number in the log, and the checksum of the previous header. Old frames of a
//! recycled segment, and frames after a frame that a crash removed, are therefore never mistaken for current frames.

use super::super::{StoredRow, Write, WriteSet};
use crate::Cause;

/// Length of a frame header.
pub(super) const HEADER_BYTES: usize = 64;
/// Frames begin at multiples of this offset.
pub(super) const ALIGN_BYTES: usize = 8;

const MAGIC: [u8; 3] = *b"TWf";
const RELAXED: u8 = 0x80;
const DELETED: u32 = u32::MAX;
/// Length of the three lengths at the start of a write.
const LENGTHS_BYTES: usize = 10;
/// Length of the time and the cause of a commit.
const METADATA_BYTES: usize = 20;
/// Length of the number of writes of a commit.
const COUNT_BYTES: usize = 4;

/// Layout of the commits in a segment; the discriminant is the version in the segment's header.
///
/// A log changes its layout only at the start of a segment. A segment with an unknown version is an error, so that its frames are
/// not mistaken for a torn tail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Layout {
    /// Commits without time and cause. This layout is read, but no longer written.
    Bare = 1,
    /// Commits with time and cause.
    Stamped = 2,
}

impl Layout {
    /// The layout of new segments.
    pub(super) const CURRENT: Self = Self::Stamped;

    /// Returns the layout of a version, if it is known.
    pub(super) fn of_version(version: u8) -> Option<Self> {
        [Self::Bare, Self::Stamped].into_iter().find(|layout| *layout as u8 == version)
    }
}

/// The kind of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FrameKind {
    /// A group of commits.
    Commits = 0,
    /// The log was opened; the payload is the epoch.
    Opened = 1,
    /// The log was closed cleanly.
    Closed = 2,
}

/// The header of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FrameHeader {
    pub(super) kind: FrameKind,
    /// Whether the session that wrote the frame acknowledged commits before they were durable.
    pub(super) is_relaxed: bool,
    /// The checksum of the payload.
    pub(super) payload_crc: u32,
    /// The length of the payload.
    pub(super) len: u32,
    /// Identifies the log, so that segments of another log are detected.
    pub(super) log: u64,
    /// The number of the segment.
    pub(super) segment: u64,
    /// The number of the frame in the log, counted from one.
    pub(super) number: u64,
    /// The sequence of the first commit in the frame, or of the next commit if the frame has none.
    pub(super) sequence: u64,
    /// The number of the last frame that was durable when this one was written. If that frame is missing, the disk is corrupt: a
    /// crash cannot have removed it.
    pub(super) durable: u64,
    /// The checksum of the previous header.
    pub(super) chain: u32,
    /// The number of commits.
    pub(super) count: u32,
}

impl FrameHeader {
    /// Encodes the header. Returns its checksum.
    pub(super) fn write(&self, out: &mut [u8; HEADER_BYTES]) -> u32 {
        out[..3].copy_from_slice(&MAGIC);
        out[3] = self.kind as u8 | if self.is_relaxed { RELAXED } else { 0 };
        out[8..12].copy_from_slice(&self.payload_crc.to_le_bytes());
        out[12..16].copy_from_slice(&self.len.to_le_bytes());
        out[16..24].copy_from_slice(&self.log.to_le_bytes());
        out[24..32].copy_from_slice(&self.segment.to_le_bytes());
        out[32..40].copy_from_slice(&self.number.to_le_bytes());
        out[40..48].copy_from_slice(&self.sequence.to_le_bytes());
        out[48..56].copy_from_slice(&self.durable.to_le_bytes());
        out[56..60].copy_from_slice(&self.chain.to_le_bytes());
        out[60..].copy_from_slice(&self.count.to_le_bytes());
        let crc = Self::crc(out);
        out[4..8].copy_from_slice(&crc.to_le_bytes());
        crc
    }

    /// Decodes the header at the start of the bytes. Returns it and its checksum.
    pub(super) fn read(bytes: &[u8]) -> Option<(Self, u32)> {
        let bytes: &[u8; HEADER_BYTES] = bytes.first_chunk()?;
        if bytes[..3] != MAGIC {
            return None;
        }
        let kind = match bytes[3] & !RELAXED {
            0 => FrameKind::Commits,
            1 => FrameKind::Opened,
            2 => FrameKind::Closed,
            _ => return None,
        };
        let crc = u32_at(bytes, 4);
        let header = Self {
            kind,
            is_relaxed: bytes[3] & RELAXED != 0,
            payload_crc: u32_at(bytes, 8),
            len: u32_at(bytes, 12),
            log: u64_at(bytes, 16),
            segment: u64_at(bytes, 24),
            number: u64_at(bytes, 32),
            sequence: u64_at(bytes, 40),
            durable: u64_at(bytes, 48),
            chain: u32_at(bytes, 56),
            count: u32_at(bytes, 60),
        };
        matches(crc, Self::crc(bytes)).then_some((header, crc))
    }

    fn crc(bytes: &[u8; HEADER_BYTES]) -> u32 {
        crc32c::crc32c_append(crc32c::crc32c(&bytes[..4]), &bytes[8..])
    }
}

/// Returns whether a checksum is correct. Under fuzzing every checksum is accepted, so that the fuzzer reaches the decoders.
pub(super) fn matches(found: u32, expected: u32) -> bool {
    cfg!(fuzzing) || found == expected
}

/// Reads the `u32` at this offset. Panics if it is out of bounds.
pub(super) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut number = [0; 4];
    number.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(number)
}

/// Reads the `u64` at this offset. Panics if it is out of bounds.
pub(super) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut number = [0; 8];
    number.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(number)
}

/// Returns the encoded length of a commit.
pub(crate) fn encoded_len<'a>(writes: impl Iterator<Item = Write<'a>>) -> usize {
    let len =
        |write: Write<'_>| LENGTHS_BYTES + write.bucket.len() + write.key.len() + write.row.map_or(0, <[u8]>::len);
    METADATA_BYTES + COUNT_BYTES + writes.map(len).sum::<usize>()
}

/// Appends a commit in the current layout. The caller has checked its lengths.
#[expect(clippy::cast_possible_truncation, reason = "the limit of a group is below u32::MAX")]
pub(super) fn encode(commit: &WriteSet<'_>, out: &mut Vec<u8>) {
    let mut head = [0; METADATA_BYTES + COUNT_BYTES];
    head[..8].copy_from_slice(&commit.at.to_le_bytes());
    head[8..16].copy_from_slice(&commit.cause.origin.to_le_bytes());
    head[16..20].copy_from_slice(&commit.cause.depth.to_le_bytes());
    head[20..].copy_from_slice(&(commit.writes.len() as u32).to_le_bytes());
    out.extend_from_slice(&head);
    for write in commit.writes {
        put_lengths(write.bucket, write.key, write.row.map_or(DELETED, |row| row.len() as u32), out);
        out.extend_from_slice(write.row.unwrap_or_default());
    }
}

/// Appends a row of a snapshot, in the format of a write.
#[expect(clippy::cast_possible_truncation, reason = "the caller checks the lengths")]
pub(super) fn encode_row(row: &StoredRow<'_>, out: &mut Vec<u8>) {
    put_lengths(row.bucket, row.key, row.row.len() as u32, out);
    out.extend_from_slice(row.row);
}

#[expect(clippy::cast_possible_truncation, reason = "the caller checks the lengths")]
fn put_lengths(bucket: &str, key: &[u8], row: u32, out: &mut Vec<u8>) {
    out.extend_from_slice(&(bucket.len() as u16).to_le_bytes());
    out.extend_from_slice(&(key.len() as u32).to_le_bytes());
    out.extend_from_slice(&row.to_le_bytes());
    out.extend_from_slice(bucket.as_bytes());
    out.extend_from_slice(key);
}

/// Decodes a write from the front of the bytes. Returns `None` if they are invalid.
pub(super) fn decode<'a>(bytes: &mut &'a [u8]) -> Option<Write<'a>> {
    let (lengths, mut rest) = bytes.split_first_chunk::<LENGTHS_BYTES>()?;
    let mut take = |len: usize| {
        let (taken, left) = rest.split_at_checked(len)?;
        rest = left;
        Some(taken)
    };
    let bucket = std::str::from_utf8(take(u16::from_le_bytes([lengths[0], lengths[1]]).into())?).ok()?;
    let key = take(usize::try_from(u32_at(lengths, 2)).ok()?)?;
    let row = match u32_at(lengths, 6) {
        DELETED => None,
        len => Some(take(usize::try_from(len).ok()?)?),
    };
    *bytes = rest;
    Some(Write { bucket, key, row })
}

/// Decodes a commit from the front of the bytes: its time, its cause and its writes. Returns `None` if they are invalid. A commit
/// without metadata has time zero and the default cause.
pub(super) fn decode_commit<'a>(layout: Layout, bytes: &mut &'a [u8]) -> Option<(u64, Cause, Writes<'a>)> {
    let (at, cause) = match layout {
        Layout::Bare => (0, Cause::default()),
        Layout::Stamped => {
            let (metadata, rest) = bytes.split_first_chunk::<METADATA_BYTES>()?;
            *bytes = rest;
            (u64_at(metadata, 0), Cause { origin: u64_at(metadata, 8), depth: u32_at(metadata, 16) })
        }
    };
    Some((at, cause, Writes::decode(bytes)?))
}

/// The writes of a recovered commit.
#[derive(Debug, Clone)]
pub struct Writes<'a> {
    /// The encoded remaining writes, which are known to be valid.
    bytes: &'a [u8],
    /// The number of remaining writes.
    remaining: u32,
}

impl<'a> Writes<'a> {
    /// Decodes the number of writes and the writes from the front of the bytes. Returns `None` if they are invalid.
    fn decode(bytes: &mut &'a [u8]) -> Option<Self> {
        let (count, mut rest) = bytes.split_first_chunk::<COUNT_BYTES>()?;
        let (remaining, start) = (u32::from_le_bytes(*count), rest);
        for _ in 0..remaining {
            decode(&mut rest)?;
        }
        *bytes = rest;
        Some(Self { bytes: &start[..start.len() - rest.len()], remaining })
    }
}

impl<'a> Iterator for Writes<'a> {
    type Item = Write<'a>;

    fn next(&mut self) -> Option<Write<'a>> {
        self.remaining = self.remaining.checked_sub(1)?;
        decode(&mut self.bytes)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.remaining as usize, Some(self.remaining as usize))
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn commit_survives_a_round_trip(
            writes in vec((".{0,9}", vec(any::<u8>(), 0..9), any::<Option<Vec<u8>>>()), 0..9),
            at: u64,
            origin: u64,
            depth: u32,
        ) {
            let writes: Vec<_> =
                writes.iter().map(|(bucket, key, row)| Write { bucket, key, row: row.as_deref() }).collect();
            let cause = Cause { origin, depth };
            let commit = WriteSet { writes: &writes, at, cause };
            let mut bytes = Vec::new();
            encode(&commit, &mut bytes);
            prop_assert_eq!(bytes.len(), commit.encoded_len());
            let mut rest = &bytes[..];
            let (found_at, found_cause, found) = decode_commit(Layout::Stamped, &mut rest).unwrap();
            prop_assert_eq!((found_at, found_cause), (at, cause));
            prop_assert_eq!(found.collect::<Vec<_>>(), writes.clone());
            prop_assert!(rest.is_empty());
            for len in 0..bytes.len() {
                prop_assert!(decode_commit(Layout::Stamped, &mut &bytes[..len]).is_none());
            }
            // Version 1 is the same without the metadata.
            let mut rest = &bytes[METADATA_BYTES..];
            let (found_at, found_cause, found) = decode_commit(Layout::Bare, &mut rest).unwrap();
            prop_assert_eq!((found_at, found_cause), (0, Cause::default()));
            prop_assert_eq!(found.collect::<Vec<_>>(), writes);
            prop_assert!(rest.is_empty());
        }

        #[test]
        fn decoding_arbitrary_bytes_does_not_panic(bytes in vec(any::<u8>(), 0..200)) {
            for layout in [Layout::Bare, Layout::Stamped] {
                let mut rest = &bytes[..];
                while let Some((_, _, writes)) = decode_commit(layout, &mut rest) {
                    prop_assert_eq!(writes.size_hint().0, writes.count());
                }
            }
        }
    }

    #[test]
    fn every_flipped_bit_of_a_header_is_detected() {
        let header = FrameHeader {
            kind: FrameKind::Closed,
            is_relaxed: true,
            payload_crc: 1,
            len: 2,
            log: 3,
            segment: 4,
            number: 5,
            sequence: 6,
            durable: 7,
            chain: 8,
            count: 9,
        };
        let mut bytes = [0; HEADER_BYTES];
        let crc = header.write(&mut bytes);
        assert_eq!(FrameHeader::read(&bytes), Some((header, crc)));
        for bit in 0..HEADER_BYTES * 8 {
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(FrameHeader::read(&bytes), None, "bit {bit}");
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
    }
}
