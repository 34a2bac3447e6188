use std::fs;
use std::future::Future as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::{Context as TaskContext, Poll, Waker};
use std::thread;
use std::time::Duration;

use proptest::prelude::*;
use tidewire_pool::{Context, DeadLetterReason, Message, Overflow, Placement, Pool, Retry, SubmitError};
use tidewire_testkit::{PATIENCE, wait_until};

use crate::gate::Gate;

const PLACEMENTS: [Placement; 2] = [Placement::Moving, Placement::Pinned];

#[test]
fn drain_handles_all_messages_and_follow_ups() {
    for placement in PLACEMENTS {
        // Each message submits one follow-up with its own key and one with the next key, until its count is zero.
        let handler = |message: &mut Message<u32>, context: &mut Context<'_, u32>| {
            if let Some(less) = message.payload.checked_sub(1) {
                context.submit(Message::new(message.key, less)).map_err(|error| error.to_string())?;
                context.submit(Message::new(message.key.0 + 1, less)).map_err(|error| error.to_string())?;
            }
            Ok::<(), String>(())
        };
        let pool = Pool::builder().workers(3).placement(placement).start(handler).unwrap();
        pool.submit(Message::new(1, 10)).unwrap();
        let shutdown = pool.drain(PATIENCE);
        assert_eq!((shutdown.returned.len(), shutdown.running), (0, 0));
        assert_eq!(pool.stats().handled, (1 << 11) - 1);
        assert_eq!(pool.stats().failed, 0);
        let late = pool.submit(Message::new(1, 7)).unwrap_err();
        assert!(matches!(late, SubmitError::Closed(message) if message.payload == 7));
    }
}

#[test]
fn drain_returns_remaining_messages_after_the_timeout() {
    let gate = Gate::closed();
    let pool = Pool::builder().workers(1).start(gate.clone()).unwrap();
    for number in 0..10 {
        pool.submit(Message::new(number % 3, number)).unwrap();
    }
    wait_until("the worker is blocked", PATIENCE, || gate.inside() == 1);
    let shutdown = pool.drain(Duration::ZERO);
    assert_eq!(shutdown.running, 1);
    let mut returned: Vec<u64> = shutdown.returned.into_iter().map(|message| message.payload).collect();
    returned.sort_unstable();
    assert_eq!(returned, (1..10).collect::<Vec<_>>());
    gate.open();
    wait_until("the running message is handled", PATIENCE, || pool.stats().handled == 1);
    assert_eq!(pool.stats().returned, 9);
}

#[test]
fn shutdown_wakes_blocked_submitters() {
    let gate = Gate::closed();
    let pool = Pool::builder().workers(1).messages(1).overflow(Overflow::Wait).start(gate.clone()).unwrap();
    pool.submit(Message::new(1, 1)).unwrap();
    thread::scope(|scope| {
        let blocked = scope.spawn(|| pool.submit(Message::new(1, 2)));
        let shutdown = pool.abort();
        assert!(shutdown.returned.len() + shutdown.running == 1);
        assert!(matches!(blocked.join().unwrap(), Err(SubmitError::Closed(message)) if message.payload == 2));
        gate.open();
    });
}

/// The budget of a handler that does not return is not released, so submitters must not wait for it.
#[test]
fn shutdown_wakes_waiting_submissions_of_a_full_pool() {
    for key_bound in [false, true] {
        let gate = Gate::closed();
        let builder = Pool::builder().workers(1).overflow(Overflow::Wait);
        let builder = if key_bound { builder.key_messages(1) } else { builder.messages(1) };
        let pool = builder.start(gate.clone()).unwrap();
        pool.submit(Message::new(1, 1)).unwrap();
        wait_until("the worker is blocked", PATIENCE, || gate.inside() == 1);
        let mut context = TaskContext::from_waker(Waker::noop());
        let mut early = Box::pin(pool.submit_async(Message::new(1, 2)));
        assert!(early.as_mut().poll(&mut context).is_pending());
        assert_eq!(pool.abort().running, 1);
        let mut late = Box::pin(pool.submit_async(Message::new(1, 3)));
        for submission in [&mut early, &mut late] {
            let ended = submission.as_mut().poll(&mut context);
            assert!(matches!(ended, Poll::Ready(Err(SubmitError::Closed(_)))));
        }
        gate.open();
    }
}

#[test]
fn submission_after_shutdown_drops_no_message() {
    let gate = Gate::closed();
    let handler = {
        let gate = gate.clone();
        move |message: &mut Message<String>, context: &mut Context<'_, String>| match message.key.0 {
            0 => tidewire_pool::Handler::handle(&gate, message, context),
            _ => Ok(()),
        }
    };
    let builder = Pool::builder().workers(2).placement(Placement::Pinned).overflow(Overflow::DropOldest);
    let pool = builder.bytes(10).size(String::len).start(handler).unwrap();
    for text in ["a", "bcdefg"] {
        pool.submit(Message::new(0, text.to_owned())).unwrap();
    }
    wait_until("a worker is blocked", PATIENCE, || gate.inside() == 1);
    thread::scope(|scope| {
        scope.spawn(|| pool.drain(PATIENCE));
        // There is budget for these messages, and not for the last one.
        wait_until("the pool drains", PATIENCE, || {
            pool.depth() == 2 && pool.submit(Message::new(1, "x".to_owned())).is_err()
        });
        let late = pool.submit(Message::new(0, "12345".to_owned())).unwrap_err();
        assert!(matches!(late, SubmitError::Closed(_)));
        gate.open();
    });
    assert_eq!(gate.handled(), ["a", "bcdefg"]);
}

/// The follow-up has taken over the budget of the handler and has ended, but the handler is still running. The pool is not empty then.
#[test]
fn drain_waits_for_a_handler_whose_follow_up_has_ended() {
    for placement in PLACEMENTS {
        let gate = Gate::<()>::closed();
        let handler = {
            let gate = gate.clone();
            move |message: &mut Message<u32>, context: &mut Context<'_, u32>| {
                if message.payload == 1 {
                    context.submit(Message::new(1, 2)).map_err(|error| error.to_string())?;
                    gate.pass();
                    context.submit(Message::new(1, 3)).map_err(|error| error.to_string())?;
                }
                Ok::<(), String>(())
            }
        };
        let pool = Pool::builder().workers(2).placement(placement).start(handler).unwrap();
        pool.submit(Message::new(0, 1)).unwrap();
        wait_until("the follow-up has ended", PATIENCE, || pool.stats().handled == 1 && pool.depth() == 0);
        thread::scope(|scope| {
            let drain = scope.spawn(|| pool.drain(PATIENCE));
            wait_until("the pool drains", PATIENCE, || pool.submit(Message::new(1, 4)).is_err());
            gate.open();
            assert_eq!(drain.join().unwrap().running, 0);
        });
        assert_eq!((pool.stats().failed, pool.stats().returned), (0, 0));
    }
}

#[test]
fn running_counts_workers_in_a_handler() {
    for placement in PLACEMENTS {
        let gate = Gate::<()>::closed();
        let handler = {
            let gate = gate.clone();
            move |message: &mut Message<u32>, context: &mut Context<'_, u32>| {
                if message.payload == 1 {
                    // The count is of handlers, not of budget: the follow-up takes over the budget of this message.
                    context.submit(Message::new(1, 0)).map_err(|error| error.to_string())?;
                    gate.pass();
                }
                Ok::<(), String>(())
            }
        };
        for quick in [0, 100] {
            let pool = Pool::builder().workers(2).placement(placement).start(handler.clone()).unwrap();
            for _ in 0..quick {
                pool.submit(Message::new(0, 0)).unwrap();
            }
            pool.submit(Message::new(0, 1)).unwrap();
            wait_until("the handler is blocked", PATIENCE, || gate.inside() == 1 && pool.stats().handled == quick + 1);
            let (sender, receiver) = std::sync::mpsc::channel();
            thread::scope(|scope| {
                scope.spawn(|| sender.send(pool.abort().running).unwrap());
                let running = receiver.recv_timeout(PATIENCE / 6);
                gate.open();
                assert_eq!(running, Ok(1), "abort does not wait for handlers");
            });
            wait_until("the handler has returned", PATIENCE, || pool.stats().handled == quick + 2);
            gate.close();
        }
    }
}

#[test]
fn retry_after_shutdown_is_a_dead_letter() {
    let gate = Gate::<()>::closed();
    let handler = {
        let gate = gate.clone();
        move |_: &mut Message<u32>, _: &mut Context<'_, u32>| {
            gate.pass();
            Err::<(), _>("again")
        }
    };
    let pool = Pool::builder().workers(1).retry(Retry::new(9)).start(handler).unwrap();
    pool.submit(Message::new(1, 1)).unwrap();
    wait_until("the message is being handled", PATIENCE, || gate.inside() == 1);
    assert_eq!(pool.abort().running, 1);
    gate.open();
    wait_until("the message is a dead letter", PATIENCE, || pool.dead_letters().len() == 1);
    assert_eq!(pool.dead_letters().take(1)[0].reason, DeadLetterReason::ShutDown);
    assert_eq!((pool.stats().dead_lettered, pool.stats().returned), (1, 0));
}

#[test]
fn messages_waiting_for_a_retry_are_returned() {
    let handler = |_: &mut Message<u32>, _: &mut Context<'_, u32>| Err::<(), _>("again");
    let retry = Retry::new(2).first_pause(Duration::from_hours(1)).longest_pause(Duration::from_hours(1));
    for placement in PLACEMENTS {
        let pool = Pool::builder().workers(2).placement(placement).retry(retry).start(handler).unwrap();
        for number in 0..3 {
            pool.submit(Message::new(1, number)).unwrap();
        }
        wait_until("the first message has failed", PATIENCE, || pool.stats().retried == 1);
        wait_until("the key is delayed", PATIENCE, || pool.stats().failed == 1 && pool.depth() == 3);
        let returned: Vec<u32> = pool.drain(Duration::ZERO).returned.iter().map(|message| message.payload).collect();
        // If the pool closes before the worker has put the message back, it becomes a dead letter.
        let dead = usize::try_from(pool.stats().dead_lettered).unwrap();
        assert_eq!(returned, [0, 1, 2][dead..]);
    }
}

#[test]
fn dropping_a_pool_joins_its_threads() {
    let handled = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&handled);
    let handler = move |_: &mut Message<()>, _: &mut Context<'_, ()>| {
        count.fetch_add(1, Ordering::SeqCst);
        Ok::<(), String>(())
    };
    let pool = Pool::builder().workers(4).start(handler).unwrap();
    pool.submit(Message::new(1, ())).unwrap();
    drop(pool);
    assert_eq!(Arc::strong_count(&handled), 1, "the handler was dropped, so all threads have ended");
}

/// A pool that its handler owns may be dropped by one of its workers, which must not wait for itself.
#[test]
fn handler_may_drop_its_pool() {
    type PoolReceiver = std::sync::mpsc::Receiver<Pool<()>>;
    let gate = Gate::<()>::closed();
    let (pool_sender, pool_receiver) = std::sync::mpsc::channel();
    let pool_receiver: std::sync::Mutex<PoolReceiver> = std::sync::Mutex::new(pool_receiver);
    let (sender, dropped) = std::sync::mpsc::channel();
    let handler = {
        let gate = gate.clone();
        move |_: &mut Message<()>, _: &mut Context<'_, ()>| {
            gate.pass();
            drop(pool_receiver.lock().unwrap().recv().unwrap());
            sender.send(()).unwrap();
            Ok::<(), String>(())
        }
    };
    let pool = Pool::builder().workers(2).start(handler).unwrap();
    pool.submit(Message::new(1, ())).unwrap();
    pool_sender.send(pool).unwrap();
    gate.open();
    dropped.recv_timeout(PATIENCE).expect("the handler did not wait for itself");
}

#[test]
fn repeated_starts_leak_no_threads() {
    let pool_threads = || {
        let tasks = fs::read_dir("/proc/self/task").unwrap();
        let names = tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("comm")).ok());
        names.filter(|name| name.starts_with("leak-test")).count()
    };
    for round in 0..3000_u64 {
        let handler = |_: &mut Message<u64>, _: &mut Context<'_, u64>| Ok::<(), String>(());
        let placement = PLACEMENTS[usize::try_from(round % 2).unwrap()];
        let pool = Pool::builder().workers(2).placement(placement).name("leak-test").start(handler).unwrap();
        pool.submit(Message::new(round, round)).unwrap();
        match round % 3 {
            0 => drop(pool),
            1 => assert_eq!(pool.drain(PATIENCE).running, 0),
            _ => drop(pool.abort()),
        }
    }
    wait_until("no thread is left", PATIENCE, || pool_threads() == 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// Threads submit while the pool is shut down; handlers succeed, fail, panic and submit follow-ups. Every accepted message must end
    /// exactly once, and no rejected message may be handled.
    #[test]
    fn every_accepted_message_ends_once(
        pinned in any::<bool>(),
        workers in 1..4_usize,
        bound in 1..40_usize,
        policy in 0..4_u8,
        retries in any::<bool>(),
        drains in any::<bool>(),
        messages in 1..120_u64,
    ) {
        let accepted = Arc::new(AtomicU64::new(0));
        let follow_ups = Arc::clone(&accepted);
        let handler = move |message: &mut Message<u64>, context: &mut Context<'_, u64>| {
            match message.payload % 7 {
                0 => panic!("injected panic"),
                1 => return Err("injected error"),
                2 => for key in 0..3 {
                    if context.submit(Message::new(key, 3)).is_ok() {
                        follow_ups.fetch_add(1, Ordering::SeqCst);
                    }
                },
                _ => {}
            }
            Ok(())
        };
        let overflow = match policy {
            0 => Overflow::Reject,
            1 => Overflow::Wait,
            2 => Overflow::DropOldest,
            _ => Overflow::Coalesce(Arc::new(|queued: &mut u64, new| *queued = new)),
        };
        let builder = Pool::builder()
            .workers(workers)
            .placement(PLACEMENTS[usize::from(pinned)])
            .messages(bound)
            .overflow(overflow)
            .dead_letters(5);
        let pause = Duration::from_micros(100);
        let builder = if retries { builder.retry(Retry::new(2).first_pause(pause).longest_pause(pause)) } else { builder };
        let pool = builder.start(handler).unwrap();

        let attempts = AtomicU64::new(0);
        let returned = thread::scope(|scope| {
            for thread in 0..3 {
                let (pool, accepted, attempts) = (&pool, &accepted, &attempts);
                scope.spawn(move || for number in 0..messages {
                    attempts.fetch_add(1, Ordering::SeqCst);
                    let message = Message::new(number % 5, number + thread);
                    match pool.submit(message) {
                        Ok(tidewire_pool::Submitted::Merged) => {}
                        Ok(_) => _ = accepted.fetch_add(1, Ordering::SeqCst),
                        Err(error) => assert_eq!(error.into_message().payload, number + thread),
                    }
                });
            }
            wait_until("a third of the messages were submitted", PATIENCE, || attempts.load(Ordering::SeqCst) >= messages);
            let shutdown = if drains { pool.drain(PATIENCE) } else { pool.abort() };
            shutdown.returned.len() as u64
        });
        wait_until("every accepted message has ended", PATIENCE, || {
            let stats = pool.stats();
            stats.submitted == stats.handled + stats.dead_lettered + stats.returned
        });
        let stats = pool.stats();
        prop_assert_eq!(stats.submitted, accepted.load(Ordering::SeqCst));
        prop_assert_eq!(stats.returned, returned);
        prop_assert!(!drains || returned == 0);
        wait_until("all budget was returned", PATIENCE, || (pool.depth(), pool.bytes()) == (0, 0));
    }
}
