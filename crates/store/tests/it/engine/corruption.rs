//! Corruption of each byte and truncation at each length: recovery returns a prefix of the commits or an error, and never panics.

use std::collections::BTreeMap;
use std::path::Path;

use tidewire_store::engine::{Corruption, Durability, Embedded, EmbeddedOptions, Engine, OpenError, Write, WriteSet};

use crate::engine::model::{Rows, in_snapshot, open_on, put, small_options, stamped, version_1_log};
use crate::engine::sim_disk::SimDisk;

type Files = BTreeMap<String, Vec<u8>>;

/// Length of a row, chosen so that two dozen rows take two segments.
const ROW_BYTES: usize = 100;

/// Returns all offsets near used bytes, and some of the others: most of a segment is unused zeros.
fn offsets(bytes: &[u8]) -> impl Iterator<Item = usize> {
    let is_used =
        |offset: usize| bytes[offset.saturating_sub(16)..bytes.len().min(offset + 16)].iter().any(|byte| *byte != 0);
    (0..bytes.len()).filter(move |offset| offset % 97 == 0 || is_used(*offset))
}

fn options() -> EmbeddedOptions {
    small_options().segment_bytes(8 * 1024)
}

fn rows(count: u64) -> Rows {
    (1..=count).map(|n| (("b".into(), n.to_string().into_bytes()), vec![n.to_le_bytes()[0]; ROW_BYTES])).collect()
}

/// Returns the files of a directory with `count` rows, one per commit, the first `in_the_snapshot` of them in a snapshot.
fn files(count: u64, in_the_snapshot: u64, is_closed: bool, options: EmbeddedOptions) -> Files {
    let disk = SimDisk::default();
    let (mut engine, ..) = open_on(&disk, "db", options).unwrap();
    for n in 1..=count {
        put(&mut engine, &n.to_string(), &[n.to_le_bytes()[0]; ROW_BYTES]).unwrap();
        if n == in_the_snapshot {
            engine.checkpoint().unwrap().run(in_snapshot(&rows(n))).unwrap();
        }
    }
    if is_closed {
        Box::new(engine).close().unwrap();
    } else {
        disk.power_off();
        drop(engine);
        disk.kill();
    }
    disk.files(Path::new("db"))
}

/// Opens the files, checks that the commits are a prefix, and returns their number.
fn opened(files: &Files, options: EmbeddedOptions) -> Result<u64, OpenError> {
    let disk = SimDisk::with_files(Path::new("db"), files);
    let (mut engine, recovery, found) = open_on(&disk, "db", options)?;
    let count = recovery.position.sequence;
    assert_eq!(found, rows(count));
    // New commits are possible.
    put(&mut engine, &(count + 1).to_string(), &[(count + 1).to_le_bytes()[0]; ROW_BYTES]).unwrap();
    drop(engine);
    assert_eq!(open_on(&disk, "db", options)?.2, rows(count + 1));
    Ok(count)
}

#[test]
fn changed_byte_loses_at_most_the_last_group() {
    for (is_closed, in_the_snapshot) in [(true, 0), (false, 0), (true, 15)] {
        let whole = files(24, in_the_snapshot, is_closed, options());
        assert!(whole.keys().filter(|name| name.starts_with("log-")).count() >= 3, "{:?}", whole.keys());
        assert_eq!(opened(&whole, options()).unwrap(), 24);
        let (mut fine, mut refused) = (0, 0);
        for (name, bytes) in &whole {
            for place in offsets(bytes) {
                let mut damaged = whole.clone();
                damaged.get_mut(name).unwrap()[place] ^= 1 << (place % 8);
                match opened(&damaged, options()) {
                    Ok(count) if is_closed => assert_eq!(count, 24, "{name} {place}"),
                    Ok(count) => assert!(count >= 23, "{name} {place}: {count}"),
                    Err(OpenError::Corrupt { file, .. }) => {
                        assert!(file.starts_with("db"));
                        refused += 1;
                        continue;
                    }
                    Err(OpenError::Version { .. }) => panic!("a changed version invalidates the checksum"),
                    Err(error) => panic!("{name} {place}: {error}"),
                }
                fine += 1;
            }
        }
        assert!(refused > 2000 && fine > 100, "{refused} refused, {fine} fine");
    }
}

/// An opened log of version 1 continues in a new segment.
#[test]
fn changed_byte_in_a_version_1_log_loses_at_most_the_last_group() {
    let whole = version_1_log();
    assert_eq!(opened(&whole, options()).unwrap(), 24);
    let (mut fine, mut refused) = (0, 0);
    for (name, bytes) in &whole {
        for place in offsets(bytes) {
            let mut damaged = whole.clone();
            damaged.get_mut(name).unwrap()[place] ^= 1 << (place % 8);
            match opened(&damaged, options()) {
                Ok(count) => assert!(count >= 23, "{name} {place}: {count}"),
                Err(OpenError::Corrupt { .. }) => {
                    refused += 1;
                    continue;
                }
                Err(error) => panic!("{name} {place}: {error}"),
            }
            fine += 1;
        }
    }
    assert!(refused > 2000 && fine > 100, "{refused} refused, {fine} fine");
}

#[test]
fn segment_with_unknown_version_is_rejected() {
    // The header has an unknown version and a valid checksum.
    let mut files = files(3, 0, true, options());
    let log = files.get_mut("log-0000000000000001").unwrap();
    log[7] = 3;
    let crc = crc32c::crc32c_append(crc32c::crc32c(&log[..8]), &log[12..60]);
    log[8..12].copy_from_slice(&crc.to_le_bytes());
    let error = opened(&files, options()).unwrap_err();
    assert!(matches!(&error, OpenError::Version { version: 3, .. }), "{error}");
}

#[test]
fn truncated_log_gives_a_prefix_or_an_error() {
    for durability in [Durability::Always, Durability::None] {
        let options = options().durability(durability);
        let whole = files(24, 0, false, options);
        let names: Vec<_> = whole.keys().filter(|name| name.starts_with("log-")).cloned().collect();
        for (n, name) in names.iter().enumerate() {
            let mut counts = Vec::new();
            for len in offsets(&whole[name]).collect::<Vec<_>>().into_iter().rev() {
                let mut cut = whole.clone();
                cut.get_mut(name).unwrap().truncate(len);
                match opened(&cut, options) {
                    Ok(count) => counts.push(count),
                    Err(OpenError::Corrupt { .. }) => counts.push(0),
                    Err(error) => panic!("{name} {len}: {error}"),
                }
            }
            assert!(counts.is_sorted_by(|a, b| a >= b), "{name}");
            let is_last_written = n + 2 == names.len();
            counts.dedup();
            assert_eq!(counts.len() > 3, is_last_written, "{name}: {counts:?}");
        }
    }
}

#[test]
fn truncated_snapshot_is_rejected() {
    let whole = files(12, 9, true, options());
    let name = whole.keys().find(|name| name.starts_with("snapshot-")).unwrap();
    for len in 0..whole[name].len() {
        let mut cut = whole.clone();
        cut.get_mut(name).unwrap().truncate(len);
        let error = opened(&cut, options()).unwrap_err();
        let OpenError::Corrupt { file, what, .. } = error else { panic!("{len}: {error}") };
        assert!(file.ends_with(name));
        assert!(matches!(what, Corruption::SnapshotHeader | Corruption::SnapshotBlock | Corruption::SnapshotEnd));
    }
    let mut longer = whole.clone();
    longer.get_mut(name).unwrap().push(0);
    assert!(opened(&longer, options()).is_err());
}

#[test]
fn missing_file_is_reported() {
    let whole = files(90, 60, true, options());
    let (logs, snapshots): (Vec<_>, Vec<_>) =
        whole.keys().filter(|name| name.contains('-')).partition(|name| name.starts_with("log-"));
    let snapshot = snapshots[0];
    let without = |name: &str| {
        let mut files = whole.clone();
        files.remove(name);
        opened(&files, options())
    };
    let error = without(snapshot).unwrap_err();
    assert!(matches!(error, OpenError::Missing { .. }), "{error}");
    let mut missing = 0;
    for name in &logs {
        match without(name) {
            // A spare or unused segment.
            Ok(count) => assert_eq!(count, 90),
            Err(OpenError::Missing { file }) => {
                assert!(file.ends_with(name));
                missing += 1;
            }
            Err(error) => panic!("{error}"),
        }
    }
    assert!(missing >= 1);
    let error = without(logs.last().unwrap());
    assert_eq!(error.unwrap(), 90);
}

#[test]
fn torn_tail_is_reported() {
    let whole = files(5, 0, false, options());
    let disk = |files: &Files| SimDisk::with_files(Path::new("db"), files);
    let (_, recovery, _) = open_on(&disk(&whole), "db", options()).unwrap();
    assert_eq!((recovery.torn_tail, recovery.was_closed), (None, false));
    let mut torn = whole.clone();
    let log = torn.get_mut("log-0000000000000001").unwrap();
    let last = log.iter().rposition(|byte| *byte != 0).unwrap();
    log[last] ^= 1;
    let (_, recovery, rows_found) = open_on(&disk(&torn), "db", options()).unwrap();
    assert_eq!(rows_found, rows(4));
    let cut = recovery.torn_tail.unwrap();
    assert!(cut.file.ends_with("log-0000000000000001"));
    assert!(cut.offset < last as u64 && !recovery.is_new_epoch);
}

#[test]
fn segments_of_another_log_are_rejected() {
    let (one, other) = (files(24, 0, true, options()), files(24, 0, true, options()));
    let mut mixed = one.clone();
    mixed.insert("log-0000000000000002".into(), other["log-0000000000000002"].clone());
    assert!(matches!(opened(&mixed, options()), Err(OpenError::Corrupt { .. })));
}

#[test]
fn frames_after_a_lost_frame_are_not_replayed() {
    let options = small_options().durability(Durability::None);
    let disk = SimDisk::default();
    // Commits a group whose frame has this length.
    let append = |engine: &mut Embedded, frame: usize, commits: usize, byte: u8| {
        let sequence = engine.position().sequence + 1;
        let bare = stamped(sequence, &[Write { bucket: "b", key: &[byte], row: Some(&[]) }]).encoded_len();
        let row = vec![byte; frame - 64 - bare - (commits - 1) * WriteSet::default().encoded_len()];
        let writes = [Write { bucket: "b", key: &[byte], row: Some(&row) }];
        let mut group = vec![WriteSet::default(); commits];
        group[0] = stamped(sequence, &writes);
        engine.commit(&group).unwrap();
    };
    let (mut engine, ..) = open_on(&disk, "db", options).unwrap();
    // The first page of frames is full, the second page is lost, the third page is intact.
    append(&mut engine, 4096 - 72, 1, 1);
    engine.sync().unwrap();
    append(&mut engine, 2048, 1, 2);
    append(&mut engine, 2048, 1, 3);
    append(&mut engine, 1024, 1, 4);
    disk.power_off();
    drop(engine);
    disk.kill();
    let mut files = disk.files(Path::new("db"));
    files.get_mut("log-0000000000000001").unwrap()[8192..12288].fill(0);

    let disk = SimDisk::with_files(Path::new("db"), &files);
    let (mut engine, recovery, rows) = open_on(&disk, "db", options).unwrap();
    assert_eq!((rows.len(), recovery.position.sequence, recovery.is_new_epoch), (1, 1, true));
    // The `Opened` frame and this commit reuse the offsets, numbers and sequences of the lost frames.
    append(&mut engine, 4096 - 72, 2, 5);
    disk.power_off();
    drop(engine);
    disk.kill();
    let (_, recovery, rows) = open_on(&disk, "db", options).unwrap();
    let keys: Vec<_> = rows.keys().map(|(_, key)| key[0]).collect();
    assert_eq!((keys, recovery.position.sequence), (vec![1, 5], 3));
}
