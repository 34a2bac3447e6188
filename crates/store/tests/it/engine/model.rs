//! What the tests compare an engine with: maps.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use tidewire_store::{
    Disk, Embedded, EmbeddedOptions, Engine, EngineError, OpenError, Position, Recovered, Recovery, StoredRow, Write,
    WriteSet,
};

/// Rows by bucket and key.
pub(crate) type Rows = BTreeMap<(String, Vec<u8>), Vec<u8>>;
/// The writes of a commit, by what they need to own.
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

pub(crate) fn commit(engine: &mut dyn Engine, commits: &[Writes]) -> Result<Position, EngineError> {
    let writes: Vec<_> = commits.iter().map(borrowed).collect();
    let commits: Vec<_> = writes.iter().map(|writes| WriteSet { writes }).collect();
    engine.commit(&commits)
}

/// One commit that puts one row.
pub(crate) fn put(engine: &mut dyn Engine, key: &str, row: &[u8]) -> Result<Position, EngineError> {
    engine.commit(&[WriteSet { writes: &[Write { bucket: "b", key: key.as_bytes(), row: Some(row) }] }])
}

pub(crate) fn in_snapshot(rows: &Rows) -> impl Iterator<Item = StoredRow<'_>> {
    rows.iter().map(|((bucket, key), row)| StoredRow { bucket, key, row })
}

/// Opens, and puts together what there is.
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
                assert_eq!(before, None, "a row comes once");
            }
            Recovered::Commit { position, writes } => {
                assert!(last.is_none_or(|last| last + 1 == position.sequence), "{position:?} after {last:?}");
                last = Some(position.sequence);
                apply(&mut rows, writes);
            }
        })?;
    assert_eq!(engine.position(), recovery.position);
    Ok((engine, recovery, rows))
}

/// Options with which a little is enough for everything to happen.
pub(crate) fn small() -> EmbeddedOptions {
    let mut options = EmbeddedOptions::default();
    (options.segment_bytes, options.checkpoint_log_bytes) = (16 * 1024, 16 * 1024);
    options
}
