//! Tests of the queue with the model checker shuttle, which runs the threads of a test in many random orders.
//!
//! `make model`. A lost wake-up is a deadlock, because every test waits for all threads, and the model checker reports it. It switches
//! threads at the lock of the queue and before calls of tokio (`switch_point`), which are one step each.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use shuttle::future::block_on;
use shuttle::thread::{self, JoinHandle};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::batch::Batch;
use super::gate::Permit;
use super::queue::{Queue, SubmitRejection};
use super::request::{PendingRequest, ReplySender};
use crate::{ConnectionError, Error, RequestOutcome, RequestPhase, Value};

/// Runs a model in this many orders with each of two schedulers.
const RUNS: usize = 5_000;

fn explore(model: impl Fn() + Send + Sync + 'static) {
    let model = Arc::new(model);
    let same = Arc::clone(&model);
    shuttle::check_random(move || model(), RUNS);
    // Few preemptions at the wrong moments.
    shuttle::check_pct(move || same(), RUNS, 3);
}

/// A queue and the threads that use it.
struct Model {
    queue: Queue,
    limit: Permit,
    now: Instant,
}

type Reply = oneshot::Receiver<Result<Value, Error>>;

impl Model {
    /// Creates a queue for this number of commands in flight.
    fn new(commands: usize) -> Arc<Self> {
        let limit = Permit { commands, bytes: 1000 };
        Arc::new(Self { queue: Queue::new(limit), limit, now: Instant::now() })
    }

    fn spawn<T: Send + 'static>(self: &Arc<Self>, run: impl FnOnce(&Self) -> T + Send + 'static) -> JoinHandle<T> {
        let model = Arc::clone(self);
        thread::spawn(move || run(&model))
    }

    /// Makes a request with one command, which is this byte.
    fn request(&self, deadline: Instant) -> (PendingRequest, Reply) {
        let (reply, receiver) = ReplySender::one();
        (PendingRequest::new(1, 1, self.now, deadline, reply), receiver)
    }

    /// Queues a request, and waits for a permit if there is none.
    async fn submit(&self, byte: u8, deadline: Instant) -> Result<Reply, Error> {
        let (request, reply) = self.request(deadline);
        match self.queue.submit(&[byte], request) {
            Ok(()) => {}
            Err(SubmitRejection::Full(request)) => self.queue.submit_in_turn(&[byte], request).await?,
            Err(SubmitRejection::Error(error)) => return Err(error),
        }
        Ok(reply)
    }

    /// Sends a request and waits for its reply, like the client. If it is cancelled, its request is abandoned.
    async fn send(&self, byte: u8, deadline: Instant) -> Result<Value, Error> {
        struct AbandonGuard<'a>(Option<&'a Queue>);
        impl Drop for AbandonGuard<'_> {
            fn drop(&mut self) {
                if let Some(queue) = self.0 {
                    queue.abandon();
                }
            }
        }
        let reply = self.submit(byte, deadline).await?;
        let mut guard = AbandonGuard(Some(&self.queue));
        let reply = reply.await;
        guard.0 = None;
        reply.expect("every request ends with a reply or an error")
    }

    /// A deadline that does not pass.
    fn far(&self) -> Instant {
        self.now + Duration::from_hours(1)
    }

    /// Answers requests until the queue is closed, like an open connection. Returns the bytes of all requests, in order.
    fn serve(&self) -> Vec<u8> {
        let (mut taken, mut served) = (Batch::default(), Vec::new());
        loop {
            let is_closing = block_on(poll_fn(|context| {
                let signals = self.queue.poll_take(Some(&mut taken), context);
                if signals.should_reclaim {
                    self.queue.reclaim();
                }
                let is_ready = signals.closing.is_some() || !taken.requests.is_empty();
                if is_ready { Poll::Ready(signals.closing.is_some()) } else { Poll::Pending }
            }));
            let in_flight = self.queue.usage().in_flight;
            assert!(in_flight.commands <= self.limit.commands, "{in_flight:?} in flight");
            assert_eq!(taken.bytes.len(), taken.requests.len());
            let mut released = Permit::default();
            for request in &taken.requests {
                released.add(request.permit);
            }
            self.queue.release(released);
            for (request, byte) in taken.requests.drain(..).zip(taken.bytes.drain(..)) {
                request.reply.expect("a queued request has a reply").finish(i64::from(byte).into());
                served.push(byte);
            }
            if is_closing {
                return served;
            }
        }
    }

    /// Waits until the queue is closed, like a client without a connection. Meanwhile requests end at their deadlines.
    fn stay_down(&self) {
        block_on(async {
            while !self.queue.is_closing() {
                self.queue.reclaim();
                let (expired, next) = self.queue.take_expired(self.now);
                self.fail(expired, &Error::TimedOut { phase: RequestPhase::Connecting });
                self.queue.changed(next).await;
            }
        });
        self.fail(self.queue.take().requests, &CLOSED);
    }

    fn fail(&self, requests: impl IntoIterator<Item = PendingRequest>, error: &Error) {
        for request in requests {
            self.queue.release(request.permit);
            request.reply.expect("a queued request has a reply").fail(error.clone());
        }
    }

    fn close(&self) {
        self.queue.close(self.far());
    }

    /// Checks a closed queue whose requests have ended.
    fn check_end(&self) {
        assert!(matches!(block_on(self.submit(0, self.far())), Err(Error::Closed { .. })), "accepted after a close");
        let usage = self.queue.usage();
        assert_eq!((usage.queued, usage.in_flight), (0, Permit::default()));
    }
}

const CLOSED: Error = Error::Closed { outcome: RequestOutcome::NeverSent };

/// Returns the byte of the request, if it was answered. Otherwise it was closed before it was sent.
fn answered(byte: u8, reply: Result<Value, Error>) -> Option<u8> {
    match reply {
        Ok(reply) => {
            assert_eq!(reply, i64::from(byte).into(), "the reply to another request");
            Some(byte)
        }
        Err(Error::Closed { outcome: RequestOutcome::NeverSent }) => None,
        Err(error) => panic!("request {byte}: {error}"),
    }
}

/// Waits for `work`, or returns `None` once the sender is dropped.
async fn cancellable<T>(cancelled: oneshot::Receiver<()>, work: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        biased;
        done = work => Some(done),
        _ = cancelled => None,
    }
}

#[test]
fn every_request_is_answered_once_and_in_order() {
    explore(|| {
        let model = Model::new(3);
        let server = model.spawn(Model::serve);
        let callers: Vec<_> = (0..3)
            .map(|caller| {
                model.spawn(move |model| {
                    block_on(async {
                        let first = model.submit(2 * caller, model.far()).await.unwrap();
                        let second = model.submit(2 * caller + 1, model.far()).await.unwrap();
                        assert_eq!(answered(2 * caller, first.await.unwrap()), Some(2 * caller));
                        assert_eq!(answered(2 * caller + 1, second.await.unwrap()), Some(2 * caller + 1));
                    });
                })
            })
            .collect();
        for caller in callers {
            caller.join().unwrap();
        }
        model.close();
        let mut served = server.join().unwrap();
        for caller in 0..3 {
            let of_caller: Vec<_> = served.iter().copied().filter(|byte| byte / 2 == caller).collect();
            assert_eq!(of_caller, [2 * caller, 2 * caller + 1]);
        }
        served.sort_unstable();
        assert_eq!(served, [0, 1, 2, 3, 4, 5]);
        model.check_end();
    });
}

#[test]
fn unsent_requests_return_to_the_front() {
    explore(|| {
        let model = Model::new(10);
        let caller = model.spawn(|model| {
            let replies = [1, 2, 3].map(|byte| (byte, block_on(model.submit(byte, model.far())).unwrap()));
            replies.map(|(byte, reply)| answered(byte, block_on(reply).unwrap()))
        });
        let server = model.spawn(|model| {
            // The connection is lost before it has written them.
            model.queue.put_back(model.queue.take());
            model.serve()
        });
        assert_eq!(caller.join().unwrap(), [Some(1), Some(2), Some(3)]);
        model.close();
        assert_eq!(server.join().unwrap(), [1, 2, 3]);
        model.check_end();
    });
}

#[test]
fn close_ends_every_request_and_accepts_no_other() {
    explore(|| {
        let model = Model::new(1);
        let server = model.spawn(Model::serve);
        let callers =
            [1, 2].map(|byte| model.spawn(move |model| answered(byte, block_on(model.send(byte, model.far())))));
        let closing = model.spawn(|model| {
            model.close();
            assert!(
                matches!(block_on(model.submit(9, model.far())), Err(Error::Closed { .. })),
                "accepted after a close"
            );
        });
        let mut answered: Vec<_> = callers.into_iter().filter_map(|caller| caller.join().unwrap()).collect();
        closing.join().unwrap();
        let mut served = server.join().unwrap();
        answered.sort_unstable();
        served.sort_unstable();
        assert_eq!(served, answered);
        model.check_end();
    });
}

#[test]
fn requests_end_if_the_connection_is_dropped() {
    explore(|| {
        let model = Model::new(1);
        let callers =
            [1, 2].map(|byte| model.spawn(move |model| answered(byte, block_on(model.send(byte, model.far())))));
        let dropped = model.spawn(|model| {
            model.close();
            model.fail(model.queue.take().requests, &CLOSED);
        });
        assert_eq!(callers.map(|caller| caller.join().unwrap()), [None, None]);
        dropped.join().unwrap();
        model.check_end();
    });
}

#[test]
fn waiting_request_ends_at_once_when_the_gate_changes() {
    let lost = || Error::Lost { outcome: RequestOutcome::NeverSent, source: ConnectionError::EndOfStream };
    for is_close in [true, false] {
        explore(move || {
            let model = Model::new(1);
            // It holds the permit until the others have ended.
            let in_flight = block_on(model.submit(1, model.far())).unwrap();
            let batch = model.queue.take();
            let waiting = [2, 3].map(|byte| model.spawn(move |model| block_on(model.send(byte, model.far()))));
            if is_close {
                model.close();
            } else {
                assert!(model.queue.fail(lost()).requests.is_empty());
            }
            for waiting in waiting {
                let error = waiting.join().unwrap().unwrap_err();
                assert_eq!(error.outcome(), Some(RequestOutcome::NeverSent));
            }
            model.fail(batch.requests, &lost());
            assert!(block_on(in_flight).unwrap().is_err());
            model.close();
            model.check_end();
        });
    }
}

#[test]
fn cancelled_waiter_passes_its_turn_on() {
    explore(|| {
        let model = Model::new(1);
        let server = model.spawn(Model::serve);
        let (cancel, cancelled) = oneshot::channel();
        let fickle = model.spawn(|model| block_on(cancellable(cancelled, model.send(1, model.far()))).is_some());
        let steady =
            [2, 3].map(|byte| model.spawn(move |model| answered(byte, block_on(model.send(byte, model.far())))));
        let canceller = model.spawn(|model| {
            // At any step, because a lock switches threads.
            model.queue.usage();
            drop(cancel);
        });
        assert_eq!(steady.map(|caller| caller.join().unwrap()), [Some(2), Some(3)]);
        let was_answered = fickle.join().unwrap();
        canceller.join().unwrap();
        // No waiter is left: once all permits have been returned, a request needs no turn.
        block_on(model.send(4, model.far())).unwrap();
        let (request, _) = model.request(model.far());
        assert!(model.queue.submit(&[5], request).is_ok(), "a waiter is left");
        model.close();
        let served = server.join().unwrap();
        assert!(served.contains(&1) || !was_answered);
        model.check_end();
    });
}

#[test]
fn abandoned_request_returns_its_permit_without_a_connection() {
    explore(|| {
        let model = Model::new(1);
        let down = model.spawn(Model::stay_down);
        let (cancel, cancelled) = oneshot::channel();
        let fickle = model.spawn(|model| block_on(cancellable(cancelled, model.send(1, model.far()))));
        let steady = model.spawn(|model| drop(block_on(model.submit(2, model.far())).unwrap()));
        drop(cancel);
        assert!(fickle.join().unwrap().is_none());
        // It has a permit before the queue is closed.
        steady.join().unwrap();
        model.close();
        down.join().unwrap();
        model.check_end();
    });
}

#[test]
fn expired_requests_end_without_a_connection() {
    explore(|| {
        let model = Model::new(1);
        let down = model.spawn(Model::stay_down);
        let callers = [1, 2, 3].map(|byte| model.spawn(move |model| block_on(model.send(byte, model.now))));
        for caller in callers {
            assert!(matches!(caller.join().unwrap(), Err(Error::TimedOut { phase: RequestPhase::Connecting })));
        }
        model.close();
        down.join().unwrap();
        model.check_end();
    });
}

#[test]
fn failure_ends_queued_and_waiting_requests() {
    explore(|| {
        let model = Model::new(1);
        let server = model.spawn(|model| {
            let lost = Error::Lost { outcome: RequestOutcome::NeverSent, source: ConnectionError::EndOfStream };
            model.fail(model.queue.fail(lost.clone()).requests, &lost);
            assert_eq!(model.queue.usage().queued, 0, "accepted without a connection");
            model.queue.open();
            model.serve()
        });
        let callers = [1, 2, 3].map(|byte| {
            model.spawn(move |model| match block_on(model.send(byte, model.far())) {
                Err(Error::Lost { outcome: RequestOutcome::NeverSent, .. }) => None,
                reply => answered(byte, reply),
            })
        });
        let mut answered: Vec<_> = callers.into_iter().filter_map(|caller| caller.join().unwrap()).collect();
        model.close();
        let mut served = server.join().unwrap();
        answered.sort_unstable();
        served.sort_unstable();
        assert_eq!(served, answered);
        model.check_end();
    });
}
