//! Disks that fail and fill up.

use std::error::Error;
use std::io::{self, ErrorKind};
use std::path::Path;

use tidewire_store::engine::{Embedded, Engine, EngineError};

use crate::engine::model::{Rows, VERSION_1_COMMITS, in_snapshot, open_on, put, small_options, version_1_log};
use crate::engine::sim_disk::SimDisk;

fn kind(error: &(dyn Error + 'static)) -> ErrorKind {
    error.source().and_then(|source| source.downcast_ref::<io::Error>()).expect("the source is kept").kind()
}

#[test]
fn failed_write_or_sync_rejects_writes_until_reopened() {
    // A commit makes two changes: a write and a sync.
    for failing in 0..2 {
        let disk = SimDisk::default();
        let (mut engine, ..) = open_on(&disk, "db", small_options()).unwrap();
        put(&mut engine, "1", b"one").unwrap();
        disk.fail_after(failing, ErrorKind::Other);
        let error = put(&mut engine, "2", b"two").unwrap_err();
        assert!(matches!(error, EngineError::OutcomeUnknown { .. }), "{error:?}");
        assert!(error.to_string().contains("unknown") && kind(&error) == ErrorKind::Other);
        for _ in 0..2 {
            assert!(matches!(put(&mut engine, "3", b"three"), Err(EngineError::Stopped)));
        }
        assert!(matches!(engine.sync(), Err(EngineError::Stopped)));
        assert!(matches!(engine.checkpoint(), Err(EngineError::Stopped)));
        assert!(matches!(engine.backup(Path::new("copy")), Err(EngineError::Stopped)));
        assert_eq!(engine.stats().refused, 2);
        drop(engine);

        let (mut engine, recovery, rows) = open_on(&disk, "db", small_options()).unwrap();
        assert!(rows.contains_key(&("b".into(), b"1".to_vec())) && rows.len() <= 2);
        assert!(!recovery.was_closed && !recovery.is_new_epoch);
        put(&mut engine, "3", b"three").unwrap();
    }
}

#[test]
fn commits_read_back_after_a_failed_sync_survive_a_power_failure() {
    let disk = SimDisk::default();
    let (mut engine, ..) = open_on(&disk, "db", small_options()).unwrap();
    put(&mut engine, "1", b"one").unwrap();
    // The write succeeds and the sync fails: the commit is readable but not on disk. It is longer than a page, so later commits do
    // not write all of it again.
    disk.fail_after(1, ErrorKind::Other);
    put(&mut engine, "2", &[2; 6000]).unwrap_err();
    drop(engine);
    disk.kill();

    let (mut engine, recovery, _) = open_on(&disk, "db", small_options()).unwrap();
    assert_eq!(recovery.position.sequence, 2, "the page cache still has the commit");
    put(&mut engine, "3", b"three").unwrap();
    disk.power_off();
    drop(engine);
    disk.lose_all_unsynced();

    let (_, recovery, rows) = open_on(&disk, "db", small_options()).unwrap();
    assert_eq!((recovery.position.sequence, rows.len()), (3, 3));
}

#[test]
fn open_fails_if_the_log_cannot_be_made_durable() {
    let disk = SimDisk::default();
    let (mut engine, ..) = open_on(&disk, "db", small_options()).unwrap();
    disk.fail_after(1, ErrorKind::Other);
    put(&mut engine, "1", b"one").unwrap_err();
    drop(engine);
    disk.kill();

    let before = disk.writes();
    drop(open_on(&disk, "db", small_options()).unwrap());
    let changes = disk.writes() - before;
    let mut refused = 0;
    for failing in 0..changes {
        disk.fail_after(failing, ErrorKind::Other);
        if let Err(error) = open_on(&disk, "db", small_options()) {
            refused += u64::from(error.to_string().contains("durable"));
            assert_eq!(kind(&error), ErrorKind::Other);
        }
        disk.kill();
    }
    assert_eq!(refused, 2, "a failed write and a failed sync");
    disk.lose_all_unsynced();
    assert_eq!(open_on(&disk, "db", small_options()).unwrap().1.position.sequence, 1);
}

#[test]
fn version_1_log_end_in_the_page_cache_survives_a_power_failure() {
    let disk = SimDisk::with_files(Path::new("db"), &version_1_log());
    let files = disk.files(Path::new("db"));
    let (name, bytes) =
        files.iter().rfind(|(name, bytes)| name.starts_with("log-") && bytes.starts_with(b"TIDELOG")).unwrap();
    let end = bytes.iter().rposition(|byte| *byte != 0).unwrap();
    disk.discard_from_disk(&Path::new("db").join(name), end - 40);
    let (engine, recovery, _) = open_on(&disk, "db", small_options()).unwrap();
    assert_eq!(recovery.position.sequence, VERSION_1_COMMITS);
    disk.power_off();
    drop(engine);
    disk.lose_all_unsynced();
    assert_eq!(open_on(&disk, "db", small_options()).unwrap().1.position.sequence, VERSION_1_COMMITS);
}

#[test]
fn no_acknowledged_commit_is_lost_if_any_disk_operation_fails() {
    let run = |disk: &SimDisk| -> Result<(), (u64, Box<dyn Error>)> {
        let (mut engine, ..) = open_on(disk, "db", small_options()).map_err(|error| (0, error.into()))?;
        let mut rows = Rows::new();
        for n in 1..=60_u64 {
            put(&mut engine, &n.to_string(), &[1; 900]).map_err(|error| (n - 1, error.into()))?;
            rows.insert(("b".into(), n.to_string().into_bytes()), vec![1; 900]);
            if engine.needs_checkpoint() {
                let checkpoint = engine.checkpoint().map_err(|error| (n, error.into()))?;
                // The engine works without the checkpoint.
                let _ = checkpoint.run(in_snapshot(&rows));
            }
        }
        Box::new(engine).close().map_err(|error| (60, error.into()))
    };
    let disk = SimDisk::default();
    run(&disk).unwrap();
    let writes = disk.writes();
    let mut unknown = 0;
    for failing in 0..writes {
        for kind in [ErrorKind::StorageFull, ErrorKind::Other] {
            let disk = SimDisk::default();
            disk.fail_after(failing, kind);
            let acknowledged = match run(&disk) {
                Ok(()) => 60,
                Err((acknowledged, error)) => {
                    unknown += u64::from(error.to_string().contains("unknown"));
                    acknowledged
                }
            };
            disk.kill();
            let (mut engine, ..) = open_on(&disk, "db", small_options()).unwrap();
            let sequence = engine.position().sequence;
            assert!((acknowledged..=acknowledged + 1).contains(&sequence), "{failing}: {sequence} of {acknowledged}");
            // The commits that were read back are durable, and so are later ones.
            put(&mut engine, "more", b"").unwrap();
            disk.power_off();
            drop(engine);
            disk.lose_all_unsynced();
            let (engine, ..) = open_on(&disk, "db", small_options()).unwrap();
            assert_eq!(engine.position().sequence, sequence + 1, "{failing}");
        }
    }
    assert!(unknown > 120, "{unknown} of {writes}");
}

#[test]
fn full_disk_rejects_commits_and_recovers_with_space() {
    let disk = SimDisk::default();
    disk.set_capacity(Some(40 * 1024));
    let (mut engine, ..) = open_on(&disk, "db", small_options()).unwrap();
    let mut count = 0;
    let error = loop {
        match put(&mut engine, &count.to_string(), &[1; 900]) {
            Ok(_) => count += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(error, EngineError::NoSegment { .. }), "{error:?}");
    assert_eq!(kind(&error), ErrorKind::StorageFull);
    assert!(count > 20, "two segments fit, and {count} rows");
    assert_eq!(engine.position().sequence, count);
    let failed = engine.checkpoint().unwrap().run(in_snapshot(&Rows::from([(("b".into(), vec![]), vec![1; 9000])])));
    assert_eq!(kind(&failed.unwrap_err()), ErrorKind::StorageFull);
    assert_eq!(engine.stats().checkpoints_failed, 1);
    assert!(!disk.files(Path::new("db")).contains_key("snapshot.tmp"), "the incomplete snapshot was removed");

    // Nothing was written, so a reopened engine has exactly the acknowledged commits.
    drop(engine);
    let (mut engine, recovery, rows) = open_on(&disk, "db", small_options()).unwrap();
    assert_eq!((recovery.position.sequence, rows.len() as u64), (count, count));
    while put(&mut engine, "small", b"").is_ok() {
        count += 1;
    }
    disk.set_capacity(None);
    assert_eq!(put(&mut engine, "more", &[1; 900]).unwrap().sequence, count + 1);
    drop(engine);
    assert_eq!(open_on(&disk, "db", small_options()).unwrap().1.position.sequence, count + 1);
}

#[test]
fn failed_checkpoint_loses_no_commit() {
    let disk = SimDisk::default();
    let (mut engine, ..) = open_on(&disk, "db", small_options()).unwrap();
    put(&mut engine, "1", b"one").unwrap();
    let rows = Rows::from([(("b".into(), b"1".to_vec()), b"one".to_vec())]);
    // A checkpoint creates a file, writes a header, a block and the end, syncs, renames, and syncs the directory.
    for failing in 0..7 {
        disk.fail_after(failing, ErrorKind::Other);
        assert!(engine.checkpoint().unwrap().run(in_snapshot(&rows)).is_err(), "{failing}");
    }
    put(&mut engine, "2", b"two").unwrap();
    drop(engine);
    assert_eq!(open_on(&disk, "db", small_options()).unwrap().2.len(), 2);
}

#[test]
fn log_without_descriptors_is_extended_and_rotates_later() {
    let disk = SimDisk::default();
    let (mut engine, ..) = open_on(&disk, "db", small_options()).unwrap();
    disk.take_all_descriptors();
    for n in 0..80 {
        put(&mut engine, &n.to_string(), &[1; 900]).unwrap();
    }
    let segments = |disk: &SimDisk| -> Vec<usize> {
        let files = disk.files(Path::new("db"));
        files.into_iter().filter(|(name, _)| name.starts_with("log-")).map(|(_, bytes)| bytes.len()).collect()
    };
    assert_eq!(segments(&disk)[0], 16 * 1024);
    assert!(segments(&disk)[1] >= 64 * 1024, "{:?}", segments(&disk));
    disk.power_off();
    drop(engine);
    disk.lose_all_unsynced();

    let (mut engine, recovery, rows) = open_on(&disk, "db", small_options()).unwrap();
    assert_eq!((recovery.position.sequence, rows.len()), (80, 80));
    let before = segments(&disk).len();
    for n in 80..160 {
        put(&mut engine, &n.to_string(), &[1; 900]).unwrap();
    }
    assert!(segments(&disk).len() >= before + 3, "{:?}", segments(&disk));
}

#[test]
fn created_parent_directories_survive_a_power_failure() {
    let disk = SimDisk::default();
    let (mut engine, ..) = open_on(&disk, "a/b/c", small_options()).unwrap();
    put(&mut engine, "1", b"one").unwrap();
    disk.power_off();
    drop(engine);
    disk.lose_all_unsynced();
    assert_eq!(open_on(&disk, "a/b/c", small_options()).unwrap().1.position.sequence, 1);

    // A process that is killed between creating a directory and syncing its entry leaves an empty directory.
    for failing in 0..6 {
        let disk = SimDisk::default();
        disk.fail_after(failing, ErrorKind::Other);
        open_on(&disk, "a/b/c", small_options()).unwrap_err();
        disk.kill();
        let (mut engine, ..) = open_on(&disk, "a/b/c", small_options()).unwrap();
        put(&mut engine, "1", b"one").unwrap();
        disk.power_off();
        drop(engine);
        disk.lose_all_unsynced();
        assert_eq!(open_on(&disk, "a/b/c", small_options()).unwrap().1.position.sequence, 1, "{failing}");
    }
}

#[test]
fn missing_parents_of_a_directory_are_created() {
    let dir = tempfile::tempdir().unwrap();
    drop(Embedded::open(dir.path().join("a/b/c"), small_options(), |_| {}).unwrap());
    assert!(dir.path().join("a/b/c/lock").exists());
}

#[test]
fn directory_that_cannot_be_created_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    let error = Embedded::open(file.join("db"), small_options(), |_| {}).unwrap_err();
    assert!(error.to_string().contains("file/db"), "{error}");
}
