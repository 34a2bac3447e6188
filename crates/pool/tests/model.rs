//! The pool under a model checker: every interleaving of a few threads, up to a number of preemptions.
//!
//! `make model`
#![cfg(loom)]

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use loom::model::Builder;
use loom::sync::Mutex;
use loom::thread;
use tidewire_pool::{Context, Handler, Message, Overflow, Placement, Pool};

/// Explores; `preemptions` keeps it within minutes.
fn explore(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 100_000;
    builder.check(model);
}

/// A handler that remembers what it saw.
fn log() -> (Arc<Mutex<Vec<u32>>>, impl Handler<u32>) {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&seen);
    let handler = move |message: &mut Message<u32>, _: &mut Context<'_, u32>| {
        log.lock().unwrap().push(message.payload);
        Ok::<(), Infallible>(())
    };
    (seen, handler)
}

const FOREVER: Duration = Duration::MAX;

/// Parking: a message is never left to a sleeping worker. Draining would never return.
#[test]
fn no_wake_up_is_lost() {
    for placement in [Placement::Moving, Placement::Pinned] {
        explore(2, move || {
            let (seen, handler) = log();
            let pool = Arc::new(Pool::builder().workers(1).placement(placement).start(handler).unwrap());
            let other = Arc::clone(&pool);
            let submitter = thread::spawn(move || other.submit(Message::new(1, 1)).unwrap());
            pool.submit(Message::new(1, 2)).unwrap();
            submitter.join().unwrap();
            assert_eq!(pool.drain(FOREVER).returned.len(), 0);
            let mut seen = seen.lock().unwrap().clone();
            seen.sort_unstable();
            assert_eq!(seen, [1, 2]);
        });
    }
}

/// The queue: two workers that take from each other keep the order of a key.
#[test]
fn order_is_kept_when_keys_move() {
    explore(2, || {
        let (seen, handler) = log();
        let pool = Pool::builder().workers(2).start(handler).unwrap();
        for number in 0..2 {
            pool.submit(Message::new(1, number)).unwrap();
        }
        assert_eq!(pool.drain(FOREVER).returned.len(), 0);
        assert_eq!(*seen.lock().unwrap(), [0, 1]);
    });
}

/// The bound: a submitter that waits for room is woken when there is some.
#[test]
fn a_waiting_submitter_is_woken() {
    explore(2, || {
        let (seen, handler) = log();
        let pool = Pool::builder().workers(1).messages(1).overflow(Overflow::Wait).start(handler).unwrap();
        for number in 0..2 {
            pool.submit(Message::new(1, number)).unwrap();
        }
        pool.drain(FOREVER);
        assert_eq!(*seen.lock().unwrap(), [0, 1]);
    });
}

/// Shutdown: whatever is accepted while the pool closes is handled or returned, once.
#[test]
fn a_shutdown_in_the_middle_loses_nothing() {
    explore(2, || {
        let (seen, handler) = log();
        let pool = Arc::new(Pool::builder().workers(1).start(handler).unwrap());
        let other = Arc::clone(&pool);
        let submitter = thread::spawn(move || other.submit(Message::new(1, 1)).is_ok());
        let returned = pool.abort().returned.len();
        let accepted = submitter.join().unwrap();
        drop(pool);
        assert_eq!(seen.lock().unwrap().len() + returned, usize::from(accepted));
    });
}
