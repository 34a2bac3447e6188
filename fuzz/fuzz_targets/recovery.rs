//! Any bytes as a segment of the log and as a snapshot: no panic, and what is told once is told again.
//!
//! Checksums are not looked at when fuzzing, so that the fuzzer gets past them.

#![no_main]

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use tidewire_store::Cause;
use tidewire_store::engine::{Embedded, EmbeddedOptions, Engine, OpenError, Recovered, StoredRow, Write, WriteSet};

#[path = "../../crates/store/tests/it/engine/disk.rs"]
mod disk;

use disk::SimDisk;

/// Every row and write, with the time and cause of its commit.
type Told = Vec<(u64, Cause, String, Vec<u8>, Option<Vec<u8>>)>;

fn open(disk: &SimDisk) -> Result<(Embedded, Told), OpenError> {
    let options = EmbeddedOptions::default().segment_bytes(8 * 1024);
    let mut told = Told::new();
    let mut tell = |at: u64, cause: Cause, bucket: &str, key: &[u8], row: Option<&[u8]>| {
        told.push((at, cause, bucket.to_owned(), key.to_vec(), row.map(<[u8]>::to_vec)));
    };
    let opened =
        Embedded::open_on(Arc::new(disk.clone()), Path::new("db"), options, &mut |recovered| match recovered {
            Recovered::Row(StoredRow { bucket, key, row }) => tell(0, Cause::default(), bucket, key, Some(row)),
            Recovered::Commit { at, cause, writes, .. } => {
                writes.for_each(|write| tell(at, cause, write.bucket, write.key, write.row));
            }
        });
    opened.map(|(engine, _)| (engine, told))
}

/// A directory with a snapshot and commits after it, as the engine writes it.
fn whole() -> BTreeMap<String, Vec<u8>> {
    let disk = SimDisk::default();
    let (mut engine, _) = open(&disk).expect("nothing is wrong yet");
    let writes =
        [Write { bucket: "b", key: b"key", row: Some(b"row") }, Write { bucket: "bucket", key: b"", row: None }];
    let cause = Cause::of(7).next();
    let commits = [WriteSet { writes: &writes, at: 1, cause }, WriteSet { writes: &writes[1..], at: 2, cause }];
    engine.commit(&commits).expect("it fits");
    let checkpoint = engine.checkpoint().expect("there is none");
    checkpoint.run([StoredRow { bucket: "b", key: b"key", row: b"row" }]).expect("it fits");
    engine.commit(&commits).expect("it fits");
    drop(engine);
    disk.files(Path::new("db"))
}

fuzz_target!(|data: &[u8]| {
    let Some((&[choice, low, high], bytes)) = data.split_first_chunk() else { return };
    let mut files = whole();
    let snapshot = files.keys().find(|name| name.starts_with("snapshot-")).cloned().expect("it was made");
    let log = "log-0000000000000001".to_owned();
    let put = |files: &mut BTreeMap<String, Vec<u8>>, name: &String, place: usize| {
        let file = files.get_mut(name).expect("it is there");
        let end = file.len().min(place + bytes.len());
        if place < end {
            file[place..end].copy_from_slice(&bytes[..end - place]);
        }
    };
    let place = usize::from(u16::from_le_bytes([low, high]));
    match choice % 6 {
        // Some bytes of what is there, in the frames or in the snapshot.
        0 => put(&mut files, &log, 4096 + place % 1024),
        1 => put(&mut files, &log, place % 4096),
        2 => put(&mut files, &snapshot, place % 256),
        // All of a file.
        3 => drop(files.insert(log, bytes.to_vec())),
        4 => drop(files.insert(snapshot, bytes.to_vec())),
        _ => {
            files.remove(&snapshot);
            put(&mut files, &log, 4096 + place % 1024);
        }
    }
    let disk = SimDisk::with_files(Path::new("db"), &files);
    let Ok((engine, told)) = open(&disk) else { return };
    drop(engine);
    let (_, again) = open(&disk).expect("what was opened can be opened");
    assert_eq!(told, again);
});
