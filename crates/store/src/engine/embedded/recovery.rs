//! Recovery: reads the newest snapshot and the log after it when a directory is opened.
//!
//! A log ends at the first place where no frame continues the one before. That is a *torn tail* if a crash can explain it: then
//! the durability of the missing part was never reported, and the log continues from there. It is corruption if a later part of
//! the log shows that the missing part was durable: a frame records up to where the log was durable when it was written, and a
//! segment begins when everything before it is durable. Nothing is skipped: corruption is an error that names the place.
//!
//! A frame that can be read is not necessarily on disk. After a failed fsync the kernel drops the dirty pages and still serves
//! them from the page cache, until the power fails. So a frame is *proven durable* only if a later frame, a segment header or the
//! snapshot says that a sync covered it. All other frames are in the last segment. They are written again and synced before
//! anything is appended: see [`Unproven`]. This also applies to a log that was closed, because the sync of the `Closed` frame may
//! have failed.

use std::io;
use std::path::{Path, PathBuf};

use super::super::{DiskFile, EngineError, StoredRow};
use super::frame::{ALIGN, HEADER, Header, Kind, Layout, Writes, matches, take_commit, u64_at};
use super::home::{Home, Kept, Listing};
use super::log::Cursor;
use super::segment::{MAX_SEGMENT, NoHeader, PAGE, SegmentHeader};
use super::snapshot::{self, fill};
use crate::{Cause, Position};

/// Why a directory cannot be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// Another engine has it open, in this process or another.
    #[error("{} is in use: another process, or another engine or checkpoint of this one, has it open", dir.display())]
    Locked {
        /// The directory.
        dir: PathBuf,
    },
    /// The disk failed.
    #[error("cannot open, read or make {}", file.display())]
    Io {
        /// The file or directory.
        file: PathBuf,
        /// The error of the disk.
        source: io::Error,
    },
    /// The end of the log could be read, and could not be written again and synced. It may exist in memory only, so the directory
    /// is not opened. Nothing was appended.
    #[error("cannot make the end of the log durable in {}: repair the disk or free space, then reopen", file.display())]
    NotDurable {
        /// The segment.
        file: PathBuf,
        /// The error of the disk.
        source: io::Error,
    },
    /// A file is damaged in a way that no crash explains.
    #[error("{} is damaged at byte {offset}: {what}; restore a backup, or repair the disk and try again", file.display())]
    Corrupt {
        /// The file.
        file: PathBuf,
        /// Where in the file.
        offset: u64,
        /// In what way.
        what: Corruption,
    },
    /// A file is missing that other files continue.
    #[error("{} is missing: the log does not begin, or goes on, without it", file.display())]
    Missing {
        /// The file.
        file: PathBuf,
    },
    /// A file has a format that this version does not know.
    #[error("{} has format {version}, which this version does not know: open it with the version that wrote it", file.display())]
    Version {
        /// The file.
        file: PathBuf,
        /// Its format.
        version: u32,
    },
    /// The directory is a backup or restored copy that was not finished.
    #[error("{} is an unfinished copy: remove it, and make the backup or restore it again", dir.display())]
    UnfinishedBackup {
        /// The directory.
        dir: PathBuf,
    },
}

impl OpenError {
    /// Why the first or last frame of an engine in this directory could not be written.
    pub(super) fn of_engine(error: EngineError, dir: &Path) -> Self {
        match error {
            EngineError::OutcomeUnknown { file, source } | EngineError::NoSegment { file, source } => {
                Self::Io { file, source }
            }
            // A small frame is refused by the disk only.
            other => Self::Io { file: dir.to_owned(), source: io::Error::other(other) },
        }
    }
}

/// In what way a file is damaged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Corruption {
    /// The header of a segment that has begun is not one, or not of this segment.
    #[error("the header of the segment is not whole, or is of another one")]
    SegmentHeader,
    /// A frame is missing that was durable.
    #[error("a frame is missing or not whole, and later ones are there that were written after it was durable")]
    Frame,
    /// A frame is whole, and what it has are no commits.
    #[error("a frame is whole but has no proper commits")]
    Commits,
    /// The log ends before the snapshot.
    #[error("the log ends here, before the position of the snapshot")]
    BehindSnapshot,
    /// A segment is longer than any that is ever written.
    #[error("the segment is longer than 1 GiB")]
    TooLong,
    /// The header of a snapshot is damaged.
    #[error("the header of the snapshot is not whole, or is of another one")]
    SnapshotHeader,
    /// A block of a snapshot is damaged.
    #[error("a block of the snapshot is not whole")]
    SnapshotBlock,
    /// A snapshot does not end as it should.
    #[error("the snapshot has no proper end")]
    SnapshotEnd,
}

/// A piece of what an engine kept.
#[derive(Debug)]
pub enum Recovered<'a> {
    /// A row of the newest snapshot. All of them come before the first commit.
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

/// What a recovery found.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Recovery {
    /// The position of the engine.
    pub position: Position,
    /// Whether the epoch is new, so that earlier positions are not valid.
    pub is_new_epoch: bool,
    /// Whether the engine was closed in order before, or is new.
    pub was_closed: bool,
    /// Rows of the snapshot.
    pub rows: u64,
    /// Commits of the log after it.
    pub commits: u64,
    /// The incomplete frame at the end of the log that was truncated, if any.
    pub cut: Option<Cut>,
}

/// A torn tail: the last write before a crash, which was not acknowledged as durable.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Cut {
    /// The segment.
    pub file: PathBuf,
    /// Where its last whole frame ends.
    pub offset: u64,
}

/// The end of a log that was read, where it continues.
pub(super) struct Found {
    pub(super) cursor: Cursor,
    /// The segment of the last frame, its layout, and its length in whole pages.
    pub(super) segment: u64,
    pub(super) layout: Layout,
    pub(super) capacity: u64,
    /// The page in which the last frame ended, and its bytes up to there.
    pub(super) page: u64,
    pub(super) tail: Vec<u8>,
    pub(super) unproven: Unproven,
    /// The next segment, if it exists and has not begun.
    pub(super) prepared: Option<u64>,
    /// Bytes of frames after the snapshot.
    pub(super) log_bytes: u64,
    /// Whether the last session acknowledged commits before they were durable.
    pub(super) relaxed: bool,
    pub(super) was_closed: bool,
    pub(super) rows: u64,
    pub(super) commits: u64,
    pub(super) cut: Option<Cut>,
}

/// The end of the last segment: whole pages from the first frame on that is not proven durable.
pub(super) struct Unproven {
    offset: u64,
    bytes: Vec<u8>,
}

impl Unproven {
    /// Writes the bytes again, in place, and syncs them. A crash in between loses nothing that is durable, since each sector
    /// holds the same durable bytes before and after.
    pub(super) fn rewrite(&self, file: &dyn DiskFile) -> io::Result<()> {
        file.write_at(&self.bytes, self.offset)?;
        file.sync_data()
    }
}

/// Reads the snapshot and the log, and hands them to `each`. Returns `None` if the directory has no log.
pub(super) fn recover(
    home: &Home,
    listing: &Listing,
    each: &mut dyn FnMut(Recovered<'_>),
) -> Result<Option<Found>, OpenError> {
    let mut rows = 0;
    let snapshot = match listing.snapshots.last() {
        None => None,
        Some(&sequence) => {
            let path = home.snapshot(sequence);
            let (header, bytes) = snapshot::read(&*home.disk, &path, |row| {
                rows += 1;
                each(Recovered::Row(row));
            })?;
            if header.sequence != sequence {
                return Err(OpenError::Corrupt { file: path, offset: 0, what: Corruption::SnapshotHeader });
            }
            home.inventory().snapshot = Some(Kept { path, bytes, appended: 0 });
            Some(header)
        }
    };
    let Some(&last) = listing.segments.last() else {
        return match snapshot {
            None => Ok(None),
            Some(header) => Err(OpenError::Missing { file: home.segment(header.segment) }),
        };
    };
    let first = snapshot.map_or(1, |header| header.segment);
    {
        let mut inventory = home.inventory();
        inventory.first = first;
        inventory.spares.extend(listing.segments.iter().filter(|number| **number < first));
    }

    // The numbers are those of existing files, so the loop is bounded by the number of files.
    let mut numbers = listing.segments.iter().copied().filter(|number| *number >= first);
    let mut replay = match numbers.next() {
        Some(number) if number == first => {
            Replay::begin(home, first, snapshot.map(|header| (header.log, header.sequence)), each)?
        }
        _ => return Err(OpenError::Missing { file: home.segment(first) }),
    };
    let mut prepared = None;
    let mut expected = first;
    for number in numbers {
        expected += 1;
        if number != expected {
            return Err(OpenError::Missing { file: home.segment(expected) });
        }
        if replay.go_on(number, prepared)? {
            continue;
        }
        prepared = prepared.or(Some(number));
    }
    debug_assert_eq!(expected, last);

    let unproven = replay.unproven();
    let Replay { cursor, segment, layout, offset, bytes, log_bytes, relaxed, was_closed, commits, cut, from, .. } =
        replay;
    if cursor.sequence <= from {
        let file = home.segment(segment);
        return Err(OpenError::Corrupt { file, offset: offset as u64, what: Corruption::BehindSnapshot });
    }
    let page = offset / PAGE * PAGE;
    Ok(Some(Found {
        cursor,
        segment,
        layout,
        capacity: (bytes.len() / PAGE * PAGE) as u64,
        page: page as u64,
        tail: bytes[page..offset].to_vec(),
        unproven,
        prepared,
        log_bytes,
        relaxed,
        was_closed,
        rows,
        commits,
        cut,
    }))
}

struct Replay<'h, 'e> {
    home: &'h Home,
    each: &'e mut dyn FnMut(Recovered<'_>),
    cursor: Cursor,
    /// Commits up to here are in the snapshot.
    from: u64,
    /// The last segment that was read, its bytes, and the end of its last whole frame.
    segment: u64,
    layout: Layout,
    bytes: Vec<u8>,
    offset: usize,
    /// The number of the last frame that is proven durable.
    proven: u64,
    log_bytes: u64,
    relaxed: bool,
    was_closed: bool,
    commits: u64,
    cut: Option<Cut>,
}

impl<'h, 'e> Replay<'h, 'e> {
    /// Reads the first segment, which has a header.
    fn begin(
        home: &'h Home,
        number: u64,
        snapshot: Option<(u64, u64)>,
        each: &'e mut dyn FnMut(Recovered<'_>),
    ) -> Result<Self, OpenError> {
        let mut bytes = Vec::new();
        read_segment(home, number, &mut bytes)?;
        let corrupt = |what| OpenError::Corrupt { file: home.segment(number), offset: 0, what };
        let header = SegmentHeader::read(&bytes).map_err(|error| match error {
            NoHeader::Version(version) => OpenError::Version { file: home.segment(number), version: version.into() },
            NoHeader::Bad => corrupt(Corruption::SegmentHeader),
        })?;
        let (log, from) = snapshot.unwrap_or((header.log, 0));
        let is_first = header.number == number && header.log == log && header.sequence <= from.saturating_add(1);
        // Counting never reaches these numbers; they would overflow later.
        let is_sane = (1..u64::MAX / 2).contains(&header.sequence) && (1..u64::MAX / 2).contains(&header.frame);
        if !is_first || !is_sane || number >= u64::MAX / 2 {
            return Err(corrupt(Corruption::SegmentHeader));
        }
        let SegmentHeader { epoch, sequence, frame, chain, relaxed, .. } = header;
        let mut replay = Self {
            home,
            each,
            cursor: Cursor { log, epoch, frame, sequence, chain },
            from,
            segment: number,
            layout: header.layout,
            bytes,
            offset: PAGE,
            proven: frame - 1,
            log_bytes: 0,
            relaxed,
            was_closed: false,
            commits: 0,
            cut: None,
        };
        replay.read_frames()?;
        Ok(replay)
    }

    /// Reads the next segment. Returns false if it has not begun.
    fn go_on(&mut self, number: u64, prepared: Option<u64>) -> Result<bool, OpenError> {
        let mut bytes = Vec::new();
        read_segment(self.home, number, &mut bytes)?;
        let header = SegmentHeader::read(&bytes);
        if let Err(NoHeader::Version(version)) = header {
            return Err(OpenError::Version { file: self.home.segment(number), version: version.into() });
        }
        // A segment gets its name when it is as long as it ever is, and is recycled within its log.
        let is_ours = bytes.len() >= PAGE && header.is_ok_and(|header| header.log == self.cursor.log);
        let is_blank = bytes.len() >= PAGE && header.is_err();
        let Some(header) = header.ok().filter(|header| is_ours && header.number == number) else {
            if !(is_ours || is_blank) || self.proves_loss(number, &bytes) {
                let file = self.home.segment(number);
                return Err(OpenError::Corrupt { file, offset: 0, what: Corruption::SegmentHeader });
            }
            return Ok(false);
        };
        let Cursor { frame, sequence, chain, .. } = self.cursor;
        if (header.frame, header.sequence, header.chain) != (frame, sequence, chain) || prepared.is_some() {
            let file = self.home.segment(self.segment);
            return Err(OpenError::Corrupt { file, offset: self.offset as u64, what: Corruption::Frame });
        }
        self.cursor.epoch = header.epoch;
        self.relaxed = header.relaxed;
        self.layout = header.layout;
        // The header was written after a sync of the segment before.
        self.proven = frame - 1;
        (self.segment, self.bytes, self.offset, self.cut) = (number, bytes, PAGE, None);
        self.read_frames()?;
        Ok(true)
    }

    /// Reads frames up to the first that does not continue the one before.
    fn read_frames(&mut self) -> Result<(), OpenError> {
        let bytes = std::mem::take(&mut self.bytes);
        let file = self.home.segment(self.segment);
        let corrupt = |offset: usize, what| OpenError::Corrupt { file: file.clone(), offset: offset as u64, what };
        let mut offset = self.offset.min(bytes.len());
        while let Some((header, crc, payload)) = self.frame_at(&bytes, offset) {
            if !self.apply(&header, payload) {
                return Err(corrupt(offset, Corruption::Commits));
            }
            let is_in_snapshot = header.kind == Kind::Commits && self.cursor.sequence <= self.from.saturating_add(1);
            self.proven = self.proven.max(if is_in_snapshot { header.number } else { header.durable });
            self.cursor.chain = crc;
            self.cursor.frame += 1;
            self.relaxed = header.relaxed;
            self.was_closed = header.kind == Kind::Closed;
            let whole = (HEADER + payload.len()).next_multiple_of(ALIGN);
            if self.cursor.sequence > self.from.saturating_add(1) {
                self.log_bytes += whole as u64;
            }
            // The padding may be cut off with the end of the file.
            offset = (offset + whole).min(bytes.len());
        }
        if self.proves_loss(self.segment, &bytes[offset..]) {
            return Err(corrupt(offset, Corruption::Frame));
        }
        if self.is_torn(&bytes, offset) {
            self.cut = Some(Cut { file, offset: offset as u64 });
        }
        (self.bytes, self.offset) = (bytes, offset);
        Ok(())
    }

    /// The frame at this place, if it continues the one before.
    fn frame_at<'b>(&self, bytes: &'b [u8], offset: usize) -> Option<(Header, u32, &'b [u8])> {
        let rest = bytes.get(offset..)?;
        let (header, crc) = Header::read(rest)?;
        let Cursor { log, frame, sequence, chain, .. } = self.cursor;
        let is_next = header.log == log
            && header.segment == self.segment
            && header.number == frame
            && header.sequence == sequence
            && header.chain == chain;
        let payload = rest[HEADER..].get(..usize::try_from(header.len).ok()?)?;
        (is_next && matches(header.payload_crc, crc32c::crc32c(payload))).then_some((header, crc, payload))
    }

    /// Hands over the commits of a frame. Returns false if the frame is intact, but its payload is not valid.
    fn apply(&mut self, header: &Header, payload: &[u8]) -> bool {
        let mut rest = payload;
        match header.kind {
            Kind::Commits => {
                for _ in 0..header.count {
                    let Some((at, cause, writes)) = take_commit(self.layout, &mut rest) else { return false };
                    let position = Position { epoch: self.cursor.epoch, sequence: self.cursor.sequence };
                    self.cursor.sequence += 1;
                    if position.sequence > self.from {
                        self.commits += 1;
                        (self.each)(Recovered::Commit { position, at, cause, writes });
                    }
                }
                rest.is_empty()
            }
            Kind::Opened => {
                let is_epoch = payload.len() == 8 && header.count == 0;
                if is_epoch {
                    self.cursor.epoch = u64_at(payload, 0);
                }
                is_epoch
            }
            Kind::Closed => payload.is_empty() && header.count == 0,
        }
    }

    /// Copies the pages of the last segment that have frames that are not proven durable. The rest of the last page is zero. The
    /// header of a segment is written together with its first frame, so it belongs to the copy if that frame does.
    fn unproven(&self) -> Unproven {
        let mut start = 0;
        let mut next = PAGE;
        while let Some((header, _)) = self.bytes.get(next..self.offset).and_then(Header::read) {
            if header.number > self.proven {
                break;
            }
            next += (HEADER + header.len as usize).next_multiple_of(ALIGN);
            start = next.min(self.offset) / PAGE * PAGE;
        }
        let mut bytes = self.bytes[start..self.offset].to_vec();
        bytes.resize(self.offset.next_multiple_of(PAGE).min(self.bytes.len()) - start, 0);
        Unproven { offset: start as u64, bytes }
    }

    /// Whether there is a frame of this segment that was written when the next frame, which is not there, was durable.
    fn proves_loss(&self, segment: u64, bytes: &[u8]) -> bool {
        bytes.windows(HEADER).step_by(ALIGN).filter_map(Header::read).any(|(header, _)| {
            header.log == self.cursor.log && header.segment == segment && header.durable >= self.cursor.frame
        })
    }

    /// Whether something was written after the last whole frame. A page is always written up to its end, so what follows in it
    /// is zero; later pages may have what they had before the segment was recycled.
    fn is_torn(&self, bytes: &[u8], offset: usize) -> bool {
        let rest = &bytes[offset..];
        let page = &rest[..rest.len().min(offset.next_multiple_of(PAGE) - offset)];
        let begins = Header::read(rest)
            .is_some_and(|(header, _)| header.log == self.cursor.log && header.segment == self.segment);
        begins || page.iter().any(|byte| *byte != 0) || !bytes.len().is_multiple_of(PAGE)
    }
}

/// Reads a whole segment, of at most 1 GiB.
fn read_segment(home: &Home, number: u64, bytes: &mut Vec<u8>) -> Result<(), OpenError> {
    let path = home.segment(number);
    let mut read = || {
        let file = home.disk.open(&path)?;
        let len = file.len()?;
        if len > MAX_SEGMENT {
            return Ok(false);
        }
        bytes.clear();
        bytes.resize(usize::try_from(len).map_err(io::Error::other)?, 0);
        let filled = fill(&*file, bytes, 0)?;
        bytes.truncate(filled);
        Ok(true)
    };
    match read() {
        Ok(true) => Ok(()),
        Ok(false) => Err(OpenError::Corrupt { file: path, offset: MAX_SEGMENT, what: Corruption::TooLong }),
        Err(source) => Err(OpenError::Io { file: path, source }),
    }
}
