//! The interface of every store in the comparison, so that one piece of code sets them the same task.

use std::path::Path;
use std::sync::Arc;

use futures_util::{StreamExt as _, stream};
use tokio::runtime::{self, Runtime};

use super::row::{NewRow, Rows};

/// A store of rows with a key and one index, in a folder, durable to the disk.
pub(super) trait RowStore: Sized + Send + Sync + 'static {
    type Reader: Reader;

    /// Opens the folder, which is empty or was left by an earlier one, closed or killed.
    fn open(folder: &Path) -> Self;
    /// Stores a row, and ends when it is on the disk.
    fn insert(&self, row: NewRow) -> impl Future<Output = ()> + Send;
    /// One for each thread that reads.
    fn reader(&self) -> Self::Reader;
    /// Ends it in order.
    fn close(self);
}

/// Reads what is stored.
pub(super) trait Reader: Send {
    /// Finds the row with this key, as of now, and panics if it is not what was stored.
    fn read(&mut self, id: u64);
    /// How many rows there are.
    fn count(&mut self) -> u64;
}

/// How many inserts wait at a time when a store is filled.
const FILLING: usize = 1024;

/// Stores rows with the keys from `first` up to `end`, as fast as groups of a thousand go.
pub(super) fn fill<S: RowStore>(runtime: &Runtime, store: &S, rows: Rows, first: u64, end: u64) {
    let inserts = stream::iter(first..end).map(|id| store.insert(rows.row(id)));
    runtime.block_on(inserts.buffer_unordered(FILLING).for_each(|()| async {}));
}

/// Has so many tasks store the rows from `first` up to `end`, each one row after the other.
pub(super) fn insert<S: RowStore>(runtime: &Runtime, store: &Arc<S>, writers: u64, rows: Rows, first: u64, end: u64) {
    runtime.block_on(async {
        let writer = |number: u64| {
            let store = Arc::clone(store);
            tokio::spawn(async move {
                // Keys grow about evenly over all writers, as if a sequence had made them.
                for id in (first + number..end).step_by(usize::try_from(writers).expect("64 bits")) {
                    store.insert(rows.row(id)).await;
                }
            })
        };
        let tasks: Vec<_> = (0..writers).map(writer).collect();
        for task in tasks {
            task.await.expect("no writer panics");
        }
    });
}

/// The one thread that all writers share: beside it there is the one that commits.
pub(super) fn runtime() -> Runtime {
    runtime::Builder::new_current_thread().build().expect("a runtime starts")
}

/// Ends a store that nobody else has any more, and sees that it had so many rows.
pub(super) fn finish<S: RowStore>(store: Arc<S>, rows: u64) {
    let count = store.reader().count();
    assert!(count == rows, "{count} rows are stored, and {rows} were inserted");
    Arc::into_inner(store).expect("all writers have ended").close();
}
