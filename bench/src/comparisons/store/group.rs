//! Group commit for stores that have none: writes that wait share one transaction, and so one sync.

use std::path::Path;
use std::thread::{self, JoinHandle};

use tokio::sync::{mpsc, oneshot};

use super::contender::{Reader, RowStore};
use super::row::NewRow;

/// A store that is written by one thread and read by any.
pub(super) trait Peer: Sized + Send + Sync + 'static {
    type Writer: Send + 'static;
    type Reader: Reader;

    fn open(folder: &Path) -> Self;
    fn writer(&self) -> Self::Writer;
    /// Stores these rows in one transaction, and returns when it is on the disk.
    fn commit<'a>(writer: &mut Self::Writer, rows: impl Iterator<Item = &'a NewRow>);
    fn reader(&self) -> Self::Reader;
}

/// How many rows wait at most; as many go into one transaction at most.
const CAPACITY: usize = 1024;

/// A row, and who waits for it.
type Waiting = (NewRow, oneshot::Sender<()>);

/// A peer behind a channel: its writer takes all that waits, commits it and answers all.
pub(super) struct GroupCommit<P> {
    peer: P,
    sender: mpsc::Sender<Waiting>,
    writer: JoinHandle<()>,
}

impl<P: Peer> RowStore for GroupCommit<P> {
    type Reader = P::Reader;

    fn open(folder: &Path) -> Self {
        let peer = P::open(folder);
        let mut writer = peer.writer();
        let (sender, mut waiting) = mpsc::channel::<Waiting>(CAPACITY);
        let writer = thread::spawn(move || {
            let mut group = Vec::with_capacity(CAPACITY);
            while waiting.blocking_recv_many(&mut group, CAPACITY) > 0 {
                P::commit(&mut writer, group.iter().map(|(row, _)| row));
                for (_, stored) in group.drain(..) {
                    stored.send(()).expect("a writer waits for its row");
                }
            }
        });
        Self { peer, sender, writer }
    }

    async fn insert(&self, row: NewRow) {
        let (stored, answer) = oneshot::channel();
        self.sender.send((row, stored)).await.expect("the writer lives");
        answer.await.expect("the writer answers");
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
