//! Commits and checkpoints in a process without free file descriptors.

use std::fs::File;
use std::path::Path;

use rustix::process::{Resource, Rlimit, setrlimit};
use tidewire_store::engine::{Embedded, Engine};
use tidewire_testkit::{Process, is_rerun, rerun};

use crate::engine::model::{Rows, in_snapshot, put, small_options};

const TEST: &str = "engine::file_descriptors::commits_and_checkpoints_continue_without_free_descriptors";
const DIR: &str = "TIDEWIRE_STORE_DESCRIPTORS_DIR";
/// Commits in each phase: about ten segments of 16 KiB.
const COMMITS: u64 = 160;
const CHECKPOINTS: u64 = 3;
/// Maximum number of commits until enough checkpoints have succeeded.
const MAX_COMMITS: u64 = 4000;

/// Opens files until no descriptor is left.
fn take_descriptors(taken: &mut Vec<File>) {
    while let Ok(file) = File::open("/dev/null") {
        taken.push(file);
    }
}

/// Commits a row, and runs a checkpoint if one is needed. The checkpoint may fail, because a thread that prepares a segment competes
/// for the descriptor.
fn step(engine: &mut Embedded, rows: &mut Rows) {
    let key = rows.len().to_string();
    put(engine, &key, &[1; 900]).unwrap();
    rows.insert(("b".into(), key.into_bytes()), vec![1; 900]);
    if engine.needs_checkpoint() {
        let _ = engine.checkpoint().unwrap().run(in_snapshot(rows));
    }
}

fn write(dir: &Path) {
    let limit = Rlimit { current: Some(64), maximum: Some(64) };
    setrlimit(Resource::Nofile, limit).unwrap();
    let (mut engine, _) = Embedded::open(dir, small_options(), |_| {}).unwrap();
    let (mut rows, mut taken) = (Rows::new(), Vec::new());

    // The engine has only its reserved descriptor, and those that it releases.
    take_descriptors(&mut taken);
    assert!(taken.len() > 20, "{}", taken.len());
    for n in 0..MAX_COMMITS {
        if n >= COMMITS && engine.stats().checkpoints >= CHECKPOINTS {
            break;
        }
        step(&mut engine, &mut rows);
    }
    assert!(engine.stats().checkpoints >= CHECKPOINTS, "{:?}", engine.stats());

    // Every descriptor that the engine releases is taken immediately.
    for _ in 0..COMMITS {
        step(&mut engine, &mut rows);
        take_descriptors(&mut taken);
    }
    assert_eq!(engine.stats().refused, 0);
    println!("committed {}", rows.len());
    // The process exits without closing the engine. Recovery must find every commit.
    std::process::exit(0);
}

#[test]
fn commits_and_checkpoints_continue_without_free_descriptors() {
    if let Some(dir) = std::env::var_os(DIR).filter(|_| is_rerun()) {
        return write(Path::new(&dir));
    }
    let dir = tempfile::tempdir().unwrap();
    let mut command = rerun(TEST);
    command.env(DIR, dir.path());
    let mut child = Process::spawn(command);
    let status = child.wait();
    assert!(status.success(), "{status}: {}", child.output());
    let committed: u64 = child.wait_for_line("committed ").parse().unwrap();
    let (_, recovery) = Embedded::open(dir.path(), small_options(), |_| {}).unwrap();
    assert_eq!(recovery.position.sequence, committed);
    assert!(committed >= 2 * COMMITS);
}
