//! The interface between an engine and the operating system: files, directories, and a background thread.
//!
//! The embedded engine accesses the disk only through it, so tests can substitute a disk that loses power, fills up or fails.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::Path;
use std::thread;

/// Files in directories.
///
/// What an engine relies on after a loss of power: a synced file has its bytes; a directory entry is there once the directory
/// is synced; a rename happens as a whole or not at all; of a write that was not synced, any sectors of 512 bytes may be
/// there, each as a whole.
pub trait Disk: Send + Sync + 'static {
    /// Makes a directory and its parents, if they are not there, and syncs its entry in its parent.
    fn create_dir(&self, dir: &Path) -> io::Result<()>;
    /// The names of the files in a directory. One that is no text is left out: it is none of ours.
    fn list(&self, dir: &Path) -> io::Result<Vec<String>>;
    /// Takes a lock that ends when it is dropped or its process dies; none if another has it, in this process or elsewhere.
    fn lock(&self, file: &Path) -> io::Result<Option<Box<dyn Send + Sync>>>;
    /// Opens a file for reading and writing.
    fn open(&self, file: &Path) -> io::Result<Box<dyn DiskFile>>;
    /// Makes an empty file, in place of what has that name.
    fn create(&self, file: &Path) -> io::Result<Box<dyn DiskFile>>;
    /// Gives a file another name, in place of what has that name.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Gives a file a second name, which nothing has yet.
    fn link(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a file.
    fn remove(&self, file: &Path) -> io::Result<()>;
    /// Makes the entries of a directory durable.
    fn sync_dir(&self, dir: &Path) -> io::Result<()>;
    /// Does some work that the caller does not wait for.
    fn spawn(&self, work: Box<dyn FnOnce() + Send>);
}

/// An open file.
pub trait DiskFile: Send + Sync {
    /// Its length in bytes.
    fn len(&self) -> io::Result<u64>;
    /// Whether it has no bytes.
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }
    /// Reads some bytes; zero at the end of the file only.
    fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<usize>;
    /// Writes all of the bytes.
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;
    /// Takes room on the disk for so many bytes, if the file system can; else it is taken when they are written.
    fn allocate(&self, len: u64) -> io::Result<()>;
    /// Makes its bytes durable, and its length if it grew.
    fn sync_data(&self) -> io::Result<()>;
    /// Makes its bytes and all else about it durable.
    fn sync_all(&self) -> io::Result<()>;
}

/// The files of this machine.
#[derive(Debug, Clone, Copy, Default)]
pub struct Files;

impl Disk for Files {
    fn create_dir(&self, dir: &Path) -> io::Result<()> {
        if dir.is_dir() {
            return Ok(());
        }
        fs::create_dir_all(dir)?;
        match dir.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => self.sync_dir(parent),
            _ => self.sync_dir(Path::new(".")),
        }
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<String>> {
        let names = fs::read_dir(dir)?.map(|entry| Ok(entry?.file_name().into_string().ok()));
        names.filter_map(Result::transpose).collect()
    }

    fn lock(&self, file: &Path) -> io::Result<Option<Box<dyn Send + Sync>>> {
        let file = File::options().create(true).truncate(false).write(true).open(file)?;
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
        Ok(Box::new(File::options().read(true).write(true).create(true).truncate(true).open(file)?))
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

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        File::open(dir)?.sync_all()
    }

    fn spawn(&self, work: Box<dyn FnOnce() + Send>) {
        // Without a thread the work is dropped, and whoever needs its result does it itself.
        let _ = thread::Builder::new().name("store-segment".into()).spawn(work);
    }
}

/// A lock that ends when this is dropped. Closing the file would not do: a process that is just being started has it open, too,
/// until it runs its own program.
struct Locked(File);

impl Drop for Locked {
    fn drop(&mut self) {
        // If it fails, closing the file is what is left.
        let _ = self.0.unlock();
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
