//! The data directory: file names, the lock, and the files in use.
//!
//! Every user of the files has a reference to the `DataDir`, which has the lock: the directory is unlocked when the engine is closed
//! and the last checkpoint, backup and preparation of a segment have ended.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use super::super::disk::is_out_of_descriptors;
use super::super::{Disk, DiskDir, DiskFile};
use crate::lock::lock;

/// A locked data directory.
pub(super) struct DataDir {
    pub(super) disk: Arc<dyn Disk>,
    pub(super) dir: PathBuf,
    /// The directory, kept open so that syncing its entries needs no new file descriptor.
    pub(super) entries: Box<dyn DiskDir>,
    pub(super) segment_bytes: u64,
    /// Limit of the number of spare segments. Further spare segments are removed.
    pub(super) max_spares: usize,
    inventory: Mutex<Inventory>,
    /// A file that is kept open to reserve its descriptor for the next snapshot.
    reserve: Mutex<Option<Box<dyn DiskFile>>>,
    _lock: Box<dyn Send + Sync>,
}

/// The files in use.
#[derive(Debug, Default)]
pub(super) struct Inventory {
    /// The first segment that a recovery reads.
    pub(super) first: u64,
    /// The newest snapshot.
    pub(super) snapshot: Option<SnapshotFile>,
    /// Spare segments, to be recycled.
    pub(super) spares: Vec<u64>,
    /// Number of running backups, during which nothing is recycled or removed.
    pins: usize,
    /// Segments to recycle when the last backup ends.
    held_segments: Vec<u64>,
    /// Snapshots to remove when the last backup ends.
    held_snapshots: Vec<PathBuf>,
    /// Whether a checkpoint is running.
    pub(super) is_checkpointing: bool,
    pub(super) checkpoints: u64,
    pub(super) checkpoints_failed: u64,
}

/// A complete snapshot.
#[derive(Debug, Clone)]
pub(super) struct SnapshotFile {
    pub(super) path: PathBuf,
    pub(super) bytes: u64,
    /// Bytes appended to the log when the snapshot was taken.
    pub(super) appended: u64,
}

impl DataDir {
    pub(super) fn new(
        disk: Arc<dyn Disk>,
        dir: &Path,
        lock: Box<dyn Send + Sync>,
        segment_bytes: u64,
        max_spares: usize,
    ) -> io::Result<Self> {
        let inventory = Mutex::new(Inventory { first: 1, ..Inventory::default() });
        let entries = disk.open_dir(dir)?;
        let (dir, reserve) = (dir.to_owned(), Mutex::default());
        Ok(Self { disk, dir, entries, segment_bytes, max_spares, inventory, reserve, _lock: lock })
    }

    /// Creates a file. Uses the reserved file descriptor if no other is left.
    pub(super) fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        match self.disk.create(path) {
            Err(error) if is_out_of_descriptors(&error) && self.reserved().take().is_some() => self.disk.create(path),
            created => created,
        }
    }

    /// Reserves the descriptor of this file. The caller passes the newest snapshot, whose space is in use until the next one exists.
    pub(super) fn reserve(&self, file: Box<dyn DiskFile>) {
        *self.reserved() = Some(file);
    }

    /// Reserves a descriptor by opening the first segment, unless one is reserved.
    pub(super) fn reserve_again(&self) -> io::Result<()> {
        let first = self.segment(self.inventory().first);
        let mut reserved = self.reserved();
        if reserved.is_none() {
            *reserved = Some(self.disk.open(&first)?);
        }
        Ok(())
    }

    fn reserved(&self) -> MutexGuard<'_, Option<Box<dyn DiskFile>>> {
        lock(&self.reserve)
    }

    pub(super) fn inventory(&self) -> MutexGuard<'_, Inventory> {
        lock(&self.inventory)
    }

    pub(super) fn segment(&self, number: u64) -> PathBuf {
        self.dir.join(segment_name(number))
    }

    pub(super) fn snapshot(&self, sequence: u64) -> PathBuf {
        self.dir.join(snapshot_name(sequence))
    }

    pub(super) fn take_spare(&self) -> Option<u64> {
        self.inventory().spares.pop()
    }

    pub(super) fn return_spare(&self, number: u64) {
        self.inventory().spares.push(number);
    }

    /// Sets the newest snapshot and the first segment that a recovery reads. Files that are no longer needed are recycled or
    /// removed as soon as no backup is running.
    pub(super) fn set_snapshot(&self, first: u64, snapshot: SnapshotFile) {
        let mut inventory = self.inventory();
        let old = inventory.first..first;
        inventory.held_segments.extend(old);
        inventory.first = first;
        // A snapshot of the same position has been replaced by the rename.
        let before = inventory.snapshot.take().filter(|before| before.path != snapshot.path);
        inventory.held_snapshots.extend(before.map(|before| before.path));
        inventory.snapshot = Some(snapshot);
        inventory.checkpoints += 1;
        self.release(inventory);
    }

    /// Prevents files in use from being recycled or removed until [`unpin`](Self::unpin).
    pub(super) fn pin(&self) -> MutexGuard<'_, Inventory> {
        let mut inventory = self.inventory();
        inventory.pins += 1;
        inventory
    }

    pub(super) fn unpin(&self) {
        let mut inventory = self.inventory();
        inventory.pins -= 1;
        self.release(inventory);
    }

    /// Recycles and removes the held files, unless a backup is running.
    fn release(&self, mut inventory: MutexGuard<'_, Inventory>) {
        if inventory.pins > 0 {
            return;
        }
        let mut remove = std::mem::take(&mut inventory.held_snapshots);
        let segments = std::mem::take(&mut inventory.held_segments);
        inventory.spares.extend(segments);
        let excess = inventory.spares.len().saturating_sub(self.max_spares);
        remove.extend(inventory.spares.drain(..excess).map(|number| self.segment(number)));
        drop(inventory);
        for path in remove {
            // If the removal fails, the next recovery finds the file.
            let _ = self.disk.remove(&path);
        }
    }
}

/// Creates a directory and its missing parents. Each entry is durable before the next directory is created in it.
///
/// A process may have been killed between creating a directory and syncing its entry. Such a directory is empty, so the entry of
/// an empty directory is synced too.
pub(super) fn create_dir(disk: &dyn Disk, dir: &Path) -> io::Result<()> {
    let parent = dir.parent().filter(|parent| !parent.as_os_str().is_empty());
    let sync_parent = || disk.open_dir(parent.unwrap_or(Path::new(".")))?.sync();
    match disk.list(dir) {
        Ok(names) if !names.is_empty() => Ok(()),
        Ok(_) => match sync_parent() {
            // A process that may not read the parent did not create the directory.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(()),
            synced => synced,
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            parent.map_or(Ok(()), |parent| create_dir(disk, parent))?;
            disk.create_dir(dir)?;
            sync_parent()
        }
        Err(error) => Err(error),
    }
}

pub(super) fn segment_name(number: u64) -> String {
    format!("log-{number:016x}")
}

pub(super) fn snapshot_name(sequence: u64) -> String {
    format!("snapshot-{sequence:016x}")
}

/// The engine's files in a directory.
#[derive(Debug, Default)]
pub(super) struct Listing {
    /// The numbers of the segments, in ascending order.
    pub(super) segments: Vec<u64>,
    /// The sequences of the snapshots, in ascending order.
    pub(super) snapshots: Vec<u64>,
    /// The names of incomplete files.
    pub(super) unfinished: Vec<String>,
    /// Whether the directory is an incomplete copy.
    pub(super) is_unfinished_backup: bool,
}

/// Name of the file that marks a copy as incomplete.
pub(super) const UNFINISHED_BACKUP: &str = "backup.unfinished";

impl Listing {
    pub(super) fn read(disk: &dyn Disk, dir: &Path) -> io::Result<Self> {
        let mut listing = Self::default();
        for name in disk.list(dir)? {
            let number = |prefix| {
                let digits: &str = name.strip_prefix(prefix)?;
                (digits.len() == 16).then(|| u64::from_str_radix(digits, 16).ok()).flatten()
            };
            if let Some(segment) = number("log-") {
                listing.segments.push(segment);
            } else if let Some(snapshot) = number("snapshot-") {
                listing.snapshots.push(snapshot);
            } else if name == UNFINISHED_BACKUP {
                listing.is_unfinished_backup = true;
            } else if name == "log.tmp" || name == "snapshot.tmp" {
                listing.unfinished.push(name);
            }
        }
        listing.segments.sort_unstable();
        listing.snapshots.sort_unstable();
        Ok(listing)
    }
}
