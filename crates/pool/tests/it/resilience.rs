use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use tidewire_pool::{
    AskError, Breaker, BreakerError, BreakerOptions, BreakerState, Context, DeadLetterReason, Handler, Message,
    Observed, Pool, Reply, Retry, Shedding, SheddingError, SheddingOptions, Simulation,
};

/// A handler that fails while the flag is set, and counts its calls.
fn failing_handler() -> (impl Handler<u32>, Arc<AtomicBool>, Arc<AtomicUsize>) {
    let (broken, calls) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicUsize::new(0)));
    let (is_broken, count) = (Arc::clone(&broken), Arc::clone(&calls));
    let handler = move |message: &mut Message<u32>, _: &mut Context<'_, u32>| {
        count.fetch_add(1, Ordering::SeqCst);
        assert_ne!(message.payload, 13, "injected panic");
        if is_broken.load(Ordering::SeqCst) { Err("broken") } else { Ok(()) }
    };
    (handler, broken, calls)
}

fn send(pool: &mut Simulation<u32>, numbers: impl IntoIterator<Item = u32>) {
    for number in numbers {
        pool.submit(Message::new(u64::from(number), number)).unwrap();
        pool.step();
    }
}

#[test]
fn breaker_opens_probes_and_closes() {
    let (handler, broken, calls) = failing_handler();
    let breaker = Breaker::new(BreakerOptions::default());
    let mut pool = Pool::builder().workers(1).simulate(0, breaker.guard(handler)).unwrap();

    send(&mut pool, [1, 2, 3, 4]);
    assert_eq!(breaker.state(pool.now()), BreakerState::Closed);
    send(&mut pool, [13]);
    assert_eq!(breaker.state(pool.now()), BreakerState::Open, "five consecutive failures, one of them a panic");
    send(&mut pool, 20..30);
    assert_eq!(calls.load(Ordering::SeqCst), 5, "an open breaker does not call the handler");
    let rejected = pool.dead_letters().take(100).pop().unwrap();
    assert_eq!(rejected.reason, DeadLetterReason::BreakerOpen);

    pool.advance(Duration::from_secs(1));
    assert_eq!(breaker.state(pool.now()), BreakerState::HalfOpen);
    send(&mut pool, [30, 31]);
    assert_eq!(calls.load(Ordering::SeqCst), 6, "a probe that fails opens the breaker again");
    assert_eq!(breaker.state(pool.now()), BreakerState::Open);

    broken.store(false, Ordering::SeqCst);
    pool.advance(Duration::from_secs(1));
    send(&mut pool, [40, 41, 42]);
    assert_eq!(breaker.state(pool.now()), BreakerState::Closed);
    assert_eq!(pool.stats().handled, 3);

    broken.store(true, Ordering::SeqCst);
    send(&mut pool, [1, 2, 3, 4]);
    broken.store(false, Ordering::SeqCst);
    send(&mut pool, [5]);
    broken.store(true, Ordering::SeqCst);
    send(&mut pool, [1, 2, 3, 4]);
    assert_eq!(breaker.state(pool.now()), BreakerState::Closed, "a success resets the count");
}

#[test]
fn messages_rejected_by_an_open_breaker_are_retried() {
    let (handler, broken, _) = failing_handler();
    let breaker = Breaker::new(BreakerOptions::default());
    let retry = Retry::new(100).first_pause(Duration::from_millis(100)).longest_pause(Duration::from_millis(100));
    let mut pool = Pool::builder().workers(1).retry(retry).simulate(0, breaker.guard(handler)).unwrap();
    for number in 20..40 {
        pool.submit(Message::new(u64::from(number), number)).unwrap();
    }
    while pool.step() {}
    assert_eq!(breaker.state(pool.now()), BreakerState::Open);
    broken.store(false, Ordering::SeqCst);
    pool.run(10_000);
    assert_eq!((pool.stats().handled, pool.stats().dead_lettered), (20, 0));
}

#[test]
fn extreme_options_are_accepted() {
    let (handler, _, calls) = failing_handler();
    let options = BreakerOptions::default().failures(1).pause(Duration::MAX).probes(0);
    let breaker = Breaker::new(options);
    let shedding = Shedding::new(SheddingOptions::default().target(Duration::MAX).interval(Duration::MAX));
    let retry = Retry::new(2).first_pause(Duration::MAX).longest_pause(Duration::MAX);
    let handler = shedding.guard(breaker.guard(handler));
    let mut pool = Pool::builder().workers(1).retry(retry).simulate(0, handler).unwrap();
    send(&mut pool, [1, 2]);
    assert_eq!((pool.stats().panicked, pool.stats().retried, calls.load(Ordering::SeqCst)), (0, 2, 1));
    assert_eq!(breaker.state(pool.now()), BreakerState::Open);

    let (handler, broken, _) = failing_handler();
    let breaker = Breaker::new(options.pause(Duration::ZERO));
    let mut pool = Pool::builder().workers(1).simulate(0, breaker.guard(handler)).unwrap();
    send(&mut pool, [1]);
    broken.store(false, Ordering::SeqCst);
    send(&mut pool, [2]);
    assert_eq!(breaker.state(pool.now()), BreakerState::Closed, "at least one probe is tried");
}

/// Steps a pool at a steady pace: every millisecond `arrivals` messages are submitted and one is handled.
fn load(pool: &mut Simulation<u64>, arrivals: u64, milliseconds: u64) {
    for millisecond in 0..milliseconds {
        for _ in 0..arrivals {
            pool.submit(Message::new(1, millisecond)).unwrap();
        }
        // Shedding a message takes no time.
        let handled = pool.stats().handled;
        while pool.stats().handled == handled && pool.step() {}
        pool.advance(Duration::from_millis(1));
    }
}

/// Returns the number of shed messages, and the queue delay of the last handled message.
fn overload(arrivals: u64, milliseconds: u64) -> (u64, Duration) {
    let handled_wait = Arc::new(std::sync::Mutex::new(Duration::ZERO));
    let last_wait = Arc::clone(&handled_wait);
    let handler = move |_: &mut Message<u64>, context: &mut Context<'_, u64>| {
        *last_wait.lock().unwrap() = context.waited().unwrap();
        Ok::<(), String>(())
    };
    let shedding = Shedding::new(SheddingOptions::default());
    let mut pool = Pool::builder().workers(1).simulate(0, shedding.guard(handler)).unwrap();
    load(&mut pool, arrivals, milliseconds);
    let last = *handled_wait.lock().unwrap();
    (pool.stats().dead_lettered, last)
}

#[test]
fn messages_are_shed_only_while_the_queue_does_not_drain() {
    assert_eq!(overload(1, 2000).0, 0, "as many messages arrive as are handled");
    let (shed, wait) = overload(2, 20_000);
    assert!(shed > 19_000, "twice as many messages arrive as can be handled, and {shed} were shed");
    // Without shedding, half of the messages of 20 s would be queued, and the last handled message would have waited for 10 s.
    assert!(wait <= Duration::from_millis(10), "the last handled message waited {wait:?}");
}

#[test]
fn burst_is_not_shed() {
    let handler = |_: &mut Message<u64>, _: &mut Context<'_, u64>| Ok::<(), String>(());
    let shedding = Shedding::new(SheddingOptions::default());
    let mut pool = Pool::builder().workers(1).simulate(0, shedding.guard(handler)).unwrap();
    for number in 0..90 {
        pool.submit(Message::new(number, number)).unwrap();
    }
    while pool.step() {
        pool.advance(Duration::from_millis(1));
    }
    assert_eq!(pool.stats().dead_lettered, 0, "the queue drained within an interval");
}

#[test]
fn shed_messages_are_not_retried() {
    let handler = |_: &mut Message<u64>, _: &mut Context<'_, u64>| Ok::<(), String>(());
    let shedding = Shedding::new(SheddingOptions::default());
    let mut pool = Pool::builder().workers(1).retry(Retry::new(5)).simulate(0, shedding.guard(handler)).unwrap();
    for number in 0..3 {
        pool.submit(Message::new(number, number)).unwrap();
    }
    pool.advance(Duration::from_secs(1));
    pool.step();
    pool.advance(Duration::from_secs(1));
    pool.run(100);
    let letters = pool.dead_letters().take(10);
    assert_eq!(letters.len(), 2);
    assert_eq!(letters[0].attempts, 1);
    assert_eq!(letters[0].reason, DeadLetterReason::Shed { waited: Duration::from_secs(2) });
    assert_eq!(letters[0].reason.to_string(), "shed after waiting 2s: the queue does not drain");
}

#[test]
fn retry_after_depends_on_the_queue_delay() {
    let ms = Duration::from_millis;
    let handler = |_: &mut Message<u64>, _: &mut Context<'_, u64>| Ok::<(), String>(());
    let shedding = Shedding::new(SheddingOptions::default().target(ms(5)).interval(ms(100)));
    let mut pool = Pool::builder().workers(1).simulate(0, shedding.guard(handler)).unwrap();
    assert_eq!((shedding.queue_delay(pool.now()), shedding.retry_after(pool.now())), (ms(0), None));

    // Two messages arrive in a millisecond and one is handled, so the delay grows by one millisecond every two milliseconds.
    load(&mut pool, 2, 90);
    assert_eq!(shedding.queue_delay(pool.now()), ms(45));
    assert_eq!(shedding.retry_after(pool.now()), None, "the first interval has not passed");

    // The first interval includes the short delays at the start. The second one does not, and ends after 200 ms.
    load(&mut pool, 2, 110);
    assert_eq!((shedding.queue_delay(pool.now()), shedding.retry_after(pool.now())), (ms(100), None));
    load(&mut pool, 2, 1);
    assert_eq!(shedding.retry_after(pool.now()), Some(ms(99)), "the rest of the interval");
    assert!(pool.stats().dead_lettered > 80, "messages are shed");
    load(&mut pool, 2, 60);
    let delay = shedding.queue_delay(pool.now());
    assert!(delay > ms(5) && delay <= ms(10), "{delay:?}");
    assert_eq!(shedding.retry_after(pool.now()), Some(ms(39)));

    while pool.step() {}
    pool.advance(ms(100));
    assert_eq!(
        (shedding.queue_delay(pool.now()), shedding.retry_after(pool.now())),
        (ms(0), None),
        "the queue is empty"
    );
}

/// With a slow handler the delay is measured rarely, so a measured delay is valid for as long as the delay itself.
#[test]
fn queue_delay_is_valid_for_as_long_as_the_delay() {
    let handler = |_: &mut Message<u64>, _: &mut Context<'_, u64>| Ok::<(), String>(());
    let shedding = Shedding::new(SheddingOptions::default());
    let mut pool = Pool::builder().workers(1).simulate(0, shedding.guard(handler)).unwrap();
    for number in 0..2 {
        pool.submit(Message::new(1, number)).unwrap();
        pool.advance(Duration::from_secs(3));
        pool.step();
    }
    pool.advance(Duration::from_secs(2));
    assert_eq!(shedding.queue_delay(pool.now()), Duration::from_secs(3));
    assert_eq!(shedding.retry_after(pool.now()), Some(Duration::from_secs(3)));
    pool.advance(Duration::from_secs(1));
    assert_eq!((shedding.queue_delay(pool.now()), shedding.retry_after(pool.now())), (Duration::ZERO, None));
}

/// An outer decorator returns the reason of an inner one, and `ask` returns it to the caller.
#[test]
fn decorators_return_the_reasons_of_inner_handlers() {
    let handler = |_: &mut Message<Reply<()>>, _: &mut Context<'_, Reply<()>>| Err::<(), _>("broken");
    let breaker = Breaker::new(BreakerOptions::default().failures(1));
    let shedding = Shedding::new(SheddingOptions::default());
    let handler = Observed::new(shedding.guard(breaker.guard(handler)));
    let mut pool = Pool::builder().workers(1).simulate(0, handler).unwrap();
    for expected in [DeadLetterReason::Failed("broken".into()), DeadLetterReason::BreakerOpen] {
        let reason = pool.ask(|reply| Message::new(1, reply)).unwrap_err();
        assert!(matches!(reason, AskError::DeadLettered(reason) if reason == expected));
    }
}

#[test]
fn errors_of_decorators_keep_the_source() {
    let inner = || AskError::<u32>::NotSubmitted(submit_error());
    let expected = std::error::Error::source(&inner()).unwrap().to_string();
    let errors: [&dyn std::error::Error; 2] = [&BreakerError::Failed(inner()), &SheddingError::Failed(inner())];
    for error in errors {
        assert_eq!(error.source().map(ToString::to_string).as_ref(), Some(&expected));
    }
}

/// Returns the error of a submission to a pool that is shut down.
fn submit_error() -> tidewire_pool::SubmitError<u32> {
    let handler = |_: &mut Message<u32>, _: &mut Context<'_, u32>| Ok::<(), String>(());
    let pool = Pool::builder().workers(1).start(handler).unwrap();
    pool.drain(Duration::ZERO);
    pool.submit(Message::new(1, 1)).unwrap_err()
}
