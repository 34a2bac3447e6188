use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

use tidewire_pool::{Context, DeadLetterReason, Key, Message, Placement, Pool, Retry};
use tidewire_testkit::{PATIENCE, wait_until};

use crate::gate::Gate;

/// A handler of numbers. A number n below ten fails n times, 13 panics, and others succeed.
fn failing(seen: Arc<std::sync::Mutex<Vec<u32>>>) -> impl tidewire_pool::Handler<u32> {
    move |message: &mut Message<u32>, context: &mut Context<'_, u32>| {
        let number = message.payload;
        seen.lock().unwrap().push(number);
        match number {
            13 => panic!("unlucky {number}"),
            0..10 if context.attempt() <= number => Err(format!("attempt {} of {number}", context.attempt())),
            _ => Ok(()),
        }
    }
}

#[test]
fn panic_affects_only_its_message() {
    for placement in [Placement::Moving, Placement::Pinned] {
        let seen = Arc::default();
        let pool = Pool::builder().workers(2).placement(placement).start(failing(Arc::clone(&seen))).unwrap();
        for number in [20, 13, 21, 13, 22] {
            pool.submit(Message::new(4, number)).unwrap();
        }
        assert!(pool.drain(PATIENCE).returned.is_empty());
        assert_eq!(*seen.lock().unwrap(), [20, 13, 21, 13, 22]);
        let letters = pool.dead_letters().take(9);
        assert_eq!(letters.len(), 2);
        for letter in letters {
            assert_eq!(letter.reason, DeadLetterReason::Panicked("unlucky 13".into()));
            assert_eq!((letter.message.key, letter.message.payload, letter.attempts), (Key(4), 13, 1));
        }
        let stats = pool.stats();
        assert_eq!((stats.handled, stats.panicked, stats.dead_lettered), (3, 2, 2));
    }
}

#[test]
fn failed_message_is_not_retried_by_default() {
    let pool = Pool::builder().workers(1).start(failing(Arc::default())).unwrap();
    pool.submit(Message::new(1, 1)).unwrap();
    pool.drain(PATIENCE);
    let letter = pool.dead_letters().take(1).remove(0);
    assert_eq!(letter.reason, DeadLetterReason::Failed("attempt 1 of 1".into()));
    assert_eq!((letter.attempts, pool.stats().failed, pool.stats().retried), (1, 1, 0));
}

#[test]
fn retries_keep_the_order_of_the_key_and_do_not_delay_others() {
    for placement in [Placement::Moving, Placement::Pinned] {
        let seen = Arc::default();
        let retry = Retry::new(4).first_pause(Duration::from_millis(20)).longest_pause(Duration::from_millis(30));
        let builder = Pool::builder().workers(2).placement(placement).retry(retry);
        let mut pool = builder.simulate(0, failing(Arc::clone(&seen))).unwrap();
        let start = pool.now();
        for (key, number) in [(1, 2), (1, 30), (3, 31)] {
            pool.submit(Message::new(key, number)).unwrap();
        }
        while pool.step() {}
        assert_eq!(pool.depth(), 2, "the second message of the key waits for the first");
        assert!(seen.lock().unwrap().contains(&31) && !seen.lock().unwrap().contains(&30));
        pool.run(100);
        let own: Vec<u32> = seen.lock().unwrap().iter().copied().filter(|&number| number != 31).collect();
        assert_eq!(own, [2, 2, 2, 30]);
        assert_eq!(pool.now() - start, Duration::from_millis(50), "20 ms, then twice as long, limited to 30 ms");
        assert_eq!((pool.stats().retried, pool.stats().handled, pool.depth()), (2, 3, 0));
    }
}

#[test]
fn message_is_dead_lettered_after_the_last_attempt() {
    let retry = Retry::new(3).first_pause(Duration::from_millis(1)).longest_pause(Duration::from_millis(1));
    for placement in [Placement::Moving, Placement::Pinned] {
        let pool = Pool::builder().workers(2).placement(placement).retry(retry).start(failing(Arc::default())).unwrap();
        for key in 0..20 {
            pool.submit(Message::new(key, 9)).unwrap();
            pool.submit(Message::new(key, 2)).unwrap();
        }
        assert!(pool.drain(PATIENCE).returned.is_empty());
        let letters = pool.dead_letters().take(100);
        assert_eq!(letters.len(), 20);
        assert!(letters.iter().all(|letter| letter.attempts == 3));
        assert_eq!((pool.stats().handled, pool.stats().retried), (20, 20 * (2 + 2)));
    }
}

/// The workers that know when the retry is due are blocked by then, so a sleeping worker must be woken for it.
#[test]
fn sleeping_worker_retries_if_other_workers_are_stuck() {
    let gate = Gate::<()>::closed();
    let handler = {
        let gate = gate.clone();
        move |message: &mut Message<u32>, context: &mut Context<'_, u32>| match message.payload {
            0 => {
                gate.pass();
                Ok(())
            }
            _ if context.attempt() == 1 => Err("again"),
            _ => Ok(()),
        }
    };
    let pause = Duration::from_millis(200);
    let pool =
        Pool::builder().workers(3).retry(Retry::new(2).first_pause(pause).longest_pause(pause)).start(handler).unwrap();
    pool.submit(Message::new(1, 1)).unwrap();
    wait_until("the first attempt has failed", PATIENCE, || pool.stats().retried == 1);
    pool.submit(Message::new(2, 0)).unwrap();
    pool.submit(Message::new(3, 0)).unwrap();
    wait_until("two workers are blocked", PATIENCE, || gate.inside() == 2);
    wait_until("the third worker has retried the message", PATIENCE, || pool.stats().handled == 1);
    gate.open();
    pool.drain(PATIENCE);
}

/// The follow-up of the first attempt takes over its budget, and the attempt fails. A retry must not exceed the bound.
#[test]
fn retry_needs_new_budget_after_a_follow_up() {
    let handler = |message: &mut Message<u32>, context: &mut Context<'_, u32>| {
        if message.payload == 1 && context.attempt() == 1 {
            context.submit(Message::new(9, 2)).unwrap();
            return Err("again");
        }
        Ok(())
    };
    for (bound, handled, dead) in [(1, 1, 1), (2, 2, 0)] {
        let builder = Pool::builder().workers(1).messages(bound).retry(Retry::new(2));
        let mut pool = builder.simulate(0, handler).unwrap();
        pool.submit(Message::new(1, 1)).unwrap();
        pool.run(100);
        let stats = pool.stats();
        assert_eq!((stats.handled, stats.dead_lettered, pool.depth()), (handled, dead, 0));
    }
}

#[test]
fn failures_with_follow_ups_never_exceed_the_bound() {
    let handler = |message: &mut Message<u64>, context: &mut Context<'_, u64>| {
        let _ = context.submit(Message::new(message.key.0 + 1, 0));
        Err::<(), _>("always")
    };
    let mut pool = Pool::builder().workers(1).messages(4).retry(Retry::new(1000)).simulate(0, handler).unwrap();
    pool.submit(Message::new(0, 0)).unwrap();
    for _ in 0..1000 {
        pool.run(1);
        assert!(pool.depth() <= 4, "{}", pool.depth());
    }
}

#[test]
fn expired_message_is_not_handled() {
    let gate = Gate::opened();
    let mut pool = Pool::builder().workers(1).simulate(0, gate.clone()).unwrap();
    let deadline = pool.now() + Duration::from_secs(1);
    pool.submit(Message::new(1, 1).deadline(deadline)).unwrap();
    pool.submit(Message::new(1, 2).deadline(deadline + Duration::from_secs(1))).unwrap();
    pool.submit(Message::new(1, 3)).unwrap();
    pool.advance(Duration::from_millis(1001));
    pool.run(100);
    assert_eq!(gate.handled(), [2, 3]);
    let letter = pool.dead_letters().take(1).remove(0);
    assert_eq!((letter.reason.clone(), letter.attempts), (DeadLetterReason::Expired, 0));
    assert_eq!((pool.stats().expired, pool.depth()), (1, 0));

    pool.submit(letter.into_message()).unwrap();
    pool.run(100);
    assert_eq!(gate.handled(), [2, 3, 1], "a resubmitted message has no deadline");
}

#[test]
fn dead_letters_are_bounded_and_can_be_resubmitted() {
    let broken = Arc::new(AtomicU32::new(1));
    let handler = {
        let broken = Arc::clone(&broken);
        move |_: &mut Message<u32>, _: &mut Context<'_, u32>| match broken.load(Ordering::SeqCst) {
            0 => Ok(()),
            _ => Err("broken"),
        }
    };
    let pool = Pool::builder().workers(1).dead_letters(3).start(handler).unwrap();
    for number in 0..5 {
        pool.submit(Message::new(1, number)).unwrap();
    }
    wait_until("all have failed", PATIENCE, || pool.stats().dead_lettered == 5);
    assert_eq!(pool.stats().forgotten, 2);
    let mut read = Vec::new();
    pool.dead_letters().for_each(|letter| read.push(letter.message.payload));
    assert_eq!(read, [2, 3, 4], "the newest letters are stored");

    broken.store(0, Ordering::SeqCst);
    for letter in pool.dead_letters().take(usize::MAX) {
        pool.submit(letter.into_message()).unwrap();
    }
    pool.drain(PATIENCE);
    assert_eq!(pool.stats().handled, 3);
    assert!(pool.dead_letters().is_empty());
}

#[test]
fn hook_is_called_with_every_dead_letter_and_may_panic() {
    let seen = Arc::new(AtomicUsize::new(0));
    let hook = {
        let seen = Arc::clone(&seen);
        move |letter: &mut tidewire_pool::DeadLetter<u32>| {
            seen.fetch_add(1, Ordering::SeqCst);
            assert_ne!(letter.message.payload, 2, "a hook that panics");
        }
    };
    let handler = |_: &mut Message<u32>, _: &mut Context<'_, u32>| Err::<(), _>("always");
    let pool = Pool::builder().workers(1).dead_letters(0).on_dead_letter(hook).start(handler).unwrap();
    for number in 0..4 {
        pool.submit(Message::new(1, number)).unwrap();
    }
    pool.drain(PATIENCE);
    assert_eq!(seen.load(Ordering::SeqCst), 4);
    assert_eq!((pool.stats().forgotten, pool.dead_letters().len()), (4, 0));
}

#[test]
fn worker_survives_a_panic_in_the_drop_of_a_payload() {
    struct Bomb(bool);
    impl Drop for Bomb {
        fn drop(&mut self) {
            assert!(!self.0 || std::thread::panicking(), "a drop that panics");
        }
    }
    let handler = |_: &mut Message<Bomb>, _: &mut Context<'_, Bomb>| Ok::<(), String>(());
    let pool = Pool::builder().workers(1).start(handler).unwrap();
    for armed in [false, true, false] {
        pool.submit(Message::new(1, Bomb(armed))).unwrap();
    }
    assert!(pool.drain(PATIENCE).returned.is_empty());
    assert_eq!((pool.stats().handled, pool.stats().panicked), (3, 1));
}
