//! Arbitrary bytes in a log segment and in a snapshot: no panic, and a second recovery gives the same rows and writes as the first.
//!
//! Checksums are not verified in fuzzing builds, so that the fuzzer reaches the code behind them.

#![no_main]

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use tidewire_store::Cause;
use tidewire_store::engine::{Embedded, EmbeddedOptions, Engine, OpenError, Recovered, StoredRow, Write, WriteSet};

#[path = "../../crates/store/tests/it/engine/sim_disk.rs"]
mod disk;

use disk::SimDisk;

/// Every recovered row and write, with the time and cause of its commit.
type Recovery = Vec<(u64, Cause, String, Vec<u8>, Option<Vec<u8>>)>;

fn open(disk: &SimDisk) -> Result<(Embedded, Recovery), OpenError> {
    let options = EmbeddedOptions::default().segment_bytes(8 * 1024);
    let mut recovery = Recovery::new();
    let mut record = |at: u64, cause: Cause, bucket: &str, key: &[u8], row: Option<&[u8]>| {
        recovery.push((at, cause, bucket.to_owned(), key.to_vec(), row.map(<[u8]>::to_vec)));
    };
    let opened =
        Embedded::open_on(Arc::new(disk.clone()), Path::new("db"), options, &mut |recovered| match recovered {
            Recovered::Row(StoredRow { bucket, key, row }) => record(0, Cause::default(), bucket, key, Some(row)),
            Recovered::Commit { at, cause, writes, .. } => {
                writes.for_each(|write| record(at, cause, write.bucket, write.key, write.row));
            }
        });
    opened.map(|(engine, _)| (engine, recovery))
}

/// Returns the files of a valid directory, with a snapshot and later commits.
fn valid_files() -> BTreeMap<String, Vec<u8>> {
    let disk = SimDisk::default();
    let (mut engine, _) = open(&disk).expect("an empty disk opens");
    let writes =
        [Write { bucket: "b", key: b"key", row: Some(b"row") }, Write { bucket: "bucket", key: b"", row: None }];
    let cause = Cause::of(7).next();
    let commits = [WriteSet { writes: &writes, at: 1, cause }, WriteSet { writes: &writes[1..], at: 2, cause }];
    engine.commit(&commits).expect("the disk is not full");
    let checkpoint = engine.checkpoint().expect("no checkpoint is running");
    checkpoint.run([StoredRow { bucket: "b", key: b"key", row: b"row" }]).expect("the disk is not full");
    engine.commit(&commits).expect("the disk is not full");
    drop(engine);
    disk.files(Path::new("db"))
}

fuzz_target!(|data: &[u8]| {
    let Some((&[choice, low, high], bytes)) = data.split_first_chunk() else { return };
    let mut files = valid_files();
    let snapshot = files.keys().find(|name| name.starts_with("snapshot-")).cloned().expect("there is a snapshot");
    let log = "log-0000000000000001".to_owned();
    let put = |files: &mut BTreeMap<String, Vec<u8>>, name: &String, offset: usize| {
        let file = files.get_mut(name).expect("the file exists");
        let end = file.len().min(offset + bytes.len());
        if offset < end {
            file[offset..end].copy_from_slice(&bytes[..end - offset]);
        }
    };
    let offset = usize::from(u16::from_le_bytes([low, high]));
    match choice % 6 {
        // Overwrite some bytes: records of the log, the header of the log, or the snapshot.
        0 => put(&mut files, &log, 4096 + offset % 1024),
        1 => put(&mut files, &log, offset % 4096),
        2 => put(&mut files, &snapshot, offset % 256),
        // Replace a whole file.
        3 => drop(files.insert(log, bytes.to_vec())),
        4 => drop(files.insert(snapshot, bytes.to_vec())),
        _ => {
            files.remove(&snapshot);
            put(&mut files, &log, 4096 + offset % 1024);
        }
    }
    let disk = SimDisk::with_files(Path::new("db"), &files);
    let Ok((engine, first)) = open(&disk) else { return };
    drop(engine);
    let (_, second) = open(&disk).expect("the engine opens again");
    assert_eq!(first, second);
});
