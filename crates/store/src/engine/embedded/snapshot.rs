//! Snapshots: all rows as of one position, in a file that is renamed when it is complete.
//!
//! ```text
//! header   64 bytes: the log, the position, the first segment with later commits
//! blocks   payload: u32   rows: u32   checksum: u32   zero: u32   and the payload
//!          a payload is rows: bucket: u16   key: u32   row: u32 (lengths)   their bytes
//! end      a block with 0xffffffff rows, whose payload is the total number of rows: u64, and of blocks before it: u64
//! ```
//!
//! Numbers are little-endian. The checksum of a block covers its offset in the file, so that swapped blocks are detected.

use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use super::super::{Disk, DiskFile, StoredRow};
use super::frame::{decode, encode_row, matches, u32_at, u64_at};
use super::recovery::{Corruption, OpenError};

const MAGIC: [u8; 8] = *b"TIDESNAP";
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 64;
const BLOCK_HEADER_BYTES: usize = 16;
/// Length at which a block is written: small enough for memory, large enough for efficient writes.
const BLOCK_BYTES: usize = 256 * 1024;
/// Bytes written between two syncs. Frequent syncs keep the I/O queue short for syncs of the log.
const SYNC_INTERVAL_BYTES: u64 = 256 << 10;
/// Limit of the pause after a sync. The pause is as long as the sync took, so that commits get half of the disk's time.
const MAX_PAUSE: Duration = Duration::from_millis(50);
const END: u32 = u32::MAX;

/// The header of a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SnapshotHeader {
    /// Identifies the log.
    pub(super) log: u64,
    pub(super) epoch: u64,
    /// The sequence of the last commit in the snapshot.
    pub(super) sequence: u64,
    /// The first segment that can have later commits.
    pub(super) segment: u64,
}

impl SnapshotHeader {
    fn write(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        for (index, number) in [self.log, self.epoch, self.sequence, self.segment].into_iter().enumerate() {
            bytes[16 + index * 8..24 + index * 8].copy_from_slice(&number.to_le_bytes());
        }
        let crc = Self::crc(&bytes);
        bytes[12..16].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    fn crc(bytes: &[u8; HEADER_BYTES]) -> u32 {
        crc32c::crc32c_append(crc32c::crc32c(&bytes[..12]), &bytes[16..])
    }
}

fn block_crc(offset: u64, header: &[u8], payload: &[u8]) -> u32 {
    let crc = crc32c::crc32c_append(crc32c::crc32c(&offset.to_le_bytes()), &header[..8]);
    crc32c::crc32c_append(crc, payload)
}

/// Writes a snapshot into a new file and syncs it. Returns its length.
pub(super) fn write<'a>(
    file: &dyn DiskFile,
    header: &SnapshotHeader,
    rows: impl IntoIterator<Item = StoredRow<'a>>,
) -> io::Result<u64> {
    let mut writer = Writer {
        file,
        offset: 0,
        synced_offset: 0,
        block: Vec::with_capacity(BLOCK_BYTES * 2),
        rows_in_block: 0,
        blocks: 0,
    };
    file.write_at(&header.write(), 0)?;
    writer.offset = HEADER_BYTES as u64;
    writer.begin_block();
    let mut total_rows: u64 = 0;
    for row in rows {
        let fits = u16::try_from(row.bucket.len()).is_ok()
            && row.key.len().saturating_add(row.row.len()) < (u32::MAX / 2) as usize;
        if !fits {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a row is too large for a snapshot"));
        }
        encode_row(&row, &mut writer.block);
        writer.rows_in_block += 1;
        total_rows += 1;
        if writer.block.len() >= BLOCK_BYTES {
            writer.end_block()?;
        }
    }
    if writer.rows_in_block > 0 {
        writer.end_block()?;
    }
    let blocks = writer.blocks;
    writer.block.extend_from_slice(&total_rows.to_le_bytes());
    writer.block.extend_from_slice(&blocks.to_le_bytes());
    writer.rows_in_block = END;
    writer.end_block()?;
    file.sync_all()?;
    Ok(writer.offset)
}

struct Writer<'f> {
    file: &'f dyn DiskFile,
    offset: u64,
    /// The offset up to which the file was synced.
    synced_offset: u64,
    /// The header and payload of the block that is being filled.
    block: Vec<u8>,
    /// The number of rows in that block.
    rows_in_block: u32,
    /// The number of blocks written.
    blocks: u64,
}

impl Writer<'_> {
    fn begin_block(&mut self) {
        self.block.clear();
        self.block.resize(BLOCK_HEADER_BYTES, 0);
        self.rows_in_block = 0;
    }

    fn end_block(&mut self) -> io::Result<()> {
        let len = u32::try_from(self.block.len() - BLOCK_HEADER_BYTES).map_err(io::Error::other)?;
        self.block[..4].copy_from_slice(&len.to_le_bytes());
        self.block[4..8].copy_from_slice(&self.rows_in_block.to_le_bytes());
        let crc = block_crc(self.offset, &self.block[..8], &self.block[BLOCK_HEADER_BYTES..]);
        self.block[8..12].copy_from_slice(&crc.to_le_bytes());
        self.file.write_at(&self.block, self.offset)?;
        self.offset += self.block.len() as u64;
        self.blocks += 1;
        if self.offset - self.synced_offset >= SYNC_INTERVAL_BYTES {
            let began = Instant::now();
            self.file.sync_data()?;
            std::thread::sleep(began.elapsed().min(MAX_PAUSE));
            self.synced_offset = self.offset;
        }
        self.begin_block();
        Ok(())
    }
}

/// Reads a snapshot, and passes its rows to `each`. Returns its header and length. At most one block is in memory at a time, and
/// its length is checked against the file before memory is allocated.
pub(super) fn read(
    disk: &dyn Disk,
    path: &Path,
    mut each: impl FnMut(StoredRow<'_>),
) -> Result<(SnapshotHeader, u64), OpenError> {
    let corrupt = |offset, what| OpenError::Corrupt { file: path.to_owned(), offset, what };
    let failed = |source| OpenError::Io { file: path.to_owned(), source };
    let file = disk.open(path).map_err(failed)?;
    let len = file.len().map_err(failed)?;
    let mut bytes = [0; HEADER_BYTES];
    if read_fully(&*file, &mut bytes, 0).map_err(failed)? < HEADER_BYTES
        || bytes[..8] != MAGIC
        || !matches(u32_at(&bytes, 12), SnapshotHeader::crc(&bytes))
    {
        return Err(corrupt(0, Corruption::SnapshotHeader));
    }
    let version = u32_at(&bytes, 8);
    if version != VERSION {
        return Err(OpenError::Version { file: path.to_owned(), version });
    }
    let header = SnapshotHeader {
        log: u64_at(&bytes, 16),
        epoch: u64_at(&bytes, 24),
        sequence: u64_at(&bytes, 32),
        segment: u64_at(&bytes, 40),
    };

    let (mut offset, mut total_rows, mut blocks, mut payload) = (HEADER_BYTES as u64, 0_u64, 0_u64, Vec::new());
    loop {
        let mut head = [0; BLOCK_HEADER_BYTES];
        if read_fully(&*file, &mut head, offset).map_err(failed)? < BLOCK_HEADER_BYTES {
            return Err(corrupt(offset, Corruption::SnapshotEnd));
        }
        let (size, rows, crc) = (u32_at(&head, 0), u32_at(&head, 4), u32_at(&head, 8));
        let next = offset + BLOCK_HEADER_BYTES as u64 + u64::from(size);
        if next > len {
            return Err(corrupt(offset, Corruption::SnapshotBlock));
        }
        payload.resize(size as usize, 0);
        let read = read_fully(&*file, &mut payload, offset + BLOCK_HEADER_BYTES as u64).map_err(failed)?;
        // The last four bytes of the header are reserved.
        if read < payload.len() || !matches(crc, block_crc(offset, &head, &payload)) || head[12..] != [0; 4] {
            return Err(corrupt(offset, Corruption::SnapshotBlock));
        }
        if rows == END {
            let is_end = payload.len() == 16
                && u64_at(&payload, 0) == total_rows
                && u64_at(&payload, 8) == blocks
                && next == len;
            return if is_end { Ok((header, len)) } else { Err(corrupt(offset, Corruption::SnapshotEnd)) };
        }
        let mut rest = &payload[..];
        for _ in 0..rows {
            let write = decode(&mut rest).and_then(|write| Some((write, write.row?)));
            let Some((write, row)) = write else { return Err(corrupt(offset, Corruption::SnapshotBlock)) };
            each(StoredRow { bucket: write.bucket, key: write.key, row });
        }
        if !rest.is_empty() {
            return Err(corrupt(offset, Corruption::SnapshotBlock));
        }
        (offset, total_rows, blocks) = (next, total_rows + u64::from(rows), blocks + 1);
    }
}

/// Reads until the buffer is full or the file ends. Returns the number of bytes.
pub(super) fn read_fully(file: &dyn DiskFile, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut filled = 0;
    while filled < bytes.len() {
        match file.read_at(&mut bytes[filled..], offset + filled as u64)? {
            0 => break,
            read => filled += read,
        }
    }
    Ok(filled)
}
