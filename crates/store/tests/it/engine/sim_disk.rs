//! A disk in memory that can lose power, fill up, fail and run out of file descriptors.
//!
//! After a power failure any subset of the unsynced changes is present: sectors of 512 bytes for writes, single entries for
//! directories. Background work runs inline, so a seed always gives the same run.
//!
//! A failed sync behaves as on Linux. The kernel marks the dirty pages clean although they are not on disk. Reads return the
//! written bytes until the power fails, and a later successful sync does not write them. Only writing the bytes again and syncing
//! makes them durable. Directory entries are journaled: after a failed sync of a directory a later one still covers them.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tidewire_store::engine::{Disk, DiskDir, DiskFile};

const SECTOR: usize = 512;
/// Error code of "too many open files".
const EMFILE: i32 = 24;

#[derive(Clone, Default)]
pub(crate) struct SimDisk(Arc<Mutex<DiskState>>);

#[derive(Default)]
struct DiskState {
    inodes: HashMap<u64, Inode>,
    dirs: HashMap<PathBuf, Dir>,
    locks: BTreeSet<PathBuf>,
    next_inode: u64,
    /// Whether the power is off. Then every operation fails.
    is_off: bool,
    /// Number of changes until the power fails.
    fuse: Option<u64>,
    /// Number of changes until one fails, and the error.
    failure: Option<(u64, ErrorKind)>,
    /// Whether a change has failed since the last restart.
    has_failed: bool,
    /// Whether no file descriptor is left.
    is_out_of_descriptors: bool,
    /// Selects the sectors that a failed sync still writes. `None` selects no sectors.
    partial_syncs: Option<fastrand::Rng>,
    capacity: Option<usize>,
    writes: u64,
}

#[derive(Default)]
struct Inode {
    /// The bytes that reads return: the page cache.
    bytes: Vec<u8>,
    /// The bytes on disk.
    durable: Vec<u8>,
    /// Dirty bytes, in the order in which they were written.
    unsynced: Vec<(usize, Vec<u8>)>,
}

impl Inode {
    /// Writes the dirty sectors that `is_kept` selects to the disk. The others are marked clean without being written.
    fn write_back(&mut self, mut is_kept: impl FnMut() -> bool) {
        for (offset, bytes) in std::mem::take(&mut self.unsynced) {
            let mut start = 0;
            while start < bytes.len() {
                let end = ((offset + start) / SECTOR * SECTOR + SECTOR - offset).min(bytes.len());
                if is_kept() {
                    put(&mut self.durable, offset + start, &bytes[start..end]);
                }
                start = end;
            }
        }
    }
}

#[derive(Default)]
struct Dir {
    /// Whether the entry of the directory in its parent is durable.
    is_durable: bool,
    entries: BTreeMap<String, u64>,
    durable: BTreeMap<String, u64>,
    unsynced: Vec<Entry>,
}

/// An atomic change of a directory.
#[derive(Clone)]
struct Entry {
    remove: Option<String>,
    set: Option<(String, u64)>,
}

impl Entry {
    fn apply(&self, entries: &mut BTreeMap<String, u64>) {
        if let Some(name) = &self.remove {
            entries.remove(name);
        }
        if let Some((name, inode)) = &self.set {
            entries.insert(name.clone(), *inode);
        }
    }
}

fn put(bytes: &mut Vec<u8>, offset: usize, new: &[u8]) {
    if bytes.len() < offset + new.len() {
        bytes.resize(offset + new.len(), 0);
    }
    bytes[offset..offset + new.len()].copy_from_slice(new);
}

#[allow(dead_code, reason = "fuzz targets include this file, and use only a part of it")]
impl SimDisk {
    fn state(&self) -> MutexGuard<'_, DiskState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the number of changes after which the power fails. `None` means never.
    pub(crate) fn set_fuse(&self, writes: Option<u64>) {
        self.state().fuse = writes;
    }

    /// Makes one change fail, after this number of successful changes.
    pub(crate) fn fail_after(&self, writes: u64, kind: ErrorKind) {
        self.state().failure = Some((writes, kind));
    }

    /// Makes opening and creating files fail, until the process restarts.
    pub(crate) fn take_all_descriptors(&self) {
        self.state().is_out_of_descriptors = true;
    }

    pub(crate) fn is_out_of_descriptors(&self) -> bool {
        self.state().is_out_of_descriptors
    }

    /// Lets a failed sync write some of the dirty sectors.
    pub(crate) fn set_partial_syncs(&self, rng: fastrand::Rng) {
        self.state().partial_syncs = Some(rng);
    }

    /// Discards the bytes of a file on disk from this offset on. They remain readable until the power fails.
    pub(crate) fn discard_from_disk(&self, file: &Path, offset: usize) {
        let mut state = self.state();
        let inode = state.find(file).unwrap();
        state.inodes.get_mut(&inode).unwrap().durable[offset..].fill(0);
    }

    pub(crate) fn set_capacity(&self, bytes: Option<usize>) {
        self.state().capacity = bytes;
    }

    /// Returns the number of changes so far.
    pub(crate) fn writes(&self) -> u64 {
        self.state().writes
    }

    pub(crate) fn is_off(&self) -> bool {
        self.state().is_off
    }

    /// Returns whether the power is off, or a change failed since the last restart.
    pub(crate) fn is_down(&self) -> bool {
        let state = self.state();
        state.is_off || state.has_failed
    }

    /// Makes every operation fail from now on.
    pub(crate) fn power_off(&self) {
        self.state().is_off = true;
    }

    /// Restores the power. A random part of the unsynced changes is lost.
    pub(crate) fn lose_power(&self, rng: &mut fastrand::Rng) {
        // Sometimes everything or nothing is lost.
        let kept = [0.0, 0.5, 0.9, 1.0][rng.usize(..4)];
        self.lose_power_with(|| rng.f64() < kept);
    }

    /// Restores the power. Every unsynced change is lost.
    pub(crate) fn lose_all_unsynced(&self) {
        self.lose_power_with(|| false);
    }

    fn lose_power_with(&self, mut is_kept: impl FnMut() -> bool) {
        let mut state = self.state();
        // The iteration order of hash maps is not deterministic.
        let mut inodes: Vec<_> = state.inodes.iter_mut().collect();
        inodes.sort_by_key(|(number, _)| **number);
        for (_, inode) in inodes {
            inode.write_back(&mut is_kept);
            inode.bytes.clone_from(&inode.durable);
        }
        let mut dirs: Vec<_> = state.dirs.iter_mut().collect();
        dirs.sort_by_key(|(path, _)| (*path).clone());
        for (_, dir) in dirs {
            dir.is_durable = dir.is_durable || is_kept();
            for entry in std::mem::take(&mut dir.unsynced) {
                if is_kept() {
                    entry.apply(&mut dir.durable);
                }
            }
            dir.entries.clone_from(&dir.durable);
        }
        let lost: Vec<_> = state.dirs.iter().filter(|(_, dir)| !dir.is_durable).map(|(path, _)| path.clone()).collect();
        state.dirs.retain(|path, _| !lost.iter().any(|lost| path.starts_with(lost)));
        state.restart();
    }

    /// Restarts the process. All written bytes are readable, synced or not.
    pub(crate) fn kill(&self) {
        self.state().restart();
    }

    pub(crate) fn files(&self, dir: &Path) -> BTreeMap<String, Vec<u8>> {
        let state = self.state();
        let Some(dir) = state.dirs.get(dir) else { return BTreeMap::new() };
        dir.entries.iter().map(|(name, inode)| (name.clone(), state.inodes[inode].bytes.clone())).collect()
    }

    /// Returns a disk that has these files, all of them durable.
    pub(crate) fn with_files(dir: &Path, files: &BTreeMap<String, Vec<u8>>) -> Self {
        let disk = Self::default();
        let mut state = disk.state();
        let mut entries = BTreeMap::new();
        for (name, bytes) in files {
            state.next_inode += 1;
            let number = state.next_inode;
            state.inodes.insert(number, Inode { bytes: bytes.clone(), durable: bytes.clone(), unsynced: Vec::new() });
            entries.insert(name.clone(), number);
        }
        state
            .dirs
            .insert(dir.into(), Dir { is_durable: true, durable: entries.clone(), entries, unsynced: Vec::new() });
        drop(state);
        disk
    }
}

impl DiskState {
    fn restart(&mut self) {
        self.is_off = false;
        self.fuse = None;
        self.failure = None;
        self.has_failed = false;
        self.is_out_of_descriptors = false;
        self.locks.clear();
        let used: BTreeSet<u64> =
            self.dirs.values().flat_map(|dir| dir.entries.values().chain(dir.durable.values())).copied().collect();
        self.inodes.retain(|number, _| used.contains(number));
    }

    fn check(&self) -> io::Result<()> {
        if self.is_off { Err(io::Error::other("the power is off")) } else { Ok(()) }
    }

    /// Fails if the power is off or no file descriptor is left.
    fn descriptor(&self) -> io::Result<()> {
        self.check()?;
        if self.is_out_of_descriptors { Err(io::Error::from_raw_os_error(EMFILE)) } else { Ok(()) }
    }

    /// Counts a change. Fails if the power is off or goes off, or if this change must fail.
    fn write(&mut self) -> io::Result<()> {
        self.check()?;
        self.writes += 1;
        if let Some((left, kind)) = &mut self.failure {
            if *left == 0 {
                let kind = *kind;
                self.failure = None;
                self.has_failed = true;
                return Err(kind.into());
            }
            *left -= 1;
        }
        match &mut self.fuse {
            Some(0) => {
                self.is_off = true;
                Err(io::Error::other("the power went off"))
            }
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn dir(&mut self, path: &Path) -> io::Result<(&mut Dir, String)> {
        let name = path.file_name().and_then(|name| name.to_str()).ok_or(ErrorKind::InvalidInput)?.to_owned();
        let dir = self.dirs.get_mut(path.parent().unwrap_or(Path::new(""))).ok_or(ErrorKind::NotFound)?;
        Ok((dir, name))
    }

    fn find(&mut self, path: &Path) -> io::Result<u64> {
        let (dir, name) = self.dir(path)?;
        dir.entries.get(&name).copied().ok_or_else(|| ErrorKind::NotFound.into())
    }

    fn set(&mut self, path: &Path, entry: impl FnOnce(String) -> Entry) -> io::Result<()> {
        let (dir, name) = self.dir(path)?;
        let entry = entry(name);
        entry.apply(&mut dir.entries);
        dir.unsynced.push(entry);
        Ok(())
    }

    fn used(&self) -> usize {
        let linked: BTreeSet<u64> = self.dirs.values().flat_map(|dir| dir.entries.values()).copied().collect();
        linked.iter().map(|number| self.inodes[number].bytes.len()).sum()
    }
}

struct Lock(SimDisk, PathBuf);

impl Drop for Lock {
    fn drop(&mut self) {
        self.0.state().locks.remove(&self.1);
    }
}

impl Disk for SimDisk {
    fn create_dir(&self, dir: &Path) -> io::Result<()> {
        let mut state = self.state();
        state.check()?;
        if state.dirs.contains_key(dir) {
            return Ok(());
        }
        let parent = parent_of(dir);
        if parent != Path::new(".") && !state.dirs.contains_key(parent) {
            return Err(ErrorKind::NotFound.into());
        }
        state.write()?;
        state.dirs.insert(dir.into(), Dir::default());
        Ok(())
    }

    fn open_dir(&self, dir: &Path) -> io::Result<Box<dyn DiskDir>> {
        let state = self.state();
        state.descriptor()?;
        if dir != Path::new(".") && !state.dirs.contains_key(dir) {
            return Err(ErrorKind::NotFound.into());
        }
        Ok(Box::new(SimDir { disk: self.clone(), path: dir.into() }))
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<String>> {
        let state = self.state();
        state.check()?;
        Ok(state.dirs.get(dir).ok_or(ErrorKind::NotFound)?.entries.keys().cloned().collect())
    }

    fn lock(&self, file: &Path) -> io::Result<Option<Box<dyn Send + Sync>>> {
        let mut state = self.state();
        state.check()?;
        let is_new = state.locks.insert(file.into());
        Ok(is_new.then(|| Box::new(Lock(self.clone(), file.into())) as _))
    }

    fn open(&self, file: &Path) -> io::Result<Box<dyn DiskFile>> {
        let mut state = self.state();
        state.descriptor()?;
        let inode = state.find(file)?;
        Ok(Box::new(SimFile { disk: self.clone(), inode }))
    }

    fn create(&self, file: &Path) -> io::Result<Box<dyn DiskFile>> {
        let mut state = self.state();
        state.descriptor()?;
        state.write()?;
        state.next_inode += 1;
        let inode = state.next_inode;
        state.inodes.insert(inode, Inode::default());
        state.set(file, |name| Entry { remove: None, set: Some((name, inode)) })?;
        Ok(Box::new(SimFile { disk: self.clone(), inode }))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut state = self.state();
        let changed = state.write();
        let inode = state.find(from)?;
        let (_, old) = state.dir(from)?;
        state.set(to, |name| Entry { remove: Some(old), set: Some((name, inode)) })?;
        changed
    }

    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut state = self.state();
        state.write()?;
        let inode = state.find(from)?;
        state.set(to, |name| Entry { remove: None, set: Some((name, inode)) })
    }

    fn remove(&self, file: &Path) -> io::Result<()> {
        let mut state = self.state();
        state.write()?;
        state.find(file)?;
        state.set(file, |name| Entry { remove: Some(name), set: None })
    }

    fn spawn(&self, work: Box<dyn FnOnce() + Send>) {
        work();
    }
}

/// Returns the parent of a directory. The root of the disk is `.`, and always exists.
fn parent_of(dir: &Path) -> &Path {
    dir.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

struct SimDir {
    disk: SimDisk,
    path: PathBuf,
}

impl DiskDir for SimDir {
    fn sync(&self) -> io::Result<()> {
        let mut state = self.disk.state();
        state.write()?;
        if let Some(dir) = state.dirs.get_mut(&self.path) {
            dir.durable.clone_from(&dir.entries);
            dir.unsynced.clear();
        }
        for (_, child) in state.dirs.iter_mut().filter(|(path, _)| parent_of(path) == self.path) {
            child.is_durable = true;
        }
        Ok(())
    }
}

struct SimFile {
    disk: SimDisk,
    inode: u64,
}

impl SimFile {
    fn with<T>(&self, state: &mut DiskState, work: impl FnOnce(&mut Inode) -> T) -> io::Result<T> {
        state.inodes.get_mut(&self.inode).map(work).ok_or_else(|| ErrorKind::NotFound.into())
    }
}

impl DiskFile for SimFile {
    fn len(&self) -> io::Result<u64> {
        let mut state = self.disk.state();
        state.check()?;
        self.with(&mut state, |inode| inode.bytes.len() as u64)
    }

    fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
        let mut state = self.disk.state();
        state.check()?;
        self.with(&mut state, |inode| {
            let rest = inode.bytes.get(usize::try_from(offset).unwrap()..).unwrap_or_default();
            let len = rest.len().min(bytes.len());
            bytes[..len].copy_from_slice(&rest[..len]);
            len
        })
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let mut state = self.disk.state();
        let offset = usize::try_from(offset).unwrap();
        state.check()?;
        let changed = state.write();
        if let Some(capacity) = state.capacity {
            let len = self.with(&mut state, |inode| inode.bytes.len())?;
            if state.used() + (offset + bytes.len()).saturating_sub(len) > capacity {
                return Err(ErrorKind::StorageFull.into());
            }
        }
        // Even a failed write may have written some bytes.
        self.with(&mut state, |inode| {
            put(&mut inode.bytes, offset, bytes);
            inode.unsynced.push((offset, bytes.to_vec()));
        })?;
        changed
    }

    fn allocate(&self, _: u64) -> io::Result<()> {
        self.disk.state().check()
    }

    fn sync_data(&self) -> io::Result<()> {
        let mut state = self.disk.state();
        state.check()?;
        let synced = state.write();
        if state.is_off {
            return synced;
        }
        let mut partial = state.partial_syncs.take();
        let is_kept = || synced.is_ok() || partial.as_mut().is_some_and(fastrand::Rng::bool);
        self.with(&mut state, |inode| inode.write_back(is_kept))?;
        state.partial_syncs = partial;
        synced
    }

    fn sync_all(&self) -> io::Result<()> {
        self.sync_data()
    }
}
