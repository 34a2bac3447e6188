//! Backups and restored copies, on the real disk and on one that loses power.

use std::path::Path;
use std::sync::Arc;

use tidewire_store::Position;
use tidewire_store::engine::{
    BackupError, CopyError, Corruption, Durability, Embedded, EmbeddedOptions, Engine, Files, OpenError,
};

use crate::engine::model::{Rows, in_snapshot, open_on, put, small_options, version_1_log};
use crate::engine::sim_disk::SimDisk;

fn rows(count: usize) -> Rows {
    (0..count).map(|n| (("b".into(), n.to_string().into_bytes()), vec![1; 500])).collect()
}

/// Puts rows until the engine has this many commits.
fn fill(engine: &mut dyn Engine, until: u64) {
    for n in engine.position().sequence..until {
        put(engine, &n.to_string(), &[1; 500]).unwrap();
    }
}

/// Opens a directory and returns its position and rows.
fn read(dir: &Path) -> (Position, Rows) {
    let (engine, recovery, rows) = open_on(&Files, dir.to_str().unwrap(), small_options()).unwrap();
    drop(engine);
    (recovery.position, rows)
}

#[test]
fn backup_of_an_open_engine_is_restored_with_a_new_epoch() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let (mut engine, _) = Embedded::open(path("db"), small_options(), |_| {}).unwrap();
    fill(&mut engine, 100);
    engine.checkpoint().unwrap().run(in_snapshot(&rows(100))).unwrap();
    fill(&mut engine, 150);
    let backup = engine.backup(&path("backup")).unwrap();
    fill(&mut engine, 300);
    assert_eq!(backup.run().unwrap().sequence, 150);
    let again = engine.backup(&path("backup")).unwrap().run().unwrap_err();
    assert!(matches!(again, BackupError::NotEmpty { .. }), "{again}");

    let recovery = Embedded::restore(&path("backup"), &path("copy"), small_options()).unwrap();
    assert_eq!((recovery.rows, recovery.commits, recovery.is_new_epoch), (100, 50, true));
    let (position, found) = read(&path("copy"));
    assert_eq!(position, recovery.position);
    assert_eq!((position.sequence, found), (150, rows(150)));
    assert_ne!(position.epoch, engine.position().epoch);
    assert_eq!(engine.position().sequence, 300);
    // Each copy has a new epoch, and the backup is unchanged.
    let other = Embedded::restore(&path("backup"), &path("other"), small_options()).unwrap();
    assert_ne!(other.position.epoch, position.epoch);
}

#[test]
fn closed_directory_is_backed_up() {
    for (durability, is_closed) in [(Durability::Always, true), (Durability::Always, false), (Durability::None, false)]
    {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let options = small_options().durability(durability);
        let (mut engine, _) = Embedded::open(path("db"), options, |_| {}).unwrap();
        fill(&mut engine, 100);
        engine.checkpoint().unwrap().run(in_snapshot(&rows(100))).unwrap();
        fill(&mut engine, 150);
        let position = engine.position();
        let locked = Embedded::backup_dir(&path("db"), &path("backup")).unwrap_err();
        assert!(matches!(locked, CopyError::Open(OpenError::Locked { .. })), "{locked}");
        assert!(!path("backup").exists());
        let source = if is_closed {
            drop(engine);
            path("db")
        } else {
            // The state after a kill.
            std::fs::create_dir(path("killed")).unwrap();
            for entry in std::fs::read_dir(path("db")).unwrap() {
                let entry = entry.unwrap();
                std::fs::copy(entry.path(), path("killed").join(entry.file_name())).unwrap();
            }
            path("killed")
        };
        let files = || {
            let entries = std::fs::read_dir(&source).unwrap().map(|entry| entry.unwrap());
            let mut files: Vec<_> =
                entries.map(|entry| (entry.file_name(), std::fs::read(entry.path()).unwrap())).collect();
            files.sort();
            files
        };
        let before = files();
        assert_eq!(Embedded::backup_dir(&source, &path("backup")).unwrap(), position);
        assert!(files() == before, "the original is unchanged");
        let recovery = Embedded::restore(&path("backup"), &path("restored"), options).unwrap();
        assert!(recovery.is_new_epoch && recovery.position.epoch != position.epoch);
        assert_eq!(read(&path("restored")).1, rows(150));
        // A backup can be backed up, and restored without one.
        assert_eq!(Embedded::backup_dir(&path("backup"), &path("second")).unwrap(), position);
        Embedded::restore(&source, &path("direct"), options).unwrap();
        assert_eq!((read(&path("second")).1, read(&path("direct")).1), (rows(150), rows(150)));
    }
}

#[test]
fn invalid_corrupt_or_incomplete_source_is_not_copied() {
    type Copying = fn(&Path, &Path) -> Result<(), CopyError>;
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let copies: [Copying; 2] = [
        |from, to| Embedded::backup_dir(from, to).map(drop),
        |from, to| Embedded::restore(from, to, EmbeddedOptions::default()).map(drop),
    ];
    let (mut engine, _) = Embedded::open(path("db"), small_options(), |_| {}).unwrap();
    fill(&mut engine, 40);
    drop(engine);
    std::fs::create_dir(path("empty")).unwrap();
    std::fs::create_dir(path("taken")).unwrap();
    std::fs::write(path("taken").join("notes"), "").unwrap();
    for copy in copies {
        let missing = copy(&path("missing"), &path("target")).unwrap_err();
        assert!(matches!(missing, CopyError::Open(OpenError::Io { .. })), "{missing}");
        let empty = copy(&path("empty"), &path("target")).unwrap_err();
        assert!(matches!(empty, CopyError::NoData { .. }), "{empty}");
        assert_eq!(std::fs::read_dir(path("empty")).unwrap().count(), 0, "no lock file was created");
        let taken = copy(&path("db"), &path("taken")).unwrap_err();
        assert!(matches!(taken, CopyError::Write(BackupError::NotEmpty { .. })), "{taken}");
        assert_eq!(std::fs::read_dir(path("taken")).unwrap().count(), 1);
        assert!(!path("target").exists());
    }
    // A corrupt source is detected before a copy is created.
    let log = path("db").join("log-0000000000000001");
    let whole = std::fs::read(&log).unwrap();
    let mut damaged = whole.clone();
    damaged[5000] ^= 1;
    std::fs::write(&log, damaged).unwrap();
    for copy in copies {
        let error = copy(&path("db"), &path("target")).unwrap_err();
        assert!(matches!(error, CopyError::Open(OpenError::Corrupt { what: Corruption::Frame, .. })), "{error}");
        assert!(!path("target").exists());
    }
    std::fs::write(&log, whole).unwrap();
    std::fs::write(path("db").join("backup.unfinished"), "").unwrap();
    for copy in copies {
        let error = copy(&path("db"), &path("target")).unwrap_err();
        assert!(matches!(error, CopyError::Open(OpenError::UnfinishedBackup { .. })), "{error}");
    }
    let error = Embedded::open(path("db"), small_options(), |_| {}).unwrap_err();
    assert!(matches!(error, OpenError::UnfinishedBackup { .. }), "{error}");
}

/// The power fails after each disk operation of a restore, for logs of both versions.
#[test]
fn interrupted_restore_cannot_be_opened() {
    let source = SimDisk::default();
    let (mut engine, ..) = open_on(&source, "db", small_options()).unwrap();
    fill(&mut engine, 40);
    engine.checkpoint().unwrap().run(in_snapshot(&rows(40))).unwrap();
    fill(&mut engine, 60);
    drop(engine);
    let mut rng = fastrand::Rng::with_seed(7);
    for files in [source.files(Path::new("db")), version_1_log()] {
        let whole = SimDisk::with_files(Path::new("db"), &files);
        let (engine, recovery, expected) = open_on(&whole, "db", small_options()).unwrap();
        let original = recovery.position;
        drop(engine);
        let (mut unfinished, mut done) = (0, 0);
        for fuse in 0.. {
            let disk = SimDisk::with_files(Path::new("db"), &files);
            disk.set_fuse(Some(fuse));
            let restored =
                Embedded::restore_on(Arc::new(disk.clone()), Path::new("db"), Path::new("copy"), small_options());
            let is_off = disk.is_off();
            disk.power_off();
            disk.lose_power(&mut rng);
            disk.set_fuse(None);
            match open_on(&disk, "copy", small_options()) {
                Err(OpenError::UnfinishedBackup { .. }) => unfinished += 1,
                Err(error) => panic!("{fuse}: {error}"),
                // The copy had not been started.
                Ok((_, recovery, found)) if found.is_empty() => assert_eq!(recovery.position.sequence, 0),
                Ok((_, recovery, found)) => {
                    assert_eq!(found, expected);
                    assert_eq!(recovery.position.sequence, original.sequence);
                    assert_ne!(recovery.position.epoch, original.epoch, "{fuse}");
                    done += 1;
                }
            }
            if let Ok(restored) = restored {
                assert!(done > 0 && restored.is_new_epoch);
            }
            if !is_off {
                break;
            }
        }
        assert!(unfinished > 10 && done > 0, "{unfinished} unfinished, {done} done");
        // The backup is unchanged.
        let disk = SimDisk::with_files(Path::new("db"), &files);
        Embedded::restore_on(Arc::new(disk.clone()), Path::new("db"), Path::new("copy"), small_options()).unwrap();
        assert!(disk.files(Path::new("db")) == files);
        assert_eq!(open_on(&disk, "db", small_options()).unwrap().2, expected);
    }
}
