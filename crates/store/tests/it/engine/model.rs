//! A model of an engine: maps of rows, and commit metadata derived from the sequence.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use tidewire_store::engine::{
    Disk, Embedded, EmbeddedOptions, Engine, EngineError, OpenError, Recovered, Recovery, StoredRow, Write, WriteSet,
};
use tidewire_store::{Cause, Position};

/// Rows by bucket and key.
pub(crate) type Rows = BTreeMap<(String, Vec<u8>), Vec<u8>>;
/// The owned writes of a commit.
pub(crate) type Writes = Vec<(String, Vec<u8>, Option<Vec<u8>>)>;

pub(crate) fn apply<'a>(rows: &mut Rows, writes: impl IntoIterator<Item = Write<'a>>) {
    for Write { bucket, key, row } in writes {
        let place = (bucket.to_owned(), key.to_vec());
        match row {
            Some(row) => rows.insert(place, row.to_vec()),
            None => rows.remove(&place),
        };
    }
}

pub(crate) fn borrowed(writes: &Writes) -> Vec<Write<'_>> {
    writes.iter().map(|(bucket, key, row)| Write { bucket, key, row: row.as_deref() }).collect()
}

/// Returns a commit with metadata that is derived from its sequence.
pub(crate) fn stamped<'a>(sequence: u64, writes: &'a [Write<'a>]) -> WriteSet<'a> {
    let cause = Cause::of(sequence.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    WriteSet { writes, at: sequence * 1000, cause: if sequence.is_multiple_of(2) { cause } else { cause.next() } }
}

pub(crate) fn commit(engine: &mut dyn Engine, commits: &[Writes]) -> Result<Position, EngineError> {
    let writes: Vec<_> = commits.iter().map(borrowed).collect();
    let first = engine.position().sequence + 1;
    let commits: Vec<_> = writes.iter().zip(first..).map(|(writes, sequence)| stamped(sequence, writes)).collect();
    engine.commit(&commits)
}

/// Commits one row.
pub(crate) fn put(engine: &mut dyn Engine, key: &str, row: &[u8]) -> Result<Position, EngineError> {
    let sequence = engine.position().sequence + 1;
    engine.commit(&[stamped(sequence, &[Write { bucket: "b", key: key.as_bytes(), row: Some(row) }])])
}

/// Number of commits of [`version_1_log`].
pub(crate) const VERSION_1_COMMITS: u64 = 24;

/// Returns the files of a log of version 1 that was not closed: 24 commits without metadata, each with a row of 100 bytes.
pub(crate) fn version_1_log() -> BTreeMap<String, Vec<u8>> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/log-v1/engine");
    let files = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    files.map(|file| (file.file_name().into_string().unwrap(), std::fs::read(file.path()).unwrap())).collect()
}

/// Returns the rows as rows of a snapshot.
pub(crate) fn in_snapshot(rows: &Rows) -> impl Iterator<Item = StoredRow<'_>> {
    rows.iter().map(|((bucket, key), row)| StoredRow { bucket, key, row })
}

/// Opens an engine and collects its rows.
pub(crate) fn open_on(
    disk: &(impl Disk + Clone),
    dir: &str,
    options: EmbeddedOptions,
) -> Result<(Embedded, Recovery, Rows), OpenError> {
    let mut rows = Rows::new();
    let mut last = None;
    let (engine, recovery) =
        Embedded::open_on(Arc::new(disk.clone()), Path::new(dir), options, &mut |recovered| match recovered {
            Recovered::Row(StoredRow { bucket, key, row }) => {
                assert_eq!(last, None, "a row after a commit");
                let before = rows.insert((bucket.to_owned(), key.to_vec()), row.to_vec());
                assert_eq!(before, None, "a duplicate row");
            }
            Recovered::Commit { position, at, cause, writes } => {
                assert!(last.is_none_or(|last| last + 1 == position.sequence), "{position:?} after {last:?}");
                let expected = stamped(position.sequence, &[]);
                let is_old = position.sequence <= VERSION_1_COMMITS && (at, cause) == (0, Cause::default());
                assert!(is_old || (at, cause) == (expected.at, expected.cause), "{position:?}: {at} {cause:?}");
                last = Some(position.sequence);
                apply(&mut rows, writes);
            }
        })?;
    assert_eq!(engine.position(), recovery.position);
    Ok((engine, recovery, rows))
}

/// Options with small limits, so that short tests reach them.
pub(crate) fn small_options() -> EmbeddedOptions {
    EmbeddedOptions::default().segment_bytes(16 * 1024).checkpoint_log_bytes(16 * 1024)
}
