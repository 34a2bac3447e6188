//! Segments of the log: preallocated files that are filled with zeros once, and then overwritten with frames.
//!
//! Overwriting existing bytes of a file changes no metadata, so a sync needs no journal commit of the file system. The space is
//! allocated in advance, so a full disk is detected one segment early. The next segment is prepared while the current segment is
//! filled, by recycling a spare segment if possible. If no file descriptor is left for the next segment, the current segment is
//! extended instead, so segments can differ in length.
//!
//! ```text
//! page 0    header: the log, the segment number, and the state of the log when the segment began
//! then      frames, each at a multiple of 8
//! ```
//!
//! A segment without a valid header for its number is unused. When a header is written, everything before it is durable.

use std::io;
use std::path::PathBuf;

use super::super::DiskFile;
use super::super::disk::is_out_of_descriptors;
use super::data_dir::DataDir;
use super::frame::{Layout, matches, u32_at, u64_at};

/// Unit of writes: the kernel need not read a page that is overwritten completely. Frames start at the second page.
pub(super) const PAGE_BYTES: usize = 4096;
/// Maximum length of a segment. A recovery reads one segment at a time into memory.
pub(super) const MAX_SEGMENT_BYTES: u64 = 1 << 30;

const MAGIC: [u8; 7] = *b"TIDELOG";
static ZEROS: [u8; 256 * 1024] = [0; 256 * 1024];

/// The header of a segment, in its first page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SegmentHeader {
    /// The layout of the commits in the segment.
    pub(super) layout: Layout,
    /// Identifies the log.
    pub(super) log: u64,
    /// The number of the segment, as in its name.
    pub(super) number: u64,
    /// The epoch when the segment began.
    pub(super) epoch: u64,
    /// The sequence of the next commit when the segment began.
    pub(super) sequence: u64,
    /// The number of the next frame when the segment began.
    pub(super) frame: u64,
    /// The checksum of the header of the last frame when the segment began.
    pub(super) chain: u32,
    /// Whether commits were acknowledged before they were durable, as in a frame.
    pub(super) is_relaxed: bool,
}

/// An error in a segment header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum InvalidHeader {
    /// The page is corrupt or not a header.
    Corrupt,
    /// The version is not supported.
    Version(u8),
}

impl SegmentHeader {
    const BYTES: usize = 60;

    /// Appends the header, padded to a page.
    pub(super) fn write(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(&MAGIC);
        out.push(self.layout as u8);
        out.extend_from_slice(&[0; 4]);
        out.extend_from_slice(&self.chain.to_le_bytes());
        for number in [self.log, self.number, self.epoch, self.sequence, self.frame] {
            out.extend_from_slice(&number.to_le_bytes());
        }
        out.extend_from_slice(&u32::from(self.is_relaxed).to_le_bytes());
        let crc = Self::crc(&out[start..]);
        out[start + 8..start + 12].copy_from_slice(&crc.to_le_bytes());
        out.resize(start + PAGE_BYTES, 0);
    }

    /// Reads the header at the start of a segment.
    pub(super) fn read(bytes: &[u8]) -> Result<Self, InvalidHeader> {
        let bytes = bytes.get(..Self::BYTES).ok_or(InvalidHeader::Corrupt)?;
        if bytes[..7] != MAGIC || !matches(u32_at(bytes, 8), Self::crc(bytes)) {
            return Err(InvalidHeader::Corrupt);
        }
        let layout = Layout::of_version(bytes[7]).ok_or(InvalidHeader::Version(bytes[7]))?;
        Ok(Self {
            layout,
            chain: u32_at(bytes, 12),
            log: u64_at(bytes, 16),
            number: u64_at(bytes, 24),
            epoch: u64_at(bytes, 32),
            sequence: u64_at(bytes, 40),
            frame: u64_at(bytes, 48),
            is_relaxed: u32_at(bytes, 56) != 0,
        })
    }

    fn crc(bytes: &[u8]) -> u32 {
        crc32c::crc32c_append(crc32c::crc32c(&bytes[..8]), &bytes[12..Self::BYTES])
    }
}

/// A segment that is ready to be written.
pub(super) struct Segment {
    pub(super) number: u64,
    pub(super) path: PathBuf,
    pub(super) file: Box<dyn DiskFile>,
    /// Usable length in bytes, a multiple of the page size.
    pub(super) capacity: u64,
}

impl Segment {
    /// Creates the segment with this number: recycles a spare segment, or creates a file of zeros with `first` at the start. A spare
    /// segment is used only without `first`. The name of the segment is durable when this returns.
    pub(super) fn create(data_dir: &DataDir, number: u64, first: Option<&[u8]>) -> io::Result<Self> {
        let path = data_dir.segment(number);
        let capacity = data_dir.segment_bytes;
        while let Some(number_of_spare) = first.is_none().then(|| data_dir.take_spare()).flatten() {
            let spare = data_dir.segment(number_of_spare);
            let file = data_dir.disk.open(&spare).inspect_err(|error| {
                // The file is intact, so a later attempt may open it.
                if is_out_of_descriptors(error) {
                    data_dir.return_spare(number_of_spare);
                }
            })?;
            if file.len()? == capacity {
                data_dir.disk.rename(&spare, &path)?;
                data_dir.entries.sync()?;
                return Ok(Self { number, path, file, capacity });
            }
            drop(file);
            data_dir.disk.remove(&spare)?;
        }
        let unfinished = data_dir.dir.join("log.tmp");
        let created = (|| {
            let file = data_dir.disk.create(&unfinished)?;
            fill_with_zeros(&*file, 0, capacity)?;
            file.write_at(first.unwrap_or_default(), 0)?;
            file.sync_all()?;
            data_dir.disk.rename(&unfinished, &path)?;
            data_dir.entries.sync()?;
            Ok(file)
        })();
        match created {
            Ok(file) => Ok(Self { number, path, file, capacity }),
            Err(error) => {
                // Releases the space.
                let _ = data_dir.disk.remove(&unfinished);
                Err(error)
            }
        }
    }

    /// Writes zeros after the end of the segment, up to this capacity. The first `used` bytes are unchanged. The caller syncs the
    /// file, and then sets the capacity.
    pub(super) fn extend(&self, capacity: u64, used: u64) -> io::Result<()> {
        fill_with_zeros(&*self.file, self.capacity.max(used), capacity)
    }
}

/// Allocates a file up to `to`, and writes zeros from `from` to `to`.
fn fill_with_zeros(file: &dyn DiskFile, from: u64, to: u64) -> io::Result<()> {
    file.allocate(to)?;
    for offset in (from..to).step_by(ZEROS.len()) {
        let len = ZEROS.len().min(usize::try_from(to - offset).unwrap_or(usize::MAX));
        file.write_at(&ZEROS[..len], offset)?;
    }
    Ok(())
}
