//! Backups: a copy of the newest snapshot and of the log after it, made while commits go on.
//!
//! What is copied is not recycled meanwhile. A copy can be opened like the directory it was made from, and goes on from the
//! position at which it was begun.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::super::{Disk, DiskFile, Position};
use super::home::{Home, Listing, UNFINISHED_BACKUP, segment_name, snapshot_name};
use super::recovery::OpenError;
use super::segment::PAGE;
use super::snapshot::fill;

/// A backup that has begun. Dropping it gives it up.
///
/// To use the copy, [restore](super::Embedded::restore) it.
#[must_use = "a backup that is not run copies nothing"]
pub struct Backup {
    home: Arc<Home>,
    dir: PathBuf,
    position: Position,
    snapshot: Option<PathBuf>,
    /// The first segment.
    first: u64,
    /// The last segment, and how many of its bytes belong to the copy.
    end: (u64, u64),
}

/// Why a backup failed. The original is as it was.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BackupError {
    /// The directory has something in it.
    #[error("{} is not empty: a backup needs a directory of its own", dir.display())]
    NotEmpty {
        /// The directory.
        dir: PathBuf,
    },
    /// The disk failed, or is full. The directory has an unfinished backup, which is not opened.
    #[error("cannot copy to {}: the backup is unfinished", file.display())]
    Io {
        /// The file or directory.
        file: PathBuf,
        /// What the disk said.
        source: io::Error,
    },
}

/// Why a backup was not restored. It is as it was.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RestoreError {
    /// There is nothing to restore.
    #[error("{} is no backup", dir.display())]
    NoBackup {
        /// The directory.
        dir: PathBuf,
    },
    /// It could not be copied.
    #[error(transparent)]
    Copy(#[from] BackupError),
    /// The backup, or the copy of it, cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
}

impl Backup {
    pub(super) fn begin(home: &Arc<Home>, dir: &Path, position: Position, end: (u64, u64)) -> Self {
        let inventory = home.pin();
        let (first, snapshot) = (inventory.first, inventory.snapshot.as_ref().map(|snapshot| snapshot.path.clone()));
        drop(inventory);
        Self { home: Arc::clone(home), dir: dir.to_owned(), position, snapshot, first, end }
    }

    /// As of when it is.
    pub fn position(&self) -> Position {
        self.position
    }

    /// Makes the copy. It is durable when this returns.
    pub fn run(self) -> Result<Position, BackupError> {
        let disk = &*self.home.disk;
        fill_dir(disk, &self.dir, || {
            if let Some(snapshot) = &self.snapshot {
                copy_snapshot(disk, snapshot, &self.dir)?;
            }
            let (last, used) = self.end;
            for number in self.first..=last {
                copy_segment(
                    disk,
                    &self.home.segment(number),
                    &self.dir,
                    if number == last { used } else { u64::MAX },
                )?;
            }
            Ok(())
        })?;
        Ok(self.position)
    }
}

/// Copies a backup, which nobody has open, into a directory of its own.
pub(super) fn restore(disk: &dyn Disk, backup: &Path, dir: &Path) -> Result<(), RestoreError> {
    let failed = |source| RestoreError::Open(OpenError::Io { file: backup.to_owned(), source });
    let listing = Listing::read(disk, backup).map_err(failed)?;
    if listing.is_unfinished_backup {
        return Err(OpenError::UnfinishedBackup { dir: backup.to_owned() }.into());
    }
    if listing.segments.is_empty() && listing.snapshots.is_empty() {
        return Err(RestoreError::NoBackup { dir: backup.to_owned() });
    }
    let lock = disk.lock(&backup.join("lock")).map_err(failed)?;
    let _lock = lock.ok_or_else(|| OpenError::Locked { dir: backup.to_owned() })?;
    fill_dir(disk, dir, || {
        for sequence in &listing.snapshots {
            copy_snapshot(disk, &backup.join(snapshot_name(*sequence)), dir)?;
        }
        for number in &listing.segments {
            copy_segment(disk, &backup.join(segment_name(*number)), dir, u64::MAX)?;
        }
        Ok(())
    })?;
    Ok(())
}

/// Makes a directory, or takes an empty one, and lets it be filled. Until all of it is durable it has a mark that it is not
/// finished.
fn fill_dir(disk: &dyn Disk, dir: &Path, fill: impl FnOnce() -> Result<(), BackupError>) -> Result<(), BackupError> {
    disk.create_dir(dir).map_err(failed(dir))?;
    if !disk.list(dir).map_err(failed(dir))?.is_empty() {
        return Err(BackupError::NotEmpty { dir: dir.to_owned() });
    }
    let mark = dir.join(UNFINISHED_BACKUP);
    disk.create(&mark).map_err(failed(&mark))?;
    disk.sync_dir(dir).map_err(failed(dir))?;
    fill()?;
    disk.sync_dir(dir).map_err(failed(dir))?;
    disk.remove(&mark).map_err(failed(&mark))?;
    disk.sync_dir(dir).map_err(failed(dir))
}

fn failed(file: &Path) -> impl FnOnce(io::Error) -> BackupError {
    let file = file.to_owned();
    move |source| BackupError::Io { file, source }
}

fn copy_snapshot(disk: &dyn Disk, from: &Path, dir: &Path) -> Result<(), BackupError> {
    let to = dir.join(from.file_name().unwrap_or_default());
    // It never changes, so that a second name is as good as a copy, where there can be one.
    if disk.link(from, &to).is_err() {
        copy(disk, from, &to, u64::MAX).map_err(failed(&to))?;
    }
    Ok(())
}

fn copy_segment(disk: &dyn Disk, from: &Path, dir: &Path, len: u64) -> Result<(), BackupError> {
    let to = dir.join(from.file_name().unwrap_or_default());
    copy(disk, from, &to, len).map_err(failed(&to))
}

/// Copies so many bytes at most, and pads them to whole pages.
fn copy(disk: &dyn Disk, from: &Path, to: &Path, len: u64) -> io::Result<()> {
    let source = disk.open(from)?;
    let target: Box<dyn DiskFile> = disk.create(to)?;
    let len = source.len()?.min(len);
    let mut piece = vec![0; 256 * 1024];
    let mut offset = 0;
    while offset < len {
        let wanted = piece.len().min(usize::try_from(len - offset).unwrap_or(usize::MAX));
        let filled = fill(&*source, &mut piece[..wanted], offset)?;
        if filled < wanted {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        target.write_at(&piece[..filled], offset)?;
        offset += filled as u64;
    }
    let page = PAGE as u64;
    let is_segment_end = !len.is_multiple_of(page) && source.len()? > len;
    if is_segment_end {
        let padding = len.next_multiple_of(page) - len;
        target.write_at(&[0; PAGE][..usize::try_from(padding).unwrap_or(0)], len)?;
    }
    target.sync_all()
}

impl Drop for Backup {
    fn drop(&mut self) {
        self.home.unpin();
    }
}

impl fmt::Debug for Backup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Backup").field("dir", &self.dir).field("position", &self.position).finish_non_exhaustive()
    }
}
