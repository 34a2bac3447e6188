//! Group commit for stores without it: pending writes share one transaction and one sync.

use std::path::Path;
use std::thread::{self, JoinHandle};

use tokio::sync::{mpsc, oneshot};

use super::contender::{Reader, RowStore};
use super::row::NewRow;

/// A store with one writer thread and any number of readers.
pub(super) trait Peer: Sized + Send + Sync + 'static {
    type Writer: Send + 'static;
    type Reader: Reader;

    fn open(folder: &Path) -> Self;
    fn writer(&self) -> Self::Writer;
    /// Stores the rows in one transaction. Returns when it is durable.
    fn commit<'a>(writer: &mut Self::Writer, rows: impl Iterator<Item = &'a NewRow>);
    fn reader(&self) -> Self::Reader;
}

/// The maximum number of pending rows, and of rows in a transaction.
const CAPACITY: usize = 1024;

/// A row, and the channel that acknowledges it.
type PendingInsert = (NewRow, oneshot::Sender<()>);

/// A peer behind a channel. Its writer thread commits all waiting rows together and acknowledges them.
pub(super) struct GroupCommit<P> {
    peer: P,
    sender: mpsc::Sender<PendingInsert>,
    writer: JoinHandle<()>,
}

impl<P: Peer> RowStore for GroupCommit<P> {
    type Reader = P::Reader;

    fn open(folder: &Path) -> Self {
        let peer = P::open(folder);
        let mut writer = peer.writer();
        let (sender, mut pending) = mpsc::channel::<PendingInsert>(CAPACITY);
        let writer = thread::spawn(move || {
            let mut group = Vec::with_capacity(CAPACITY);
            while pending.blocking_recv_many(&mut group, CAPACITY) > 0 {
                P::commit(&mut writer, group.iter().map(|(row, _)| row));
                for (_, acknowledgement) in group.drain(..) {
                    acknowledgement.send(()).expect("the task waits for its row");
                }
            }
        });
        Self { peer, sender, writer }
    }

    async fn insert(&self, row: NewRow) {
        let (sender, acknowledged) = oneshot::channel();
        self.sender.send((row, sender)).await.expect("the writer is running");
        acknowledged.await.expect("the writer acknowledges the row");
    }

    fn reader(&self) -> P::Reader {
        self.peer.reader()
    }

    fn close(self) {
        let Self { peer, sender, writer } = self;
        drop(sender);
        writer.join().expect("the writer does not panic");
        drop(peer);
    }
}
