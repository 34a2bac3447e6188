//! What appending costs beside the disk, side by side with bare writes of the same bytes:
//! `cargo test --release -p tidewire-store --test engine -- --ignored --nocapture speed`

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Instant;

use tidewire_store::{Change, Commit, Embedded, EmbeddedOptions, Engine};

const ROWS: usize = 64;
const GROUPS: u32 = 2000;
const ROUNDS: usize = 7;

#[test]
#[ignore = "measures; run in release"]
fn speed_of_durable_groups_beside_bare_writes() {
    let dir = tempfile::tempdir().unwrap();
    let (mut engine, _) = Embedded::open(dir.path().join("db"), EmbeddedOptions::default(), |_| {}).unwrap();
    let keys: Vec<_> = (0..ROWS).map(|n| format!("{n:08}")).collect();
    let changes: Vec<_> =
        keys.iter().map(|key| [Change { bucket: "users", key: key.as_bytes(), row: Some(&[7; 256]) }]).collect();
    let commits: Vec<_> = changes.iter().map(|changes| Commit { changes }).collect();
    let bytes = 64 + commits.iter().map(Commit::encoded_len).sum::<usize>();

    // What the engine writes: whole pages, over and over in a file that has them all.
    let bare = File::create(dir.path().join("bare")).unwrap();
    let page = vec![1; bytes.next_multiple_of(4096)];
    let places = (16 << 20) / page.len();
    let write = |n: usize| bare.write_all_at(&page, ((n % places) * page.len()) as u64).unwrap();
    (0..places).for_each(write);
    bare.sync_all().unwrap();

    let mut ratios = Vec::new();
    println!("{ROWS} rows of 256 bytes a group, {bytes} bytes");
    for round in 0..ROUNDS {
        // The segments are written once with zeros in the first round, and recycled after it.
        engine.checkpoint().unwrap().run(None).unwrap();
        let start = Instant::now();
        for _ in 0..GROUPS {
            engine.commit(&commits).unwrap();
        }
        let ours = start.elapsed() / GROUPS;
        let start = Instant::now();
        for n in 0..GROUPS {
            write(n as usize);
            bare.sync_data().unwrap();
        }
        let bare = start.elapsed() / GROUPS;
        let ratio = ours.as_secs_f64() / bare.as_secs_f64();
        let rows = ROWS as f64 / ours.as_secs_f64();
        println!("round {round}: {ours:?} a group, {rows:.0} rows/s; bare {bare:?}; ratio {ratio:.2}");
        if round > 0 {
            ratios.push(ratio);
        }
    }
    ratios.sort_by(f64::total_cmp);
    println!("ratio {:.2} ({:.2} to {:.2})", ratios[ratios.len() / 2], ratios[0], ratios[ratios.len() - 1]);
}
