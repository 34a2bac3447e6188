//! The interface of the stores in the comparison, so that the workloads are written once for all of them.

use std::path::Path;
use std::sync::Arc;

use futures_util::{StreamExt as _, stream};
use tokio::runtime::{self, Runtime};

use super::row::{NewRow, Rows};

/// A durable store of rows with a key and one index.
pub(super) trait RowStore: Sized + Send + Sync + 'static {
    type Reader: Reader;

    /// Opens the store in a folder, which is empty or has a store that was closed or whose process was killed.
    fn open(folder: &Path) -> Self;
    /// Stores a row. Completes when the row is durable.
    fn insert(&self, row: NewRow) -> impl Future<Output = ()> + Send;
    /// Creates a reader. Every reading thread has its own.
    fn reader(&self) -> Self::Reader;
    /// Closes the store.
    fn close(self);
}

/// A reader of a store.
pub(super) trait Reader: Send {
    /// Reads the row with this key. Panics if it is not the row that was stored.
    fn read(&mut self, id: u64);
    /// Returns the number of rows.
    fn count(&mut self) -> u64;
}

/// Inserts in flight while a store is filled.
const INSERTS_IN_FLIGHT: usize = 1024;

/// Stores the rows with keys from `first` up to `end`, with many inserts in flight.
pub(super) fn fill<S: RowStore>(runtime: &Runtime, store: &S, rows: Rows, first: u64, end: u64) {
    let inserts = stream::iter(first..end).map(|id| store.insert(rows.row(id)));
    runtime.block_on(inserts.buffer_unordered(INSERTS_IN_FLIGHT).for_each(|()| async {}));
}

/// Stores the rows with keys from `first` up to `end` by `writers` tasks, each of which waits for its row.
pub(super) fn insert<S: RowStore>(runtime: &Runtime, store: &Arc<S>, writers: u64, rows: Rows, first: u64, end: u64) {
    runtime.block_on(async {
        let writer = |number: u64| {
            let store = Arc::clone(store);
            tokio::spawn(async move {
                // Writers insert about evenly, so the keys grow like those of a sequence.
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

/// Creates the runtime of the writers, which has one thread. The store commits on another thread.
pub(super) fn runtime() -> Runtime {
    runtime::Builder::new_current_thread().build().expect("a runtime starts")
}

/// Checks the number of rows and closes the store.
pub(super) fn check_and_close<S: RowStore>(store: Arc<S>, rows: u64) {
    let count = store.reader().count();
    assert!(count == rows, "{count} rows are stored, but {rows} were inserted");
    Arc::into_inner(store).expect("all writers have ended").close();
}
