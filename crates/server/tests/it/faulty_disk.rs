//! A disk with faults that tests can switch on.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use tidewire_store::engine::{Disk, DiskDir, DiskFile, Files};

/// Forwards to the real file system until a fault is switched on.
#[derive(Clone, Default)]
pub(crate) struct FaultyDisk {
    fault: Arc<Fault>,
}

#[derive(Default)]
struct Fault {
    /// Every sync of a file fails.
    syncs_fail: AtomicBool,
    /// No file can be created.
    is_full: AtomicBool,
    /// Creating a file panics.
    panics: AtomicBool,
    /// Files below this directory are not created until it is cleared.
    held: Mutex<Option<PathBuf>>,
    released: Condvar,
}

impl Fault {
    fn held(&self) -> MutexGuard<'_, Option<PathBuf>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl FaultyDisk {
    /// Makes every sync fail from now on.
    pub(crate) fn fail_syncs(&self) {
        self.fault.syncs_fail.store(true, SeqCst);
    }

    /// Sets whether files can be created.
    pub(crate) fn set_full(&self, is_full: bool) {
        self.fault.is_full.store(is_full, SeqCst);
    }

    /// Makes the next creation of a file panic.
    pub(crate) fn panic_once(&self) {
        self.fault.panics.store(true, SeqCst);
    }

    /// Blocks every creation of a file below this directory.
    pub(crate) fn hold(&self, dir: &Path) {
        *self.fault.held() = Some(dir.to_owned());
    }

    /// Lets blocked creations go on.
    pub(crate) fn release(&self) {
        *self.fault.held() = None;
        self.fault.released.notify_all();
    }

    fn wrap(&self, file: Box<dyn DiskFile>) -> Box<dyn DiskFile> {
        Box::new(FaultyFile { file, fault: Arc::clone(&self.fault) })
    }
}

impl Disk for FaultyDisk {
    fn create_dir(&self, dir: &Path) -> io::Result<()> {
        Files.create_dir(dir)
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<String>> {
        Files.list(dir)
    }

    fn lock(&self, file: &Path) -> io::Result<Option<Box<dyn Send + Sync>>> {
        Files.lock(file)
    }

    fn open(&self, file: &Path) -> io::Result<Box<dyn DiskFile>> {
        Files.open(file).map(|file| self.wrap(file))
    }

    fn create(&self, file: &Path) -> io::Result<Box<dyn DiskFile>> {
        let is_held = |dir: &mut Option<PathBuf>| dir.as_ref().is_some_and(|dir| file.starts_with(dir));
        drop(self.fault.released.wait_while(self.fault.held(), is_held));
        assert!(!self.fault.panics.swap(false, SeqCst), "the disk panics because a test asks for it");
        if self.fault.is_full.load(SeqCst) {
            return Err(ErrorKind::StorageFull.into());
        }
        Files.create(file).map(|file| self.wrap(file))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        Files.rename(from, to)
    }

    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        Files.link(from, to)
    }

    fn remove(&self, file: &Path) -> io::Result<()> {
        Files.remove(file)
    }

    fn open_dir(&self, dir: &Path) -> io::Result<Box<dyn DiskDir>> {
        Files.open_dir(dir)
    }

    fn spawn(&self, work: Box<dyn FnOnce() + Send>) {
        Files.spawn(work);
    }
}

struct FaultyFile {
    file: Box<dyn DiskFile>,
    fault: Arc<Fault>,
}

impl FaultyFile {
    fn check_sync(&self) -> io::Result<()> {
        if self.fault.syncs_fail.load(SeqCst) { Err(io::Error::other("the disk has gone")) } else { Ok(()) }
    }
}

impl DiskFile for FaultyFile {
    fn len(&self) -> io::Result<u64> {
        self.file.len()
    }

    fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
        self.file.read_at(bytes, offset)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.file.write_at(bytes, offset)
    }

    fn allocate(&self, len: u64) -> io::Result<()> {
        self.file.allocate(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.check_sync()?;
        self.file.sync_data()
    }

    fn sync_all(&self) -> io::Result<()> {
        self.check_sync()?;
        self.file.sync_all()
    }
}
