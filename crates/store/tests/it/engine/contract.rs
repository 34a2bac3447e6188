//! The contract of all engines, and of the embedded engine.

use std::path::Path;
use std::time::Duration;

use tidewire_store::Position;
use tidewire_store::engine::{
    Durability, Embedded, EmbeddedOptions, Engine, EngineError, LogPressure, Memory, OpenError, Write, WriteSet,
};

use crate::engine::model::{Rows, in_snapshot, open_on, put, small_options, stamped};
use crate::engine::sim_disk::SimDisk;

fn on_every_engine(test: fn(&mut dyn Engine)) {
    test(&mut Memory::default());
    for durability in [Durability::Always, Durability::Interval(Duration::ZERO), Durability::None] {
        let options = small_options().durability(durability);
        test(&mut open_on(&SimDisk::default(), "db", options).unwrap().0);
        let dir = tempfile::tempdir().unwrap();
        test(&mut Embedded::open(dir.path(), options, |_| {}).unwrap().0);
    }
}

#[test]
fn commits_have_consecutive_sequences() {
    on_every_engine(|engine| {
        let start = engine.position();
        assert_eq!(start.sequence, 0);
        let writes = [Write { bucket: "b", key: b"k", row: Some(b"r") }, Write { bucket: "", key: b"", row: None }];
        let commits = [stamped(1, &writes), stamped(2, &[]), stamped(3, &writes[1..])];
        for (group, sequence) in [(&commits[..], 3), (&commits[..1], 4), (&[], 4), (&commits[1..2], 5)] {
            let position = Position { epoch: start.epoch, sequence };
            assert_eq!(engine.commit(group).unwrap(), position);
            assert_eq!(engine.position(), position);
        }
        let stats = engine.stats();
        assert_eq!((stats.groups, stats.commits), (3, 5));
    });
}

#[test]
fn sync_and_checkpoint_are_valid_at_any_time() {
    on_every_engine(|engine| {
        let rows = Rows::from([(("b".into(), b"k".to_vec()), b"row".to_vec())]);
        for n in 1..=3 {
            engine.sync().unwrap();
            let checkpoint = engine.checkpoint().unwrap();
            let position = engine.position();
            put(engine, "k", b"row").unwrap();
            assert_eq!(checkpoint.run(in_snapshot(&rows)).unwrap(), position);
            assert_eq!(engine.position().sequence, n);
            assert_eq!(engine.log_pressure(), LogPressure::Normal);
        }
    });
}

#[test]
fn new_engines_have_different_epochs() {
    let memory: Vec<_> = (0..2).map(|_| Memory::default().position().epoch).collect();
    assert_ne!(memory[0], memory[1]);
    let embedded: Vec<_> =
        (0..2).map(|_| open_on(&SimDisk::default(), "db", small_options()).unwrap().0.position().epoch).collect();
    assert_ne!(embedded[0], embedded[1]);
}

#[test]
fn memory_engine_cannot_be_backed_up() {
    assert!(matches!(Memory::default().backup(Path::new("copy")), Err(EngineError::NotPersistent)));
    Box::new(Memory::default()).close().unwrap();
}

#[test]
fn open_directory_is_locked() {
    let dir = tempfile::tempdir().unwrap();
    let (mut engine, _) = Embedded::open(dir.path(), small_options(), |_| {}).unwrap();
    let refused = || Embedded::open(dir.path(), small_options(), |_| {}).unwrap_err();
    assert!(matches!(refused(), OpenError::Locked { dir: locked } if locked == dir.path()));
    // A checkpoint that still runs keeps the directory locked after the engine is dropped.
    let checkpoint = engine.checkpoint().unwrap();
    drop(engine);
    assert!(matches!(refused(), OpenError::Locked { .. }));
    drop(checkpoint);
    Embedded::open(dir.path(), small_options(), |_| {}).unwrap();
}

#[test]
fn commits_are_synced_according_to_durability() {
    let syncs = |durability| {
        let options = EmbeddedOptions::default().durability(durability).segment_bytes(1 << 20);
        let (mut engine, ..) = open_on(&SimDisk::default(), "db", options).unwrap();
        let before = engine.stats().syncs;
        for _ in 0..10 {
            put(&mut engine, "k", b"row").unwrap();
        }
        (engine.stats().syncs - before, engine.sync_deadline().is_some())
    };
    assert_eq!(syncs(Durability::Always), (10, false));
    assert_eq!(syncs(Durability::Interval(Duration::ZERO)), (10, false));
    assert_eq!(syncs(Durability::Interval(Duration::from_hours(1))), (0, true));
    assert_eq!(syncs(Durability::None), (0, false));
}

#[test]
fn checkpoint_is_needed_when_the_log_exceeds_limit_and_snapshot() {
    let disk = SimDisk::default();
    let (mut engine, ..) = open_on(&disk, "db", small_options()).unwrap();
    let mut rows = Rows::new();
    let fill = |engine: &mut Embedded, rows: &mut Rows| {
        let mut written = 0;
        while !engine.needs_checkpoint() {
            let key = rows.len().to_string();
            put(engine, &key, &[7; 1000]).unwrap();
            rows.insert(("b".into(), key.into_bytes()), vec![7; 1000]);
            written += 1;
        }
        written
    };
    let first = fill(&mut engine, &mut rows);
    assert!((14..18).contains(&first), "{first}");
    let checkpoint = engine.checkpoint().unwrap();
    assert!(!engine.needs_checkpoint(), "a checkpoint is running");
    assert!(matches!(engine.checkpoint(), Err(EngineError::CheckpointRunning)));
    checkpoint.run(in_snapshot(&rows)).unwrap();
    let second = fill(&mut engine, &mut rows);
    engine.checkpoint().unwrap().run(in_snapshot(&rows)).unwrap();
    let third = fill(&mut engine, &mut rows);
    assert!(third > second * 3 / 2, "{first} {second} {third}: the snapshot is longer than the limit by now");
    let stats = engine.stats();
    assert_eq!((stats.checkpoints, stats.checkpoints_failed), (2, 0));
    assert!(stats.snapshot_bytes > 16 * 1024, "{stats:?}");

    // A dropped checkpoint does not shorten the log.
    drop(engine.checkpoint().unwrap());
    assert!(engine.needs_checkpoint());
    assert_eq!(engine.stats().checkpoints_failed, 1);
    drop(engine);
    let (_, recovery, recovered) = open_on(&disk, "db", small_options()).unwrap();
    assert_eq!(recovered, rows);
    assert_eq!(recovery.commits, third);
    assert!(recovery.was_closed && recovery.torn_tail.is_none(), "{recovery:?}");
}

#[test]
fn segments_are_recycled() {
    let disk = SimDisk::default();
    let (mut engine, ..) = open_on(&disk, "db", small_options()).unwrap();
    let rows = Rows::from([(("b".into(), b"k".to_vec()), vec![1; 1000])]);
    let mut most = 0;
    for _ in 0..1000 {
        put(&mut engine, "k", &[1; 1000]).unwrap();
        if engine.needs_checkpoint() {
            engine.checkpoint().unwrap().run(in_snapshot(&rows)).unwrap();
        }
        most = most.max(disk.files(Path::new("db")).len());
    }
    // A megabyte was written in segments of 16 KiB.
    assert!(most <= 6, "{most} files");
    drop(engine);
    assert_eq!(open_on(&disk, "db", small_options()).unwrap().2, rows);
}

#[test]
fn log_above_its_limit_slows_then_rejects_commits() {
    let options = small_options().checkpoint_log_bytes(1 << 40).max_log_bytes(20_000);
    let (mut engine, ..) = open_on(&SimDisk::default(), "db", options).unwrap();
    let mut seen = Vec::new();
    let error = loop {
        seen.push(engine.log_pressure());
        if let Err(error) = put(&mut engine, "k", &[1; 1000]) {
            break error;
        }
    };
    seen.dedup();
    assert_eq!(seen, [LogPressure::Normal, LogPressure::Slow, LogPressure::Full]);
    assert!(matches!(error, EngineError::LogFull { max: 40_000, .. }), "{error}");
    let stats = engine.stats();
    assert!(stats.slowed > 10 && stats.refused == 1, "{stats:?}");

    let position = engine.position();
    engine.checkpoint().unwrap().run(None).unwrap();
    assert_eq!(put(&mut engine, "k", b"").unwrap().sequence, position.sequence + 1);
    assert_eq!(engine.log_pressure(), LogPressure::Normal);
}

#[test]
fn too_large_group_is_rejected_completely() {
    let disk = SimDisk::default();
    let (mut engine, ..) = open_on(&disk, "db", small_options()).unwrap();
    let max = engine.max_group_bytes();
    let row = vec![1; max];
    let commit = |row| [Write { bucket: "b", key: b"k", row: Some(row) }];
    let overhead = stamped(1, &commit(&[])).encoded_len();
    let error = engine.commit(&[stamped(1, &commit(&row[overhead - 1..]))]).unwrap_err();
    assert!(matches!(error, EngineError::TooLarge { len, max: limit } if len == max + 1 && limit == max), "{error}");
    let bucket = "x".repeat(65536);
    let writes = [Write { bucket: &bucket, key: b"k", row: None }];
    assert!(matches!(
        engine.commit(&[WriteSet::default(), stamped(2, &writes)]),
        Err(EngineError::BucketName { len: 65536 })
    ));
    assert_eq!(engine.position().sequence, 0);
    let largest = engine.commit(&[stamped(1, &commit(&row[overhead..]))]).unwrap();
    assert_eq!(largest.sequence, 1);
    drop(engine);
    let (_, recovery, rows) = open_on(&disk, "db", small_options()).unwrap();
    assert_eq!((recovery.commits, rows.len()), (1, 1));
}

#[test]
fn options_can_change_between_openings() {
    let dir = tempfile::tempdir().unwrap();
    let mut written = 0;
    for segment_kib in [64, 8, 1, 32, 8] {
        let options = small_options().segment_bytes(segment_kib * 1024);
        let mut commits = 0;
        let (mut engine, recovery) = Embedded::open(dir.path(), options, |_| commits += 1).unwrap();
        assert_eq!((recovery.position.sequence, commits), (written, written));
        for _ in 0..50 {
            put(&mut engine, "k", &[1; 1000]).unwrap();
            written += 1;
        }
    }
}

/// Between fork and exec, a child process has all files of its parent open.
#[test]
fn lock_is_released_immediately_despite_child_processes() {
    let dir = tempfile::tempdir().unwrap();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                // Setting a process group adds work between fork and exec.
                let mut command = std::process::Command::new("true");
                std::os::unix::process::CommandExt::process_group(&mut command, 0);
                command.spawn().unwrap().wait().unwrap();
            }
        });
        for _ in 0..200 {
            let opened = Embedded::open(dir.path(), small_options(), |_| {});
            if opened.is_err() {
                stop.store(true, std::sync::atomic::Ordering::Relaxed);
            }
            opened.unwrap();
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}
