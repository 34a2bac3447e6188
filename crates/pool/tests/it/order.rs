use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use proptest::prelude::*;
use tidewire_pool::{Context, Key, Message, Overflow, Placement, Pool};
use tidewire_testkit::{PATIENCE, wait_until};

use crate::gate::Gate;

/// The numbers of the submitting thread and of its message.
type Numbered = (usize, u32);

/// Checks that messages of a key are handled one at a time, and those of one thread in the order of submission. Eight threads submit to a
/// few keys, and the handler takes random times.
fn check_order(placement: Placement, workers: usize, keys: u64, messages: u32, spins: Vec<u32>) {
    let seen: Arc<Mutex<BTreeMap<Key, Vec<Numbered>>>> = Arc::default();
    let busy: Arc<Vec<AtomicBool>> = Arc::new((0..keys).map(|_| AtomicBool::new(false)).collect());
    let handler = {
        let (seen, busy) = (Arc::clone(&seen), Arc::clone(&busy));
        move |message: &mut Message<Numbered>, _: &mut Context<'_, Numbered>| {
            let key = usize::try_from(message.key.0).unwrap();
            assert!(!busy[key].swap(true, Ordering::SeqCst), "two messages of a key at once");
            for _ in 0..spins[message.payload.1 as usize % spins.len()] {
                std::hint::spin_loop();
            }
            seen.lock().unwrap().entry(message.key).or_default().push(message.payload);
            busy[key].store(false, Ordering::SeqCst);
            Ok::<(), Infallible>(())
        }
    };
    let pool = Pool::builder().workers(workers).placement(placement).messages(64).overflow(Overflow::Wait);
    let pool = pool.start(handler).unwrap();
    thread::scope(|scope| {
        for thread in 0..8 {
            let pool = &pool;
            scope.spawn(move || {
                for number in 0..messages {
                    let key = u64::from(number).wrapping_mul(31) % keys;
                    pool.submit(Message::new(key, (thread, number))).unwrap();
                }
            });
        }
    });
    assert!(pool.drain(PATIENCE).returned.is_empty());
    assert_eq!(pool.stats().handled, u64::from(messages) * 8);
    assert_eq!(pool.stats().panicked, 0);
    for (key, seen) in &*seen.lock().unwrap() {
        for thread in 0..8 {
            let own: Vec<u32> = seen.iter().filter(|(by, _)| *by == thread).map(|(_, number)| *number).collect();
            assert!(own.is_sorted(), "{key:?} saw {own:?}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn messages_of_a_key_are_handled_in_order_with_eight_threads(
        pinned in any::<bool>(),
        workers in 1..5_usize,
        keys in 1..12_u64,
        messages in 1..200_u32,
        spins in prop::collection::vec(0..2000_u32, 1..8),
    ) {
        let placement = if pinned { Placement::Pinned } else { Placement::Moving };
        check_order(placement, workers, keys, messages, spins);
    }
}

#[test]
fn pinned_key_stays_on_its_thread() {
    let gate = Gate::opened();
    let pool = Pool::builder().workers(4).placement(Placement::Pinned).start(gate.clone()).unwrap();
    for number in 0..100 {
        pool.submit(Message::new(42, number)).unwrap();
    }
    pool.drain(PATIENCE);
    assert_eq!(gate.handled(), (0..100).collect::<Vec<_>>());
    assert_eq!(gate.threads(), 1);
}

/// Starts a pool in which key 0 is blocked in the handler. Keys 0, 2, 4… have the same home shard.
fn neighbours_of_a_stuck_key(placement: Placement) -> (Pool<u64>, Gate<u64>, Arc<AtomicUsize>) {
    let blocked = Gate::closed();
    let others = Arc::new(AtomicUsize::new(0));
    let handler = {
        let (blocked, others) = (blocked.clone(), Arc::clone(&others));
        move |message: &mut Message<u64>, context: &mut Context<'_, u64>| {
            if message.key == Key(0) {
                return tidewire_pool::Handler::handle(&blocked, message, context);
            }
            others.fetch_add(1, Ordering::SeqCst);
            Ok(())
        }
    };
    let pool = Pool::builder().workers(2).placement(placement).start(handler).unwrap();
    for number in 0..50 {
        pool.submit(Message::new(0, number)).unwrap();
        pool.submit(Message::new(2 + 2 * number, number)).unwrap();
    }
    (pool, blocked, others)
}

#[test]
fn stuck_key_does_not_delay_others_if_keys_move() {
    let (pool, blocked, others) = neighbours_of_a_stuck_key(Placement::Moving);
    wait_until("all other keys are handled", PATIENCE, || others.load(Ordering::SeqCst) == 50);
    assert!(blocked.handled().is_empty());
    blocked.open();
    pool.drain(PATIENCE);
    assert_eq!(blocked.handled(), (0..50).collect::<Vec<_>>());
}

#[test]
fn pinned_keys_wait_for_a_stuck_key() {
    let (pool, blocked, others) = neighbours_of_a_stuck_key(Placement::Pinned);
    wait_until("key 0 is in its handler", PATIENCE, || blocked.inside() == 1);
    assert!(others.load(Ordering::SeqCst) < 50, "the other keys share its thread");
    blocked.open();
    pool.drain(PATIENCE);
    assert_eq!(others.load(Ordering::SeqCst), 50);
}

/// Three of four workers are blocked, so the last one must handle the messages of all shards.
#[test]
fn single_free_worker_handles_all_shards() {
    let blocked = Gate::closed();
    let handled = Arc::new(AtomicUsize::new(0));
    let handler = {
        let (blocked, handled) = (blocked.clone(), Arc::clone(&handled));
        move |message: &mut Message<u64>, context: &mut Context<'_, u64>| {
            if message.payload == 0 {
                return tidewire_pool::Handler::handle(&blocked, message, context);
            }
            handled.fetch_add(1, Ordering::SeqCst);
            Ok(())
        }
    };
    let pool = Pool::builder().workers(4).start(handler).unwrap();
    for key in 0..3 {
        pool.submit(Message::new(key, 0)).unwrap();
    }
    wait_until("three workers are blocked", PATIENCE, || blocked.inside() == 3);
    for number in 1..=400 {
        pool.submit(Message::new(100 + number, number)).unwrap();
        // One at a time, so that each message must wake the sleeping worker.
        wait_until("the message is handled", PATIENCE, || handled.load(Ordering::SeqCst) as u64 == number);
    }
    blocked.open();
    pool.drain(PATIENCE);
}

#[test]
fn hot_key_does_not_starve_new_keys() {
    let gate = Gate::opened();
    let mut pool = Pool::builder().workers(1).simulate(0, gate.clone()).unwrap();
    for number in 0..1000 {
        pool.submit(Message::new(7, (7, number))).unwrap();
    }
    pool.step();
    pool.submit(Message::new(8, (8, 0))).unwrap();
    pool.run(usize::MAX);
    let position = gate.handled().iter().position(|(key, _)| *key == 8).unwrap();
    assert!(position < 500, "key 8 was handled at position {position}");
}
