//! The write queue: fairness between owners, limits, and the size of groups.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::json;
use tidewire_store::{Cause, Pending, Query, Store, StoreOptions, WriteOptions};

use super::writes::block_writer;
use super::{ids, open, options, plain};

/// Records the order in which writes run.
#[derive(Clone, Default)]
struct Order(Arc<Mutex<Vec<String>>>);

impl Order {
    fn write(&self, store: &Store, owner: u64, bytes: usize, name: impl Into<String>) -> Pending<()> {
        let (order, name) = (self.clone(), name.into());
        store.write_with(WriteOptions::default().owner(owner).bytes(bytes), move |_| {
            order.0.lock().unwrap().push(name);
            Ok(())
        })
    }

    /// Submits several writes of an owner, named by the owner and their number.
    fn write_many(&self, store: &Store, owner: u64, count: usize) -> Vec<Pending<()>> {
        (1..=count).map(|number| self.write(store, owner, 0, format!("{owner}.{number}"))).collect()
    }

    fn get(&self) -> Vec<String> {
        self.0.lock().unwrap().clone()
    }
}

fn memory(queue: usize, queue_bytes: usize) -> Store {
    Store::memory(StoreOptions::default().queue(queue).queue_bytes(queue_bytes))
}

#[test]
fn owners_are_served_round_robin() {
    let (store, order) = (Store::memory(options()), Order::default());
    let release = block_writer(&store);
    let mut pending = order.write_many(&store, 1, 5);
    pending.extend(order.write_many(&store, 2, 1));
    pending.extend(order.write_many(&store, 3, 2));
    release.send(()).unwrap();
    for pending in pending {
        pending.wait().unwrap();
    }
    assert_eq!(order.get(), ["1.1", "2.1", "3.1", "1.2", "3.2", "1.3", "1.4", "1.5"]);
}

#[test]
fn origins_of_an_owner_are_served_round_robin() {
    let (store, order) = (Store::memory(options()), Order::default());
    let release = block_writer(&store);
    let write = |origin: u64, number: usize| {
        let (order, options) = (order.clone(), WriteOptions::default().owner(1).cause(Cause::of(origin)));
        store.write_with(options, move |_| {
            order.0.lock().unwrap().push(format!("{origin}.{number}"));
            Ok(())
        })
    };
    let mut pending: Vec<_> = (1..=3).map(|number| write(7, number)).collect();
    pending.push(write(8, 1));
    release.send(()).unwrap();
    for pending in pending {
        pending.wait().unwrap();
    }
    assert_eq!(order.get(), ["7.1", "8.1", "7.2", "7.3"]);
}

#[test]
fn owner_of_costly_writes_is_served_less_often() {
    let (store, order) = (Store::memory(options()), Order::default());
    store.define_bucket("b", plain()).wait().unwrap();
    store.insert_many("b", (0..1000).map(|id| json!({"id": id}))).wait().unwrap();
    let release = block_writer(&store);
    let costly = |number: usize| {
        let (order, filter) = (order.clone(), json!({"bucket": "b", "filter": {"n": 1}}));
        store.write_with(WriteOptions::default().owner(1), move |draft| {
            order.0.lock().unwrap().push(format!("costly {number}"));
            draft.count(&Query::parse(&filter).unwrap()).map(drop)
        })
    };
    let mut pending: Vec<_> = (1..=3).map(costly).collect();
    pending.extend(order.write_many(&store, 2, 5));
    release.send(()).unwrap();
    for pending in pending {
        pending.wait().unwrap();
    }
    assert_eq!(order.get(), ["costly 1", "2.1", "2.2", "2.3", "2.4", "2.5", "costly 2", "costly 3"]);
}

#[test]
fn one_owner_cannot_fill_the_queue() {
    let (store, order) = (memory(16, usize::MAX), Order::default());
    let release = block_writer(&store);
    let mut pending = order.write_many(&store, 1, 20);
    assert_eq!(pending.iter().filter(|pending| pending.is_held_back()).count(), 16);
    assert_eq!(store.stats().waiting, 4);
    let others = order.write_many(&store, 2, 3);
    assert!(others.iter().all(|pending| !pending.is_held_back()));
    assert_eq!(store.stats().waiting, 7);
    pending.extend(others);
    release.send(()).unwrap();
    for pending in pending {
        pending.wait().unwrap();
    }
    let order = order.get();
    assert_eq!(order[..6], ["1.1", "2.1", "1.2", "2.2", "1.3", "2.3"]);
    let of_first: Vec<&String> = order.iter().filter(|name| name.starts_with("1.")).collect();
    assert_eq!(of_first, (1..=20).map(|number| format!("1.{number}")).collect::<Vec<_>>().iter().collect::<Vec<_>>());
}

#[test]
fn full_queue_admits_owners_round_robin() {
    let (store, order) = (memory(8, usize::MAX), Order::default());
    let release = block_writer(&store);
    let mut pending: Vec<_> = (1..=4).flat_map(|owner| order.write_many(&store, owner, 20)).collect();
    assert_eq!(store.stats().waiting, 8);
    pending.extend(order.write_many(&store, 5, 1));
    assert!(pending.last().unwrap().is_held_back());
    release.send(()).unwrap();
    for pending in pending {
        pending.wait().unwrap();
    }
    assert_eq!(
        order.get()[..6],
        ["1.1", "2.1", "3.1", "4.1", "5.1", "1.2"],
        "the write is queued when the first one is taken"
    );
}

#[test]
fn queue_is_limited_in_bytes() {
    let (store, order) = (memory(1000, 4000), Order::default());
    let release = block_writer(&store);
    let mut pending: Vec<_> = (1..=5).map(|number| order.write(&store, 1, 300, format!("1.{number}"))).collect();
    assert_eq!((store.stats().waiting, store.stats().queued_bytes), (3, 900));
    pending.push(order.write(&store, 2, 300, "2.1"));
    assert_eq!((store.stats().waiting, store.stats().queued_bytes), (4, 1200));
    // A write that is larger than the share of its owner is queued alone.
    pending.push(order.write(&store, 3, 5000, "3.1"));
    pending.push(order.write(&store, 3, 1, "3.2"));
    assert_eq!((store.stats().waiting, store.stats().queued_bytes), (5, 6200));
    pending.push(order.write(&store, 4, 900, "4.1"));
    pending.push(order.write(&store, 5, 300, "5.1"));
    assert_eq!((store.stats().waiting, store.stats().queued_bytes), (7, 7400));
    // The owner of the next write has no queued write, but the queue is full.
    pending.push(order.write(&store, 6, 900, "6.1"));
    assert!(pending.last().unwrap().is_held_back());
    release.send(()).unwrap();
    for pending in pending {
        pending.wait().unwrap();
    }
    assert_eq!(order.get(), ["1.1", "2.1", "3.1", "4.1", "5.1", "6.1", "1.2", "3.2", "1.3", "1.4", "1.5"]);
    assert_eq!((store.stats().waiting, store.stats().queued_bytes), (0, 0));
}

#[test]
fn held_back_write_is_queued_without_being_polled() {
    let store = memory(4, usize::MAX);
    store.define_bucket("b", plain()).wait().unwrap();
    let release = block_writer(&store);
    let mut pending: Vec<_> = (0..10).map(|id| store.insert("b", json!({"id": id}))).collect();
    release.send(()).unwrap();
    pending.pop().unwrap().wait().unwrap();
    assert_eq!(ids(&store, "b"), (0..10).collect::<Vec<_>>());
}

#[test]
fn dropped_held_back_write_is_canceled() {
    let (store, order) = (memory(4, usize::MAX), Order::default());
    let release = block_writer(&store);
    let mut pending = order.write_many(&store, 1, 5);
    drop(pending.remove(1));
    drop(pending.remove(2));
    // A queued write runs even if it is dropped.
    drop(pending.remove(0));
    assert_eq!(store.stats().abandoned, 2);
    release.send(()).unwrap();
    for pending in pending {
        pending.wait().unwrap();
    }
    assert_eq!(order.get(), ["1.1", "1.3", "1.5"]);
}

#[test]
fn checkpoint_runs_after_earlier_writes_of_the_program() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    store.define_bucket("b", plain()).wait().unwrap();
    let release = block_writer(&store);
    let pending: Vec<_> = (0..3).map(|id| store.insert("b", json!({"id": id}))).collect();
    let before = store.snapshot().position.sequence;
    let checkpoint = std::thread::scope(|scope| {
        let checkpoint = scope.spawn(|| store.checkpoint().unwrap());
        tidewire_testkit::wait_until("the checkpoint waits", tidewire_testkit::PATIENCE, || store.stats().waiting == 4);
        release.send(()).unwrap();
        checkpoint.join().unwrap()
    });
    assert_eq!(checkpoint.sequence, before + 3);
    for pending in pending {
        pending.wait().unwrap();
    }
}

/// Returns the number of groups in which these writes are committed if all of them are queued.
fn groups(count: usize, write: impl Fn(&Store, usize) -> Pending<()>) -> u64 {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    store.define_bucket("b", plain()).wait().unwrap();
    let before = store.stats().engine.groups;
    let release = block_writer(&store);
    let pending: Vec<_> = (0..count).map(|id| write(&store, id)).collect();
    release.send(()).unwrap();
    for pending in pending {
        pending.wait().unwrap();
    }
    store.stats().engine.groups - before
}

#[test]
fn group_is_limited_in_bytes_and_time() {
    let insert = |store: &Store, id: usize, len: usize| {
        store.write(move |draft| draft.insert("b", json!({"id": id, "text": "x".repeat(len)})).map(drop))
    };
    let of_large = groups(8, |store, id| insert(store, id, 600_000));
    assert!(of_large >= 4, "{of_large} groups");
    let of_slow = groups(4, |store, id| {
        store.write(move |draft| {
            let start = Instant::now();
            while start.elapsed() < Duration::from_millis(20) {
                std::thread::yield_now();
            }
            draft.insert("b", json!({"id": id})).map(drop)
        })
    });
    assert_eq!(of_slow, 4);
}
