//! Tests of the pool with the model checker loom: all interleavings of a few threads, up to a number of preemptions.
//!
//! `make model`
#![cfg(loom)]

use std::collections::HashSet;
use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll, Wake, Waker};
use std::time::Duration;

use loom::model::Builder;
use loom::sync::Mutex;
use loom::thread;
use tidewire_pool::{Context, Handler, Message, Overflow, Placement, Pool, Reply};

/// Runs the model checker. A limit of `preemptions` keeps the search within minutes.
fn explore(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 100_000;
    builder.check(model);
}

/// A handler that records its messages.
fn recording_handler() -> (Arc<Mutex<Vec<u32>>>, impl Handler<u32>) {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&seen);
    let handler = move |message: &mut Message<u32>, _: &mut Context<'_, u32>| {
        log.lock().unwrap().push(message.payload);
        Ok::<(), Infallible>(())
    };
    (seen, handler)
}

const FOREVER: Duration = Duration::MAX;

/// Parking: no wake-up of a worker is lost. Otherwise the drain would never return.
#[test]
fn no_wake_up_is_lost() {
    for placement in [Placement::Moving, Placement::Pinned] {
        explore(2, move || {
            let (seen, handler) = recording_handler();
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

/// Queues: two workers that take messages of each other's shards keep the order of a key.
#[test]
fn order_is_kept_when_keys_move() {
    explore(2, || {
        let (seen, handler) = recording_handler();
        let pool = Pool::builder().workers(2).start(handler).unwrap();
        for number in 0..2 {
            pool.submit(Message::new(1, number)).unwrap();
        }
        assert_eq!(pool.drain(FOREVER).returned.len(), 0);
        assert_eq!(*seen.lock().unwrap(), [0, 1]);
    });
}

/// Budget: a waiting submitter is woken when budget is returned.
#[test]
fn waiting_submitter_is_woken() {
    explore(2, || {
        let (seen, handler) = recording_handler();
        let pool = Pool::builder().workers(1).messages(1).overflow(Overflow::Wait).start(handler).unwrap();
        for number in 0..2 {
            pool.submit(Message::new(1, number)).unwrap();
        }
        pool.drain(FOREVER);
        assert_eq!(*seen.lock().unwrap(), [0, 1]);
    });
}

/// Shutdown: a message that is accepted while the pool closes is handled or returned, exactly once.
#[test]
fn shutdown_loses_no_message() {
    explore(2, || {
        let (seen, handler) = recording_handler();
        let pool = Arc::new(Pool::builder().workers(1).start(handler).unwrap());
        let other = Arc::clone(&pool);
        let submitter = thread::spawn(move || other.submit(Message::new(1, 1)).is_ok());
        let returned = pool.abort().returned.len();
        let accepted = submitter.join().unwrap();
        drop(pool);
        assert_eq!(seen.lock().unwrap().len() + returned, usize::from(accepted));
    });
}

struct Unpark(thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// The record of a handler that replies with 7: whether the reply was wanted, and the result of `send`.
type Recorded = Arc<Mutex<Option<(bool, Result<(), u32>)>>>;

fn replying_handler() -> (Recorded, impl Handler<Reply<u32>>) {
    let recorded = Recorded::default();
    let log = Arc::clone(&recorded);
    let handler = move |message: &mut Message<Reply<u32>>, _: &mut Context<'_, Reply<u32>>| {
        let wanted = message.payload.is_wanted();
        *log.lock().unwrap() = Some((wanted, message.payload.send(7)));
        Ok::<(), Infallible>(())
    };
    (recorded, handler)
}

/// Asks: the wake-up of a caller is not lost.
#[test]
fn caller_gets_its_reply() {
    explore(2, || {
        let (recorded, handler) = replying_handler();
        let pool = Pool::builder().workers(1).start(handler).unwrap();
        let waker = Waker::from(Arc::new(Unpark(thread::current())));
        let mut asking = pin!(pool.ask(|reply| Message::new(1, reply)));
        let reply = loop {
            match asking.as_mut().poll(&mut TaskContext::from_waker(&waker)) {
                Poll::Ready(reply) => break reply,
                Poll::Pending => thread::park(),
            }
        };
        assert_eq!(reply.unwrap(), 7);
        pool.drain(FOREVER);
        assert_eq!(*recorded.lock().unwrap(), Some((true, Ok(()))));
    });
}

/// Asks: a caller may drop its future at any time. A handler that replies too late gets the value back.
#[test]
fn dropped_future_closes_the_ask() {
    let outcomes = Arc::new(std::sync::Mutex::new(HashSet::new()));
    let seen = Arc::clone(&outcomes);
    explore(2, move || {
        let (recorded, handler) = replying_handler();
        let pool = Pool::builder().workers(1).start(handler).unwrap();
        let is_dropped_early = {
            let mut asking = pin!(pool.ask(|reply| Message::new(1, reply)));
            asking.as_mut().poll(&mut TaskContext::from_waker(Waker::noop())).is_pending()
        };
        pool.drain(FOREVER);
        let (wanted, sent) = recorded.lock().unwrap().take().unwrap();
        assert!(wanted || sent == Err(7), "a closed ask accepts no reply");
        assert!(is_dropped_early || sent == Ok(()), "the caller has its reply");
        seen.lock().unwrap().insert((wanted, sent));
    });
    let expected = [(false, Err(7)), (true, Err(7)), (true, Ok(()))];
    assert_eq!(
        *outcomes.lock().unwrap(),
        HashSet::from(expected),
        "the future was dropped before, between and after the two calls"
    );
}
