//! Recovery: reads the newest snapshot and the log after it when a directory is opened.
//!
//! A log ends at the first offset at which no frame continues the chain. The end is a *torn tail* if a crash can explain it: the
//! missing part was never reported as durable, and the log continues from there. The log is corrupt if a later part proves that the
//! missing part was durable: each frame has the number of the last frame that was durable when it was written, and a segment begins
//! only when all frames before it are durable. No frame is skipped: corruption is an error with a file and an offset.
//!
//! A frame that can be read is not necessarily on disk. After a failed fsync the kernel marks the pages as clean and still serves
//! them from the page cache, until the power fails. A frame is therefore *proven durable* only if a later frame, a segment header or
//! the snapshot shows that a sync covered it. All other frames are in the last segment. They are rewritten and synced before new
//! frames are appended: see [`Unproven`]. This also applies to a log that was closed, because the sync of the `Closed` frame may have
//! failed.

use std::io;
use std::path::{Path, PathBuf};

use super::super::{DiskFile, EngineError, StoredRow};
use super::data_dir::{DataDir, Listing, SnapshotFile};
use super::frame::{ALIGN_BYTES, FrameHeader, FrameKind, HEADER_BYTES, Layout, Writes, decode_commit, matches, u64_at};
use super::log::Cursor;
use super::segment::{InvalidHeader, MAX_SEGMENT_BYTES, PAGE_BYTES, SegmentHeader};
use super::snapshot::{self, read_fully};
use crate::{Cause, Position};

/// The error of opening a directory.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// Another engine or checkpoint has the directory open, in this process or another.
    #[error("{} is locked: another process, or another engine or checkpoint of this process, has it open", dir.display())]
    Locked {
        /// The directory.
        dir: PathBuf,
    },
    /// The disk failed.
    #[error("cannot open, read or create {}", file.display())]
    Io {
        /// The file or directory.
        file: PathBuf,
        /// The error of the disk.
        source: io::Error,
    },
    /// The end of the log was read, but could not be rewritten and synced. It may exist only in the page cache, so the directory is
    /// not opened. Nothing was appended.
    #[error("cannot make the end of the log durable in {}: repair the disk or free space, then reopen", file.display())]
    NotDurable {
        /// The segment.
        file: PathBuf,
        /// The error of the disk.
        source: io::Error,
    },
    /// A file is corrupt in a way that a crash cannot cause.
    #[error("{} is corrupt at byte {offset}: {what}; restore a backup, or repair the disk and try again", file.display())]
    Corrupt {
        /// The file.
        file: PathBuf,
        /// The offset in the file.
        offset: u64,
        /// The kind of corruption.
        what: Corruption,
    },
    /// A file that later files depend on is missing.
    #[error("{} is missing: the rest of the log cannot be read without it; restore a backup", file.display())]
    Missing {
        /// The file.
        file: PathBuf,
    },
    /// The format of a file is not supported by this version.
    #[error("{} has format {version}, which this version does not support: open it with the version that wrote it", file.display())]
    Version {
        /// The file.
        file: PathBuf,
        /// The format.
        version: u32,
    },
    /// The directory is an incomplete backup or restored copy.
    #[error("{} is an incomplete copy: remove it, and repeat the backup or the restore", dir.display())]
    UnfinishedBackup {
        /// The directory.
        dir: PathBuf,
    },
}

impl OpenError {
    /// Converts the error of writing the first or last frame of a session.
    pub(super) fn of_engine(error: EngineError, dir: &Path) -> Self {
        match error {
            EngineError::OutcomeUnknown { file, source } | EngineError::NoSegment { file, source } => {
                Self::Io { file, source }
            }
            // No other error is expected for such a small frame.
            other => Self::Io { file: dir.to_owned(), source: io::Error::other(other) },
        }
    }
}

/// The kind of corruption of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Corruption {
    /// The header of a segment in use is invalid, or belongs to another segment.
    #[error("the segment header is invalid or belongs to another segment")]
    SegmentHeader,
    /// A durable frame is missing.
    #[error("a frame is missing or incomplete, and a later frame proves that it was durable")]
    Frame,
    /// The checksum of a frame is valid, but its payload is not.
    #[error("a frame with a valid checksum has an invalid payload")]
    Commits,
    /// The log ends before the snapshot.
    #[error("the log ends here, before the position of the snapshot")]
    BehindSnapshot,
    /// A segment is longer than the maximum.
    #[error("the segment is longer than 1 GiB")]
    TooLong,
    /// The header of a snapshot is invalid.
    #[error("the snapshot header is invalid or belongs to another snapshot")]
    SnapshotHeader,
    /// A block of a snapshot is invalid.
    #[error("a block of the snapshot is incomplete or has a wrong checksum")]
    SnapshotBlock,
    /// The end marker of a snapshot is missing or invalid.
    #[error("the end marker of the snapshot is missing or invalid")]
    SnapshotEnd,
}

/// A recovered row or commit.
#[derive(Debug)]
pub enum Recovered<'a> {
    /// A row of the newest snapshot. All rows precede the first commit.
    Row(StoredRow<'a>),
    /// A commit after the snapshot, in order.
    Commit {
        /// The position of the commit.
        position: Position,
        /// The time of the commit, in milliseconds since 1970. Zero if it was written by a version that did not log it.
        at: u64,
        /// The cause of the commit. The default if it was written by a version that did not log it.
        cause: Cause,
        /// The writes of the commit.
        writes: Writes<'a>,
    },
}

/// The result of a recovery.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Recovery {
    /// The position of the engine.
    pub position: Position,
    /// Whether the epoch is new, so that earlier positions are not valid.
    pub is_new_epoch: bool,
    /// Whether the engine is new, or its last shutdown was clean.
    pub was_closed: bool,
    /// Rows of the snapshot.
    pub rows: u64,
    /// Commits of the log after it.
    pub commits: u64,
    /// The incomplete frame at the end of the log that was truncated, if any.
    pub torn_tail: Option<TornTail>,
}

/// A torn write at the end of the log. It was never reported as durable.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct TornTail {
    /// The segment.
    pub file: PathBuf,
    /// The end of the last complete frame.
    pub offset: u64,
}

/// The end of a recovered log, where new frames are appended.
pub(super) struct LogEnd {
    pub(super) cursor: Cursor,
    /// The number of the segment of the last frame.
    pub(super) segment: u64,
    /// The layout of that segment.
    pub(super) layout: Layout,
    /// The length of that segment, a multiple of the page size.
    pub(super) capacity: u64,
    /// The offset of the page in which the last frame ends.
    pub(super) page_offset: u64,
    /// The bytes of that page up to the end of the frame.
    pub(super) tail: Vec<u8>,
    pub(super) unproven: Unproven,
    /// The number of the next segment, if it exists and is unused.
    pub(super) prepared: Option<u64>,
    /// Bytes of frames after the snapshot.
    pub(super) log_bytes: u64,
    /// Whether the last session acknowledged commits before they were durable.
    pub(super) is_relaxed: bool,
    pub(super) was_closed: bool,
    pub(super) rows: u64,
    pub(super) commits: u64,
    pub(super) torn_tail: Option<TornTail>,
}

/// The end of the last segment: complete pages, beginning with the page of the first frame that is not proven durable.
pub(super) struct Unproven {
    offset: u64,
    bytes: Vec<u8>,
}

impl Unproven {
    /// Rewrites the bytes in place and syncs them. A crash meanwhile loses no durable bytes, because the durable bytes of each sector
    /// are rewritten unchanged.
    pub(super) fn rewrite(&self, file: &dyn DiskFile) -> io::Result<()> {
        file.write_at(&self.bytes, self.offset)?;
        file.sync_data()
    }
}

/// Reads the snapshot and the log, and passes them to `each`. Returns `None` if the directory has no log.
pub(super) fn recover(
    data_dir: &DataDir,
    listing: &Listing,
    each: &mut dyn FnMut(Recovered<'_>),
) -> Result<Option<LogEnd>, OpenError> {
    let mut rows = 0;
    let snapshot = match listing.snapshots.last() {
        None => None,
        Some(&sequence) => {
            let path = data_dir.snapshot(sequence);
            let (header, bytes) = snapshot::read(&*data_dir.disk, &path, |row| {
                rows += 1;
                each(Recovered::Row(row));
            })?;
            if header.sequence != sequence {
                return Err(OpenError::Corrupt { file: path, offset: 0, what: Corruption::SnapshotHeader });
            }
            data_dir.inventory().snapshot = Some(SnapshotFile { path, bytes, appended: 0 });
            Some(header)
        }
    };
    let Some(&last) = listing.segments.last() else {
        return match snapshot {
            None => Ok(None),
            Some(header) => Err(OpenError::Missing { file: data_dir.segment(header.segment) }),
        };
    };
    let first = snapshot.map_or(1, |header| header.segment);
    {
        let mut inventory = data_dir.inventory();
        inventory.first = first;
        inventory.spares.extend(listing.segments.iter().filter(|number| **number < first));
    }

    // The numbers are those of existing files, so the loop is bounded by the number of files.
    let mut numbers = listing.segments.iter().copied().filter(|number| *number >= first);
    let mut replay = match numbers.next() {
        Some(number) if number == first => {
            Replay::begin(data_dir, first, snapshot.map(|header| (header.log, header.sequence)), each)?
        }
        _ => return Err(OpenError::Missing { file: data_dir.segment(first) }),
    };
    let mut prepared = None;
    let mut expected = first;
    for number in numbers {
        expected += 1;
        if number != expected {
            return Err(OpenError::Missing { file: data_dir.segment(expected) });
        }
        if replay.read_segment(number, prepared)? {
            continue;
        }
        prepared = prepared.or(Some(number));
    }
    debug_assert_eq!(expected, last);

    let unproven = replay.unproven();
    let Replay {
        cursor,
        segment,
        layout,
        offset,
        bytes,
        log_bytes,
        is_relaxed,
        was_closed,
        commits,
        torn_tail,
        snapshot_sequence,
        ..
    } = replay;
    if cursor.sequence <= snapshot_sequence {
        let file = data_dir.segment(segment);
        return Err(OpenError::Corrupt { file, offset: offset as u64, what: Corruption::BehindSnapshot });
    }
    let page = offset / PAGE_BYTES * PAGE_BYTES;
    Ok(Some(LogEnd {
        cursor,
        segment,
        layout,
        capacity: (bytes.len() / PAGE_BYTES * PAGE_BYTES) as u64,
        page_offset: page as u64,
        tail: bytes[page..offset].to_vec(),
        unproven,
        prepared,
        log_bytes,
        is_relaxed,
        was_closed,
        rows,
        commits,
        torn_tail,
    }))
}

/// The replay of a log.
struct Replay<'h, 'e> {
    data_dir: &'h DataDir,
    each: &'e mut dyn FnMut(Recovered<'_>),
    cursor: Cursor,
    /// The sequence of the last commit in the snapshot.
    snapshot_sequence: u64,
    /// The number of the last segment that was read.
    segment: u64,
    layout: Layout,
    /// The bytes of that segment.
    bytes: Vec<u8>,
    /// The end of the last complete frame in that segment.
    offset: usize,
    /// The number of the last frame that is proven durable.
    proven: u64,
    log_bytes: u64,
    is_relaxed: bool,
    was_closed: bool,
    commits: u64,
    torn_tail: Option<TornTail>,
}

impl<'h, 'e> Replay<'h, 'e> {
    /// Reads the first segment, which must have a header.
    fn begin(
        data_dir: &'h DataDir,
        number: u64,
        snapshot: Option<(u64, u64)>,
        each: &'e mut dyn FnMut(Recovered<'_>),
    ) -> Result<Self, OpenError> {
        let mut bytes = Vec::new();
        read_file(data_dir, number, &mut bytes)?;
        let corrupt = |what| OpenError::Corrupt { file: data_dir.segment(number), offset: 0, what };
        let header = SegmentHeader::read(&bytes).map_err(|error| match error {
            InvalidHeader::Version(version) => {
                OpenError::Version { file: data_dir.segment(number), version: version.into() }
            }
            InvalidHeader::Corrupt => corrupt(Corruption::SegmentHeader),
        })?;
        let (log, snapshot_sequence) = snapshot.unwrap_or((header.log, 0));
        let is_first =
            header.number == number && header.log == log && header.sequence <= snapshot_sequence.saturating_add(1);
        // A log never reaches these numbers. They are rejected because they would overflow later.
        let is_sane = (1..u64::MAX / 2).contains(&header.sequence) && (1..u64::MAX / 2).contains(&header.frame);
        if !is_first || !is_sane || number >= u64::MAX / 2 {
            return Err(corrupt(Corruption::SegmentHeader));
        }
        let SegmentHeader { epoch, sequence, frame, chain, is_relaxed, .. } = header;
        let mut replay = Self {
            data_dir,
            each,
            cursor: Cursor { log, epoch, frame, sequence, chain },
            snapshot_sequence,
            segment: number,
            layout: header.layout,
            bytes,
            offset: PAGE_BYTES,
            proven: frame - 1,
            log_bytes: 0,
            is_relaxed,
            was_closed: false,
            commits: 0,
            torn_tail: None,
        };
        replay.read_frames()?;
        Ok(replay)
    }

    /// Reads the next segment. Returns false if it is unused.
    fn read_segment(&mut self, number: u64, prepared: Option<u64>) -> Result<bool, OpenError> {
        let mut bytes = Vec::new();
        read_file(self.data_dir, number, &mut bytes)?;
        let header = SegmentHeader::read(&bytes);
        if let Err(InvalidHeader::Version(version)) = header {
            return Err(OpenError::Version { file: self.data_dir.segment(number), version: version.into() });
        }
        // A segment gets its name when it has its full length, and is recycled only within its log.
        let is_ours = bytes.len() >= PAGE_BYTES && header.is_ok_and(|header| header.log == self.cursor.log);
        let is_blank = bytes.len() >= PAGE_BYTES && header.is_err();
        let Some(header) = header.ok().filter(|header| is_ours && header.number == number) else {
            if !(is_ours || is_blank) || self.proves_loss(number, &bytes) {
                let file = self.data_dir.segment(number);
                return Err(OpenError::Corrupt { file, offset: 0, what: Corruption::SegmentHeader });
            }
            return Ok(false);
        };
        let Cursor { frame, sequence, chain, .. } = self.cursor;
        if (header.frame, header.sequence, header.chain) != (frame, sequence, chain) || prepared.is_some() {
            let file = self.data_dir.segment(self.segment);
            return Err(OpenError::Corrupt { file, offset: self.offset as u64, what: Corruption::Frame });
        }
        self.cursor.epoch = header.epoch;
        self.is_relaxed = header.is_relaxed;
        self.layout = header.layout;
        // The header was written after a sync of the previous segment.
        self.proven = frame - 1;
        (self.segment, self.bytes, self.offset, self.torn_tail) = (number, bytes, PAGE_BYTES, None);
        self.read_frames()?;
        Ok(true)
    }

    /// Reads frames up to the first one that does not continue the chain.
    fn read_frames(&mut self) -> Result<(), OpenError> {
        let bytes = std::mem::take(&mut self.bytes);
        let file = self.data_dir.segment(self.segment);
        let corrupt = |offset: usize, what| OpenError::Corrupt { file: file.clone(), offset: offset as u64, what };
        let mut offset = self.offset.min(bytes.len());
        while let Some((header, crc, payload)) = self.frame_at(&bytes, offset) {
            if !self.apply(&header, payload) {
                return Err(corrupt(offset, Corruption::Commits));
            }
            let is_in_snapshot =
                header.kind == FrameKind::Commits && self.cursor.sequence <= self.snapshot_sequence.saturating_add(1);
            self.proven = self.proven.max(if is_in_snapshot { header.number } else { header.durable });
            self.cursor.chain = crc;
            self.cursor.frame += 1;
            self.is_relaxed = header.is_relaxed;
            self.was_closed = header.kind == FrameKind::Closed;
            let frame_len = (HEADER_BYTES + payload.len()).next_multiple_of(ALIGN_BYTES);
            if self.cursor.sequence > self.snapshot_sequence.saturating_add(1) {
                self.log_bytes += frame_len as u64;
            }
            // The padding may be missing at the end of the file.
            offset = (offset + frame_len).min(bytes.len());
        }
        if self.proves_loss(self.segment, &bytes[offset..]) {
            return Err(corrupt(offset, Corruption::Frame));
        }
        if self.is_torn(&bytes, offset) {
            self.torn_tail = Some(TornTail { file, offset: offset as u64 });
        }
        (self.bytes, self.offset) = (bytes, offset);
        Ok(())
    }

    /// Returns the frame at this offset, if it continues the chain.
    fn frame_at<'b>(&self, bytes: &'b [u8], offset: usize) -> Option<(FrameHeader, u32, &'b [u8])> {
        let rest = bytes.get(offset..)?;
        let (header, crc) = FrameHeader::read(rest)?;
        let Cursor { log, frame, sequence, chain, .. } = self.cursor;
        let is_next = header.log == log
            && header.segment == self.segment
            && header.number == frame
            && header.sequence == sequence
            && header.chain == chain;
        let payload = rest[HEADER_BYTES..].get(..usize::try_from(header.len).ok()?)?;
        (is_next && matches(header.payload_crc, crc32c::crc32c(payload))).then_some((header, crc, payload))
    }

    /// Passes the commits of a frame to the callback. Returns false if the payload is invalid.
    fn apply(&mut self, header: &FrameHeader, payload: &[u8]) -> bool {
        let mut rest = payload;
        match header.kind {
            FrameKind::Commits => {
                for _ in 0..header.count {
                    let Some((at, cause, writes)) = decode_commit(self.layout, &mut rest) else { return false };
                    let position = Position { epoch: self.cursor.epoch, sequence: self.cursor.sequence };
                    self.cursor.sequence += 1;
                    if position.sequence > self.snapshot_sequence {
                        self.commits += 1;
                        (self.each)(Recovered::Commit { position, at, cause, writes });
                    }
                }
                rest.is_empty()
            }
            FrameKind::Opened => {
                let is_epoch = payload.len() == 8 && header.count == 0;
                if is_epoch {
                    self.cursor.epoch = u64_at(payload, 0);
                }
                is_epoch
            }
            FrameKind::Closed => payload.is_empty() && header.count == 0,
        }
    }

    /// Returns a copy of the pages of the last segment with frames that are not proven durable. The rest of the last page is zero. The
    /// segment header is written together with the first frame, so it is part of the copy if the first frame is.
    fn unproven(&self) -> Unproven {
        let mut start = 0;
        let mut next = PAGE_BYTES;
        while let Some((header, _)) = self.bytes.get(next..self.offset).and_then(FrameHeader::read) {
            if header.number > self.proven {
                break;
            }
            next += (HEADER_BYTES + header.len as usize).next_multiple_of(ALIGN_BYTES);
            start = next.min(self.offset) / PAGE_BYTES * PAGE_BYTES;
        }
        let mut bytes = self.bytes[start..self.offset].to_vec();
        bytes.resize(self.offset.next_multiple_of(PAGE_BYTES).min(self.bytes.len()) - start, 0);
        Unproven { offset: start as u64, bytes }
    }

    /// Returns whether one of the frames in these bytes of the segment proves that the missing next frame was durable.
    fn proves_loss(&self, segment: u64, bytes: &[u8]) -> bool {
        bytes.windows(HEADER_BYTES).step_by(ALIGN_BYTES).filter_map(FrameHeader::read).any(|(header, _)| {
            header.log == self.cursor.log && header.segment == segment && header.durable >= self.cursor.frame
        })
    }

    /// Returns whether bytes were written after the last complete frame. Pages are written completely, so the rest of a page is
    /// zero after a complete frame. Later pages may have old bytes from before the segment was recycled.
    fn is_torn(&self, bytes: &[u8], offset: usize) -> bool {
        let rest = &bytes[offset..];
        let page = &rest[..rest.len().min(offset.next_multiple_of(PAGE_BYTES) - offset)];
        let begins = FrameHeader::read(rest)
            .is_some_and(|(header, _)| header.log == self.cursor.log && header.segment == self.segment);
        begins || page.iter().any(|byte| *byte != 0) || !bytes.len().is_multiple_of(PAGE_BYTES)
    }
}

/// Reads all bytes of a segment, which has at most 1 GiB.
fn read_file(data_dir: &DataDir, number: u64, bytes: &mut Vec<u8>) -> Result<(), OpenError> {
    let path = data_dir.segment(number);
    let mut read = || {
        let file = data_dir.disk.open(&path)?;
        let len = file.len()?;
        if len > MAX_SEGMENT_BYTES {
            return Ok(false);
        }
        bytes.clear();
        bytes.resize(usize::try_from(len).map_err(io::Error::other)?, 0);
        let filled = read_fully(&*file, bytes, 0)?;
        bytes.truncate(filled);
        Ok(true)
    };
    match read() {
        Ok(true) => Ok(()),
        Ok(false) => Err(OpenError::Corrupt { file: path, offset: MAX_SEGMENT_BYTES, what: Corruption::TooLong }),
        Err(source) => Err(OpenError::Io { file: path, source }),
    }
}
