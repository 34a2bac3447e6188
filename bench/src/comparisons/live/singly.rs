//! The naive way to notify many subscribers: each has a filter and a queue, and every change is evaluated and encoded for each.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::thread::{self, JoinHandle};

use bytes::Bytes;
use futures_util::Stream;
use tidewire_store::{Change, Position, Query, Store};
use tokio::sync::{mpsc, watch};

use super::fanout::Teller;

/// How many events wait for a subscriber.
const WAITING: usize = 64;

/// What a subscriber is told.
pub(super) struct Queue(mpsc::Receiver<Bytes>);

impl Stream for Queue {
    type Item = Bytes;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Bytes>> {
        self.0.poll_recv(context)
    }
}

/// A thread that tells each subscriber of every commit that concerns it. It ends with the store.
pub(super) struct Singly {
    /// The sequence of the last commit that all have been told of.
    told: watch::Receiver<u64>,
    thread: Option<JoinHandle<()>>,
}

impl Singly {
    /// Tells those who follow these queries.
    pub(super) fn new(store: &Store, queries: impl IntoIterator<Item = Query>) -> (Self, Vec<Queue>) {
        let with_queue = |query| {
            let (sender, queue) = mpsc::channel(WAITING);
            ((query, sender), Queue(queue))
        };
        let (subscribers, queues): (Vec<(Query, mpsc::Sender<Bytes>)>, _) = queries.into_iter().map(with_queue).unzip();
        let (snapshot, mut follower) = store.follow();
        let (tell, told) = watch::channel(snapshot.position.sequence);
        let thread = thread::spawn(move || {
            while let Ok(commit) = follower.wait() {
                for (query, sender) in &subscribers {
                    if let Some(event) = event(query, &commit.changes) {
                        sender.try_send(event).expect("nobody falls behind");
                    }
                }
                tell.send_replace(commit.position.sequence);
            }
        });
        (Self { told, thread: Some(thread) }, queues)
    }
}

impl Drop for Singly {
    /// The store must have been dropped before.
    fn drop(&mut self) {
        let ended = self.thread.take().map(JoinHandle::join);
        assert!(matches!(ended, Some(Ok(()))) || thread::panicking(), "the thread does not panic");
    }
}

impl Teller for Singly {
    async fn settled(&mut self, position: Position) {
        self.told.wait_for(|told| *told >= position.sequence).await.expect("the thread goes on");
    }
}

/// What has changed for a query, in the form that a delta has; none if nothing has.
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
    // Exactly as long as it will be, so that it becomes bytes as it is.
    let list = |(name, rows): &(&str, Vec<&str>)| {
        let commas = rows.len().saturating_sub(1);
        name.len() + rows.iter().map(|row| row.len()).sum::<usize>() + commas
    };
    let mut text = String::with_capacity(lists.iter().map(list).sum::<usize>() + 2);
    for (name, rows) in lists {
        text.push_str(name);
        for (place, row) in rows.into_iter().enumerate() {
            text.push_str(if place > 0 { "," } else { "" });
            text.push_str(row);
        }
    }
    text.push_str("]}");
    Some(text.into())
}
