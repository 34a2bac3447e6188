use std::future::Future as _;
use std::sync::Arc;
use std::task::{Context as TaskContext, Waker};
use std::thread;

use tidewire_pool::{
    Builder, Context, DeadLetterReason, Key, Message, Overflow, Placement, Pool, SubmitError, Submitted,
};
use tidewire_testkit::{PATIENCE, wait_until};

use crate::gate::Gate;

/// Starts a pool whose only worker is blocked in the handler, with a message of key 0.
fn blocked_pool(builder: Builder<String>) -> (Pool<String>, Gate<String>) {
    let gate = Gate::closed();
    let pool = builder.workers(1).size(String::len).start(gate.clone()).unwrap();
    pool.submit(Message::new(0, "first".into())).unwrap();
    wait_until("the worker is blocked", PATIENCE, || gate.inside() == 1);
    (pool, gate)
}

fn message(key: u64, text: &str) -> Message<String> {
    Message::new(key, text.to_owned())
}

/// Opens the gate and drains the pool. Returns the handled payloads.
fn drain(pool: &Pool<String>, gate: &Gate<String>) -> Vec<String> {
    gate.open();
    assert!(pool.drain(PATIENCE).returned.is_empty());
    assert_eq!((pool.depth(), pool.bytes()), (0, 0), "all budget has been returned");
    gate.handled()
}

#[test]
fn rejected_messages_are_returned() {
    for placement in [Placement::Moving, Placement::Pinned] {
        let (pool, gate) = blocked_pool(Pool::builder().messages(3).placement(placement));
        pool.submit(message(1, "second")).unwrap();
        pool.submit(message(2, "third")).unwrap();
        let error = pool.submit(message(3, "fourth")).unwrap_err();
        assert!(matches!(&error, SubmitError::Full(_)));
        assert_eq!(error.into_message().payload, "fourth");
        assert_eq!((pool.depth(), pool.bytes(), pool.stats().rejected), (3, 16, 1));
        assert_eq!(drain(&pool, &gate), ["first", "second", "third"]);
    }
}

#[test]
fn bytes_are_bounded_and_counted_exactly() {
    let (pool, gate) = blocked_pool(Pool::builder().bytes(10));
    pool.submit(message(1, "12345")).unwrap();
    assert_eq!(pool.bytes(), 10);
    assert!(matches!(pool.submit(message(1, "x")), Err(SubmitError::Full(_))));
    assert_eq!(pool.submit(message(1, "")).unwrap(), Submitted::Queued);
    assert!(matches!(pool.submit(message(1, "12345678901")), Err(SubmitError::TooLarge(_))));
    assert_eq!(pool.bytes(), 10);
    assert_eq!(drain(&pool, &gate), ["first", "12345", ""]);
}

#[test]
fn keys_have_their_own_bounds() {
    let (pool, gate) = blocked_pool(Pool::builder().key_messages(2).key_bytes(12));
    pool.submit(message(0, "second")).unwrap();
    assert!(matches!(pool.submit(message(0, "x")), Err(SubmitError::Full(_))), "the message being handled counts");
    pool.submit(message(1, "1234567890")).unwrap();
    assert!(matches!(pool.submit(message(1, "123")), Err(SubmitError::Full(_))));
    assert!(matches!(pool.submit(message(1, "1234567890123")), Err(SubmitError::TooLarge(_))));
    pool.submit(message(1, "12")).unwrap();
    assert_eq!((pool.depth(), pool.bytes()), (4, 23), "rejected messages take no budget");
    assert_eq!(drain(&pool, &gate).len(), 4);
}

#[test]
fn waiting_submissions_continue_when_budget_is_returned() {
    for key_bound in [false, true] {
        let builder = Pool::builder().overflow(Overflow::Wait);
        let builder = if key_bound { builder.key_messages(2) } else { builder.messages(2) };
        let (pool, gate) = blocked_pool(builder);
        pool.submit(message(0, "second")).unwrap();
        assert!(matches!(pool.try_submit(message(0, "tried")), Err(SubmitError::Full(_))));
        thread::scope(|scope| {
            for number in 0..8 {
                let pool = &pool;
                scope.spawn(move || pool.submit(message(0, &number.to_string())).unwrap());
            }
            gate.open();
        });
        assert_eq!(drain(&pool, &gate).len(), 10);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_does_not_block_the_runtime() {
    let (pool, gate) = blocked_pool(Pool::builder().messages(1).overflow(Overflow::Wait));
    let pool = Arc::new(pool);
    let tasks: Vec<_> = (0..100)
        .map(|number| {
            let pool = Arc::clone(&pool);
            tokio::spawn(async move { pool.submit_async(message(number, "later")).await.unwrap() })
        })
        .collect();
    tokio::task::yield_now().await;
    gate.open();
    for task in tasks {
        assert_eq!(task.await.unwrap(), Submitted::Queued);
    }
    assert_eq!(drain(&pool, &gate).len(), 101);
}

/// The future may be dropped after it was woken.
#[test]
fn dropped_submission_wakes_the_next_waiter() {
    let (pool, gate) = blocked_pool(Pool::builder().messages(1).overflow(Overflow::Wait));
    let mut context = TaskContext::from_waker(Waker::noop());
    let mut waiting: Vec<_> = (0..3).map(|_| Box::pin(pool.submit_async(message(1, "abandoned")))).collect();
    for future in &mut waiting {
        assert!(future.as_mut().poll(&mut context).is_pending());
    }
    drop(waiting.remove(0));
    thread::scope(|scope| {
        let patient = scope.spawn(|| pool.submit(message(2, "patient")));
        gate.open();
        wait_until("budget was returned", PATIENCE, || pool.depth() == 0 || patient.is_finished());
        drop(waiting);
        assert_eq!(patient.join().unwrap().unwrap(), Submitted::Queued);
    });
    assert_eq!(drain(&pool, &gate), ["first", "patient"]);
}

#[test]
fn oldest_message_of_the_same_key_is_dropped_first() {
    let (pool, gate) = blocked_pool(Pool::builder().messages(4).overflow(Overflow::DropOldest));
    pool.submit(message(1, "old 1")).unwrap();
    pool.submit(message(2, "old 2")).unwrap();
    pool.submit(message(1, "new 1")).unwrap();
    assert_eq!(pool.submit(message(2, "new 2")).unwrap(), Submitted::Displacing(1));
    assert_eq!(
        pool.submit(message(3, "only 3")).unwrap(),
        Submitted::Displacing(1),
        "the oldest message of the key that has waited longest"
    );
    let dropped: Vec<_> = pool.dead_letters().take(9);
    assert!(dropped.iter().all(|letter| letter.reason == DeadLetterReason::Displaced && letter.attempts == 0));
    let dropped: Vec<_> = dropped.into_iter().map(|letter| letter.into_message().payload).collect();
    assert_eq!(dropped, ["old 2", "old 1"]);
    assert_eq!(pool.stats().displaced, 2);
    let mut handled = drain(&pool, &gate);
    handled.sort_unstable();
    assert_eq!(handled, ["first", "new 1", "new 2", "only 3"]);
}

#[test]
fn messages_with_other_home_workers_are_dropped() {
    let gate = Gate::closed();
    let builder = Pool::builder().workers(3).messages(4).overflow(Overflow::DropOldest);
    let pool = builder.start(gate.clone()).unwrap();
    for key in 0..3 {
        pool.submit(message(key, "blocked")).unwrap();
    }
    wait_until("all workers are blocked", PATIENCE, || gate.inside() == 3);
    pool.submit(message(3, "home of key 0")).unwrap();
    assert_eq!(pool.submit(message(4, "home of key 1")).unwrap(), Submitted::Displacing(1));
    assert_eq!(pool.dead_letters().take(1)[0].message.payload, "home of key 0");
    gate.open();
    assert!(pool.drain(PATIENCE).returned.is_empty());
}

#[test]
fn messages_are_dropped_until_enough_bytes_are_free() {
    let (pool, gate) = blocked_pool(Pool::builder().bytes(15).overflow(Overflow::DropOldest));
    for text in ["a", "bb", "ccc", "dddd"] {
        pool.submit(message(1, text)).unwrap();
    }
    assert_eq!(pool.submit(message(1, "12345678")).unwrap(), Submitted::Displacing(4));
    assert_eq!(pool.bytes(), 13);
    assert!(
        matches!(pool.submit(message(2, "12345678901")), Err(SubmitError::Full(_))),
        "a message being handled cannot be dropped"
    );
    assert_eq!(drain(&pool, &gate), ["first"]);
    assert_eq!(pool.stats().displaced, 5);
}

#[test]
fn full_key_drops_only_its_own_messages() {
    let (pool, gate) = blocked_pool(Pool::builder().key_messages(2).overflow(Overflow::DropOldest));
    pool.submit(message(1, "other key")).unwrap();
    for text in ["a", "b", "c"] {
        pool.submit(message(2, text)).unwrap();
    }
    let mut handled = drain(&pool, &gate);
    handled.sort_unstable();
    assert_eq!(handled, ["b", "c", "first", "other key"]);
}

fn coalesce() -> Overflow<String> {
    Overflow::Coalesce(Arc::new(|queued: &mut String, new: String| queued.push_str(&new)))
}

#[test]
fn messages_are_merged_into_the_newest_of_their_key() {
    let (pool, gate) = blocked_pool(Pool::builder().messages(3).overflow(coalesce()));
    pool.submit(message(1, "a")).unwrap();
    pool.submit(message(1, "b")).unwrap();
    assert_eq!(pool.submit(message(1, "c")).unwrap(), Submitted::Merged);
    assert!(matches!(pool.submit(message(2, "x")), Err(SubmitError::Full(_))), "nothing to merge with");
    assert_eq!((pool.depth(), pool.bytes(), pool.stats().merged), (3, 8, 1));
    assert_eq!(drain(&pool, &gate), ["first", "a", "bc"]);
}

#[test]
fn merging_respects_the_bound_on_bytes() {
    let (pool, gate) = blocked_pool(Pool::builder().messages(2).bytes(8).overflow(coalesce()));
    pool.submit(message(1, "a")).unwrap();
    pool.submit(message(1, "bb")).unwrap();
    assert_eq!(pool.bytes(), 8);
    assert!(matches!(pool.submit(message(1, "c")), Err(SubmitError::Full(_))));
    assert_eq!(drain(&pool, &gate), ["first", "abb"]);
}

#[test]
fn panic_while_merging_unwinds_to_the_submitter() {
    let panics = Overflow::Coalesce(Arc::new(|_: &mut String, _| panic!("cannot merge")));
    let (pool, gate) = blocked_pool(Pool::builder().messages(2).overflow(panics));
    pool.submit(message(1, "a")).unwrap();
    let merged = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| pool.submit(message(1, "b"))));
    assert!(merged.is_err());
    assert_eq!((pool.depth(), pool.bytes()), (2, 6));
    assert_eq!(drain(&pool, &gate), ["first", "a"]);
}

/// Submits three follow-ups in a handler of a full pool. Returns which of them were accepted.
fn follow_ups_on_a_full_pool(overflow: Overflow<u32>, key_bound: bool) -> (Pool<u32>, Vec<bool>) {
    let (sender, results) = std::sync::mpsc::channel();
    let gate = Gate::<()>::closed();
    let handler = {
        let gate = gate.clone();
        move |message: &mut Message<u32>, context: &mut Context<'_, u32>| {
            if message.payload == 1 {
                gate.pass();
                // The pool is full with this message and the queued one.
                for number in 10..13 {
                    let result = context.submit(Message::new(message.key, number));
                    if let Err(error) = &result {
                        assert!(matches!(error, SubmitError::Full(message) if message.payload == number));
                    }
                    sender.send(result.is_ok()).unwrap();
                }
            }
            Ok::<(), String>(())
        }
    };
    let builder = Pool::builder().workers(1).overflow(overflow);
    let builder = if key_bound { builder.key_messages(2) } else { builder.messages(2) };
    let pool = builder.start(handler).unwrap();
    pool.submit(Message::new(5, 1)).unwrap();
    wait_until("the message is being handled", PATIENCE, || gate.inside() == 1);
    pool.submit(Message::new(5, 2)).unwrap();
    gate.open();
    assert!(pool.drain(PATIENCE).returned.is_empty());
    (pool, results.try_iter().collect())
}

#[test]
fn follow_up_never_blocks_under_any_policy() {
    let policies: [fn() -> Overflow<u32>; 4] = [
        || Overflow::Reject,
        || Overflow::Wait,
        || Overflow::DropOldest,
        || Overflow::Coalesce(Arc::new(|queued: &mut u32, new| *queued = new)),
    ];
    for policy in policies {
        for key_bound in [false, true] {
            let (pool, accepted) = follow_ups_on_a_full_pool(policy(), key_bound);
            assert_eq!(accepted, [true, false, false], "the first follow-up takes over the budget of its message");
            let stats = pool.stats();
            assert_eq!((stats.submitted, stats.handled, stats.displaced, stats.merged), (3, 3, 0, 0));
            assert_eq!((pool.depth(), pool.bytes()), (0, 0));
        }
    }
}

#[test]
fn larger_follow_up_needs_additional_budget() {
    let handler = |message: &mut Message<Vec<u8>>, context: &mut Context<'_, Vec<u8>>| {
        if message.payload[0] == 1 {
            let is_alone = context.attempt() == 1 && message.key == Key(1);
            let follow_up = context.submit(Message::new(message.key, vec![0; 10]));
            assert_eq!(follow_up.is_ok(), is_alone, "ten bytes are available only if no other message uses any");
        }
        Ok::<(), String>(())
    };
    for (key, bytes_of_others) in [(1, 0), (2, 1)] {
        let mut pool = Pool::builder().workers(1).bytes(10).size(Vec::len).simulate(0, handler).unwrap();
        pool.submit(Message::new(key, vec![1; 4])).unwrap();
        if bytes_of_others > 0 {
            pool.submit(Message::new(key, vec![2; bytes_of_others])).unwrap();
        }
        pool.run(100);
        assert_eq!((pool.depth(), pool.bytes(), pool.stats().panicked), (0, 0, 0));
    }
}

/// A size above the range of the byte counter must not overflow into the message counter.
#[test]
fn follow_up_larger_than_the_bound_is_rejected() {
    let handler = |message: &mut Message<usize>, context: &mut Context<'_, usize>| {
        let error = context.submit(Message::new(message.key, 1 << 40)).map_err(|error| error.to_string());
        assert_eq!(error, Err("the message is larger than the pool's bound on bytes".into()));
        Ok::<(), String>(())
    };
    let mut pool = Pool::builder().workers(1).size(|size| *size).simulate(0, handler).unwrap();
    pool.submit(Message::new(1, 1)).unwrap();
    assert_eq!(pool.run(9), 1);
    assert_eq!((pool.stats().handled, pool.stats().rejected, pool.depth(), pool.bytes()), (1, 1, 0, 0));
}

#[test]
fn equal_values_have_equal_keys() {
    assert_eq!(Key::of("alice"), Key::of("alice"));
    assert_ne!(Key::of("alice"), Key::of("bob"));
}
