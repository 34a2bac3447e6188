//! Backups: copies of the newest snapshot and of the log after it.
//!
//! A backup of an open engine runs while commits continue; files that are being copied are not recycled. A backup of a directory
//! that is not open first reads and checks the whole directory. A restore copies a backup in the same way, and gives the copy a new
//! epoch.
//!
//! A marker file exists in the target from before the first copied file until the copy is durable. A crash therefore leaves a
//! directory that cannot be opened, and a restored directory is never opened with the epoch of the original.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::super::{Disk, DiskFile};
use super::data_dir::{DataDir, Listing, UNFINISHED_BACKUP, create_dir};
use super::recovery::{OpenError, Recovery, recover};
use super::segment::PAGE_BYTES;
use super::snapshot::read_fully;
use crate::Position;

/// A backup that has begun. Dropping it abandons it.
///
/// To use the copy, [restore](super::Embedded::restore) it.
#[must_use = "a backup does nothing unless it is run"]
pub struct Backup {
    data_dir: Arc<DataDir>,
    dir: PathBuf,
    position: Position,
    snapshot: Option<PathBuf>,
    /// The number of the first segment.
    first: u64,
    /// The number of the last segment, and the number of its bytes to copy.
    end: (u64, u64),
}

/// The error of a backup. The original is unchanged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BackupError {
    /// The target directory is not empty.
    #[error("{} is not empty: expected a new or an empty directory", dir.display())]
    NotEmpty {
        /// The directory.
        dir: PathBuf,
    },
    /// The disk failed, or is full. The target directory is marked as incomplete and cannot be opened.
    #[error("cannot copy to {}: the copy is incomplete; remove its directory and try again", file.display())]
    Io {
        /// The file or directory.
        file: PathBuf,
        /// The error of the disk.
        source: io::Error,
    },
}

/// The error of [`Embedded::backup_dir`](super::Embedded::backup_dir) and [`Embedded::restore`](super::Embedded::restore). The
/// original is unchanged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CopyError {
    /// The directory has no data.
    #[error("{} has no data: expected a data directory or a backup", dir.display())]
    NoData {
        /// The directory.
        dir: PathBuf,
    },
    /// The copy could not be written.
    #[error(transparent)]
    Write(#[from] BackupError),
    /// The directory, or the copy of it, cannot be opened: it is locked, corrupt or incomplete.
    #[error(transparent)]
    Open(#[from] OpenError),
}

impl Backup {
    pub(super) fn begin(data_dir: &Arc<DataDir>, dir: &Path, position: Position, end: (u64, u64)) -> Self {
        let inventory = data_dir.pin();
        let (first, snapshot) = (inventory.first, inventory.snapshot.as_ref().map(|snapshot| snapshot.path.clone()));
        drop(inventory);
        Self { data_dir: Arc::clone(data_dir), dir: dir.to_owned(), position, snapshot, first, end }
    }

    /// Begins a backup of a directory that is not open, after reading and checking the whole directory. The directory is locked until
    /// the backup ends.
    pub(super) fn of_dir(disk: &Arc<dyn Disk>, from: &Path, to: &Path) -> Result<Self, CopyError> {
        let failed = |source| OpenError::Io { file: from.to_owned(), source };
        let no_data = || CopyError::NoData { dir: from.to_owned() };
        // Taking the lock creates a file, so a directory without data is rejected first.
        let listing = Listing::read(&**disk, from).map_err(failed)?;
        if listing.is_unfinished_backup {
            return Err(OpenError::UnfinishedBackup { dir: from.to_owned() }.into());
        }
        if listing.segments.is_empty() && listing.snapshots.is_empty() {
            return Err(no_data());
        }
        let lock = disk.lock(&from.join("lock")).map_err(failed)?;
        let lock = lock.ok_or_else(|| OpenError::Locked { dir: from.to_owned() })?;
        let listing = Listing::read(&**disk, from).map_err(failed)?;
        // A backup creates and removes no segments, so it needs no segment length and keeps all spare segments.
        let data_dir = Arc::new(DataDir::new(Arc::clone(disk), from, lock, 0, usize::MAX).map_err(failed)?);
        let found = recover(&data_dir, &listing, &mut |_| {})?.ok_or_else(no_data)?;
        let position = Position { epoch: found.cursor.epoch, sequence: found.cursor.sequence - 1 };
        Ok(Self::begin(&data_dir, to, position, (found.segment, found.page_offset + found.tail.len() as u64)))
    }

    /// Returns the position of the last commit in the copy.
    pub fn position(&self) -> Position {
        self.position
    }

    /// Copies the files. The copy is durable when this returns.
    pub fn run(self) -> Result<Position, BackupError> {
        fill_dir(&*self.data_dir.disk, &self.dir, || self.copy_files())?;
        Ok(self.position)
    }

    /// Copies the files, and opens the copy before the marker file is removed.
    pub(super) fn restore(self, open: impl FnOnce() -> Result<Recovery, OpenError>) -> Result<Recovery, CopyError> {
        fill_dir(&*self.data_dir.disk, &self.dir, || {
            self.copy_files()?;
            Ok(open()?)
        })
    }

    fn copy_files(&self) -> Result<(), BackupError> {
        let disk = &*self.data_dir.disk;
        if let Some(snapshot) = &self.snapshot {
            copy_snapshot(disk, snapshot, &self.dir)?;
        }
        let (last, used) = self.end;
        for number in self.first..=last {
            let len = if number == last { used } else { u64::MAX };
            copy_segment(disk, &self.data_dir.segment(number), &self.dir, len)?;
        }
        sync_dir(disk, &self.dir)
    }
}

fn sync_dir(disk: &dyn Disk, dir: &Path) -> Result<(), BackupError> {
    disk.open_dir(dir).and_then(|dir| dir.sync()).map_err(failed(dir))
}

/// Fills a new or empty directory, which is marked as incomplete until `fill` is done.
fn fill_dir<T, E: From<BackupError>>(disk: &dyn Disk, dir: &Path, fill: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
    create_dir(disk, dir).map_err(failed(dir))?;
    if !disk.list(dir).map_err(failed(dir))?.is_empty() {
        return Err(BackupError::NotEmpty { dir: dir.to_owned() }.into());
    }
    let marker = dir.join(UNFINISHED_BACKUP);
    disk.create(&marker).map_err(failed(&marker))?;
    sync_dir(disk, dir)?;
    let filled = fill()?;
    disk.remove(&marker).map_err(failed(&marker))?;
    sync_dir(disk, dir)?;
    Ok(filled)
}

fn failed(file: &Path) -> impl FnOnce(io::Error) -> BackupError {
    let file = file.to_owned();
    move |source| BackupError::Io { file, source }
}

fn copy_snapshot(disk: &dyn Disk, from: &Path, dir: &Path) -> Result<(), BackupError> {
    let to = dir.join(from.file_name().unwrap_or_default());
    // A snapshot is immutable, so a hard link can replace a copy.
    if disk.link(from, &to).is_err() {
        copy(disk, from, &to, u64::MAX).map_err(failed(&to))?;
    }
    Ok(())
}

fn copy_segment(disk: &dyn Disk, from: &Path, dir: &Path, len: u64) -> Result<(), BackupError> {
    let to = dir.join(from.file_name().unwrap_or_default());
    copy(disk, from, &to, len).map_err(failed(&to))
}

/// Copies at most `len` bytes, padded to a multiple of the page size.
fn copy(disk: &dyn Disk, from: &Path, to: &Path, len: u64) -> io::Result<()> {
    let source = disk.open(from)?;
    let target: Box<dyn DiskFile> = disk.create(to)?;
    let len = source.len()?.min(len);
    let mut piece = vec![0; 256 * 1024];
    let mut offset = 0;
    while offset < len {
        let wanted = piece.len().min(usize::try_from(len - offset).unwrap_or(usize::MAX));
        let filled = read_fully(&*source, &mut piece[..wanted], offset)?;
        if filled < wanted {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        target.write_at(&piece[..filled], offset)?;
        offset += filled as u64;
    }
    let page = PAGE_BYTES as u64;
    let is_segment_end = !len.is_multiple_of(page) && source.len()? > len;
    if is_segment_end {
        let padding = len.next_multiple_of(page) - len;
        target.write_at(&[0; PAGE_BYTES][..usize::try_from(padding).unwrap_or(0)], len)?;
    }
    target.sync_all()
}

impl Drop for Backup {
    fn drop(&mut self) {
        self.data_dir.unpin();
    }
}

impl fmt::Debug for Backup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Backup").field("dir", &self.dir).field("position", &self.position).finish_non_exhaustive()
    }
}
