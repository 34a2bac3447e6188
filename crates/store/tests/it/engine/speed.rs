//! The cost of appending, compared with plain writes of the same bytes:
//! `cargo test --release -p tidewire-store --test it -- --ignored --nocapture speed`

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Instant;

use tidewire_store::engine::{Embedded, EmbeddedOptions, Engine, Write, WriteSet};

const ROWS: usize = 64;
const GROUPS: usize = 2000;
const ROUNDS: usize = 7;

#[test]
#[ignore = "measures; run in release"]
fn speed_of_durable_groups_and_of_plain_writes() {
    let dir = tempfile::tempdir().unwrap();
    let (mut engine, _) = Embedded::open(dir.path().join("db"), EmbeddedOptions::default(), |_| {}).unwrap();
    let keys: Vec<_> = (0..ROWS).map(|n| format!("{n:08}")).collect();
    let writes: Vec<_> =
        keys.iter().map(|key| [Write { bucket: "users", key: key.as_bytes(), row: Some(&[7; 256]) }]).collect();
    let commits: Vec<_> = writes.iter().map(|writes| WriteSet { writes, ..WriteSet::default() }).collect();
    let bytes = 64 + commits.iter().map(WriteSet::encoded_len).sum::<usize>();

    // The plain writes overwrite full pages of a preallocated file, like the engine.
    let bare = File::create(dir.path().join("bare")).unwrap();
    let page = vec![1; bytes.next_multiple_of(4096)];
    let places = (16 << 20) / page.len();
    let write = |n: usize| bare.write_all_at(&page, ((n % places) * page.len()) as u64).unwrap();
    (0..places).for_each(write);
    bare.sync_all().unwrap();

    println!("{ROWS} rows of 256 bytes a group, {bytes} bytes");
    let mut ratios = Vec::new();
    for round in 0..ROUNDS {
        // The segments are filled with zeros in the first round, and recycled in later rounds.
        engine.checkpoint().unwrap().run(None).unwrap();
        let (mut ours, mut bare_ones) = (Vec::new(), Vec::new());
        // Interleaved, because the load of the disk varies.
        for n in 0..GROUPS {
            let start = Instant::now();
            engine.commit(&commits).unwrap();
            let between = Instant::now();
            write(n);
            bare.sync_data().unwrap();
            bare_ones.push(between.elapsed());
            ours.push(between - start);
        }
        ours.sort_unstable();
        bare_ones.sort_unstable();
        let [(our_median, our_tail), (bare_median, bare_tail)] =
            [ours, bare_ones].map(|times| (times[GROUPS / 2], times[GROUPS * 99 / 100]));
        let groups = 1.0 / our_median.as_secs_f64();
        let ratio = our_median.as_secs_f64() / bare_median.as_secs_f64();
        println!(
            "round {round}: median {our_median:?} (p99 {our_tail:?}), {groups:.0} groups/s; \
             bare {bare_median:?} (p99 {bare_tail:?}); ratio {ratio:.2}"
        );
        if round > 0 {
            ratios.push(ratio);
        }
    }
    ratios.sort_by(f64::total_cmp);
    println!("ratio {:.2} ({:.2} to {:.2})", ratios[ratios.len() / 2], ratios[0], ratios[ratios.len() - 1]);
}
