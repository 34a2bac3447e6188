//! Processes that are killed: what they acknowledged is there.

use std::io::Write as _;
use std::thread;

use tidewire_store::{Embedded, EmbeddedOptions, Engine, OpenError, Recovered, StoredRow, Write, WriteSet};
use tidewire_testkit::{PATIENCE, Process, is_rerun, rerun, wait_until};

const TEST: &str = "kill::what_a_killed_process_acknowledged_is_there";
const DIR: &str = "TIDEWIRE_STORE_KILL_DIR";

fn options() -> EmbeddedOptions {
    let mut options = EmbeddedOptions::default();
    (options.segment_bytes, options.checkpoint_log_bytes) = (64 * 1024, 96 * 1024);
    options
}

fn row(n: u64) -> Vec<u8> {
    n.to_le_bytes().repeat(1 + usize::try_from(n % 60).unwrap())
}

/// How many rows there are; they are those from zero on.
fn open(dir: &str) -> Result<(Embedded, u64), OpenError> {
    let mut count = 0;
    let mut check = |key: &[u8], found: &[u8]| {
        assert_eq!(key, count.to_string().as_bytes());
        assert_eq!(found, row(count));
        count += 1;
    };
    let (engine, _) = Embedded::open(dir, options(), |recovered| match recovered {
        Recovered::Row(row) => check(row.key, row.row),
        Recovered::Commit { writes, .. } => {
            for write in writes {
                check(write.key, write.row.expect("nothing is deleted"));
            }
        }
    })?;
    Ok((engine, count))
}

/// Writes rows until it is killed, and tells of each group.
fn write(dir: &str) {
    let (mut engine, mut count) = open(dir).unwrap();
    println!("opened {count}");
    loop {
        let rows: Vec<_> = (count..count + 1 + count % 7).map(|n| (n.to_string(), row(n))).collect();
        let writes: Vec<_> =
            rows.iter().map(|(key, row)| [Write { bucket: "b", key: key.as_bytes(), row: Some(row) }]).collect();
        let commits: Vec<_> = writes.iter().map(|writes| WriteSet { writes }).collect();
        engine.commit(&commits).unwrap();
        count += commits.len() as u64;
        println!("acknowledged {count}");
        std::io::stdout().flush().unwrap();
        if engine.needs_checkpoint() {
            let checkpoint = engine.checkpoint().unwrap();
            thread::spawn(move || {
                let rows: Vec<_> = (0..count).map(|n| (n.to_string(), row(n))).collect();
                let rows = rows.iter().map(|(key, row)| StoredRow { bucket: "b", key: key.as_bytes(), row });
                checkpoint.run(rows).unwrap();
            });
        }
    }
}

/// How many rows it has told of.
fn acknowledged(child: &Process) -> u64 {
    let output = child.output();
    let told = |word| output.lines().rev().find_map(|line| line.strip_prefix(word)?.parse().ok());
    told("acknowledged ").or(told("opened ")).unwrap_or(0)
}

#[test]
fn what_a_killed_process_acknowledged_is_there() {
    if is_rerun() {
        return write(&std::env::var(DIR).unwrap());
    }
    let temporary = tempfile::tempdir().unwrap();
    let mut rng = fastrand::Rng::with_seed(7);
    let mut rounds = 0;
    // Every so often from the start, since a round takes as long as there are rows.
    for life in 0..10 {
        let dir = temporary.path().join(life.to_string());
        let dir = dir.to_str().unwrap();
        for _ in 0..20 {
            let mut command = rerun(TEST);
            command.env(DIR, dir);
            let mut child = Process::spawn(command);
            // Any moment will do: before it has opened, while it does, or after some groups.
            match rng.u8(..8) {
                0 => {}
                1 => drop(child.wait_for_line("opened ")),
                _ => {
                    let opened: u64 = child.wait_for_line("opened ").parse().unwrap();
                    let enough = opened + rng.u64(..400);
                    wait_until("enough is acknowledged", PATIENCE, || acknowledged(&child) >= enough);
                }
            }
            child.kill();
            child.wait();
            let acknowledged = acknowledged(&child);
            let (engine, count) = open(dir).unwrap();
            assert!(count >= acknowledged, "{count} of {acknowledged} rows");
            rounds += 1;
            drop(engine);
        }
    }
    assert_eq!(rounds, 200);
}
