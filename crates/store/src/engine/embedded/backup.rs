//! Backups: a copy of the newest snapshot and of the log after it, made while commits go on.
//!
//! What is copied is not recycled meanwhile. A copy can be opened like the directory it was made from, and goes on from the
//! position at which it was begun.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::super::{Disk, DiskFile, Position};
use super::home::{Home, UNFINISHED_BACKUP};
use super::segment::PAGE;
use super::snapshot::fill;

/// A backup that has begun. Dropping it gives it up.
///
/// Open the copy with [`is_copy`](super::EmbeddedOptions::is_copy), so that its positions are told from those of the original.
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
        let failed = |file: &Path| {
            let file = file.to_owned();
            move |source| BackupError::Io { file, source }
        };
        disk.create_dir(&self.dir).map_err(failed(&self.dir))?;
        if !disk.list(&self.dir).map_err(failed(&self.dir))?.is_empty() {
            return Err(BackupError::NotEmpty { dir: self.dir.clone() });
        }
        let mark = self.dir.join(UNFINISHED_BACKUP);
        disk.create(&mark).map_err(failed(&mark))?;
        disk.sync_dir(&self.dir).map_err(failed(&self.dir))?;

        if let Some(from) = &self.snapshot {
            let to = self.dir.join(from.file_name().unwrap_or_default());
            // It never writes, so that a second name is as good as a copy, where there can be one.
            if disk.link(from, &to).is_err() {
                copy(disk, from, &to, u64::MAX).map_err(failed(&to))?;
            }
        }
        let (last, used) = self.end;
        for number in self.first..=last {
            let from = self.home.segment(number);
            let to = self.dir.join(from.file_name().unwrap_or_default());
            copy(disk, &from, &to, if number == last { used } else { u64::MAX }).map_err(failed(&to))?;
        }
        disk.sync_dir(&self.dir).map_err(failed(&self.dir))?;
        disk.remove(&mark).map_err(failed(&mark))?;
        disk.sync_dir(&self.dir).map_err(failed(&self.dir))?;
        Ok(self.position)
    }
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
