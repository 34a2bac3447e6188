//! The interface between an engine and the operating system: files, directories, and a background thread.
//!
//! The embedded engine accesses the disk only through this interface, so tests can substitute a disk that loses power, fills up or
//! fails.

use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::thread;

/// A disk: files in directories.
///
/// An engine relies on these guarantees after a power failure: the bytes of a synced file are durable; a directory entry is
/// durable once the directory is synced; a rename is atomic; an unsynced write may be present in part, in whole sectors of 512
/// bytes. After a failed sync the unsynced bytes may be readable until the power fails, and become durable only if they are
/// written again and synced.
pub trait Disk: Send + Sync + 'static {
    /// Creates a directory in an existing one. Does nothing if the directory exists.
    fn create_dir(&self, dir: &Path) -> io::Result<()>;
    /// Opens a directory, to sync its entries.
    fn open_dir(&self, dir: &Path) -> io::Result<Box<dyn DiskDir>>;
    /// Returns the names in a directory. Names that are not UTF-8 are left out.
    fn list(&self, dir: &Path) -> io::Result<Vec<String>>;
    /// Locks a file until the returned lock is dropped or the process ends. Returns `None` if the file is locked, by this process or
    /// another.
    fn lock(&self, file: &Path) -> io::Result<Option<Box<dyn Send + Sync>>>;
    /// Opens a file for reading and writing.
    fn open(&self, file: &Path) -> io::Result<Box<dyn DiskFile>>;
    /// Creates an empty file. Replaces an existing file of that name.
    fn create(&self, file: &Path) -> io::Result<Box<dyn DiskFile>>;
    /// Renames a file. Replaces an existing file of the new name.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Creates a hard link to a file. Fails if the new name exists.
    fn link(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a file.
    fn remove(&self, file: &Path) -> io::Result<()>;
    /// Runs work in the background.
    fn spawn(&self, work: Box<dyn FnOnce() + Send>);
}

/// An open directory.
pub trait DiskDir: Send + Sync {
    /// Makes the entries of the directory durable.
    fn sync(&self) -> io::Result<()>;
}

/// An open file.
pub trait DiskFile: Send + Sync {
    /// Returns the length in bytes.
    fn len(&self) -> io::Result<u64>;
    /// Returns whether the file has no bytes.
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }
    /// Reads some bytes. Returns zero only at the end of the file.
    fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<usize>;
    /// Writes all of the bytes.
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;
    /// Allocates space for the first `len` bytes of the file. Does nothing if the file system cannot.
    fn allocate(&self, len: u64) -> io::Result<()>;
    /// Makes the bytes durable, and the length if it grew.
    fn sync_data(&self) -> io::Result<()>;
    /// Makes the bytes and all metadata durable.
    fn sync_all(&self) -> io::Result<()>;
}

/// Returns whether an operation failed because the process or the system has no file descriptor left.
pub(super) fn is_out_of_descriptors(error: &io::Error) -> bool {
    /// `ENFILE` and `EMFILE`, which have these numbers on every Unix.
    const CODES: [i32; 2] = [23, 24];
    error.raw_os_error().is_some_and(|code| CODES.contains(&code))
}

/// The file system of the operating system.
///
/// New directories have mode 0700 and new files 0600, because records are private to the user of the process. Existing ones keep
/// their mode.
#[derive(Debug, Clone, Copy, Default)]
pub struct Files;

/// The mode of a created directory.
const DIR_MODE: u32 = 0o700;
/// The mode of a created file.
const FILE_MODE: u32 = 0o600;

impl Disk for Files {
    fn create_dir(&self, dir: &Path) -> io::Result<()> {
        match fs::DirBuilder::new().mode(DIR_MODE).create(dir) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && dir.is_dir() => Ok(()),
            created => created,
        }
    }

    fn open_dir(&self, dir: &Path) -> io::Result<Box<dyn DiskDir>> {
        Ok(Box::new(File::open(dir)?))
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<String>> {
        let names = fs::read_dir(dir)?.map(|entry| Ok(entry?.file_name().into_string().ok()));
        names.filter_map(Result::transpose).collect()
    }

    fn lock(&self, file: &Path) -> io::Result<Option<Box<dyn Send + Sync>>> {
        let file = File::options().create(true).truncate(false).write(true).mode(FILE_MODE).open(file)?;
        match file.try_lock() {
            Ok(()) => Ok(Some(Box::new(Locked(file)))),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }

    fn open(&self, file: &Path) -> io::Result<Box<dyn DiskFile>> {
        Ok(Box::new(File::options().read(true).write(true).open(file)?))
    }

    fn create(&self, file: &Path) -> io::Result<Box<dyn DiskFile>> {
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(true).mode(FILE_MODE);
        Ok(Box::new(options.open(file)?))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::hard_link(from, to)
    }

    fn remove(&self, file: &Path) -> io::Result<()> {
        fs::remove_file(file)
    }

    fn spawn(&self, work: Box<dyn FnOnce() + Send>) {
        // If no thread can be started, the work is dropped, and the log creates its next segment itself.
        let _ = thread::Builder::new().name("store-segment".into()).spawn(work);
    }
}

/// A file lock, released on drop. Closing the file is not enough, because a child process shares it between fork and exec.
struct Locked(File);

impl Drop for Locked {
    fn drop(&mut self) {
        // If this fails, closing the file releases the lock.
        let _ = self.0.unlock();
    }
}

impl DiskDir for File {
    fn sync(&self) -> io::Result<()> {
        self.sync_all()
    }
}

impl DiskFile for File {
    fn len(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
        loop {
            match std::os::unix::fs::FileExt::read_at(self, bytes, offset) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                read => return read,
            }
        }
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        std::os::unix::fs::FileExt::write_all_at(self, bytes, offset)
    }

    #[cfg(target_os = "linux")]
    fn allocate(&self, len: u64) -> io::Result<()> {
        use rustix::fs::{FallocateFlags, fallocate};
        use rustix::io::Errno;
        match fallocate(self, FallocateFlags::empty(), 0, len) {
            Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    #[cfg(not(target_os = "linux"))]
    fn allocate(&self, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        File::sync_data(self)
    }

    fn sync_all(&self) -> io::Result<()> {
        File::sync_all(self)
    }
}
