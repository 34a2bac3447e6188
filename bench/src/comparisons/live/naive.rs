//! A naive notifier: each subscriber has a filter and a queue, and every change is evaluated and encoded for each subscriber.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::thread::{self, JoinHandle};

use bytes::Bytes;
use futures_util::Stream;
use tidewire_store::{Change, Position, Query, Store};
use tokio::sync::{mpsc, watch};

use super::fanout::Notifier;

/// The capacity of a subscriber's queue in events.
const QUEUE_CAPACITY: usize = 64;

/// The events of a subscriber.
pub(super) struct Queue(mpsc::Receiver<Bytes>);

impl Stream for Queue {
    type Item = Bytes;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Bytes>> {
        self.0.poll_recv(context)
    }
}

/// A thread that sends every commit to each subscriber whose query it affects. It ends when the store is dropped.
pub(super) struct NaiveNotifier {
    /// The sequence of the last commit that was sent to all subscribers.
    delivered: watch::Receiver<u64>,
    thread: Option<JoinHandle<()>>,
}

impl NaiveNotifier {
    /// Starts the thread, with one subscriber per query.
    pub(super) fn new(store: &Store, queries: impl IntoIterator<Item = Query>) -> (Self, Vec<Queue>) {
        let with_queue = |query| {
            let (sender, queue) = mpsc::channel(QUEUE_CAPACITY);
            ((query, sender), Queue(queue))
        };
        let (subscribers, queues): (Vec<(Query, mpsc::Sender<Bytes>)>, _) = queries.into_iter().map(with_queue).unzip();
        let (snapshot, mut follower) = store.follow();
        let (deliver, delivered) = watch::channel(snapshot.position.sequence);
        let thread = thread::spawn(move || {
            while let Ok(commit) = follower.wait() {
                for (query, sender) in &subscribers {
                    if let Some(event) = event(query, &commit.changes) {
                        sender.try_send(event).expect("no subscriber falls behind");
                    }
                }
                deliver.send_replace(commit.position.sequence);
            }
        });
        (Self { delivered, thread: Some(thread) }, queues)
    }
}

impl Drop for NaiveNotifier {
    /// Joins the thread. The store must have been dropped before.
    fn drop(&mut self) {
        let ended = self.thread.take().map(JoinHandle::join);
        assert!(matches!(ended, Some(Ok(()))) || thread::panicking(), "the thread does not panic");
    }
}

impl Notifier for NaiveNotifier {
    async fn settled(&mut self, position: Position) {
        self.delivered.wait_for(|sequence| *sequence >= position.sequence).await.expect("the thread is running");
    }
}

/// Encodes the changes to the result of a query, in the format of a delta. Returns `None` if the result did not change.
fn event(query: &Query, changes: &[Change]) -> Option<Bytes> {
    let (mut added, mut changed, mut removed) = (Vec::new(), Vec::new(), Vec::new());
    for change in changes.iter().filter(|change| *change.bucket == *query.bucket) {
        let old = change.old.as_ref().filter(|row| query.filter.matches(row));
        let new = change.new.as_ref().filter(|row| query.filter.matches(row));
        match (old, new) {
            (None, Some(new)) => added.push(new.text()),
            (Some(_), Some(new)) => changed.push(new.text()),
            (Some(old), None) => removed.push(old.text()),
            (None, None) => {}
        }
    }
    if added.is_empty() && changed.is_empty() && removed.is_empty() {
        return None;
    }
    let lists = [("{\"added\":[", added), ("],\"changed\":[", changed), ("],\"removed\":[", removed)];
    // The exact length is reserved, so that the conversion to `Bytes` does not reallocate.
    let list = |(name, rows): &(&str, Vec<&str>)| {
        let commas = rows.len().saturating_sub(1);
        name.len() + rows.iter().map(|row| row.len()).sum::<usize>() + commas
    };
    let mut text = String::with_capacity(lists.iter().map(list).sum::<usize>() + 2);
    for (name, rows) in lists {
        text.push_str(name);
        for (index, row) in rows.into_iter().enumerate() {
            text.push_str(if index > 0 { "," } else { "" });
            text.push_str(row);
        }
    }
    text.push_str("]}");
    Some(text.into())
}
