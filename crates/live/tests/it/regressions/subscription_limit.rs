//! The limit of subscriptions, while there are commits that the driver has not applied yet.

use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::task::{Context, Waker};

use tidewire_live::{Live, LiveOptions, Mode};
use tidewire_store::{Clock, Query, StoreOptions};

use super::{run, store};

/// Blocks the driver whenever it reads the clock, which it does to evaluate a query.
struct Gate {
    is_closed: Arc<AtomicBool>,
    arrived: Receiver<()>,
    pass: Sender<()>,
}

impl Gate {
    fn new() -> (Self, StoreOptions) {
        let is_closed = Arc::new(AtomicBool::new(false));
        let (arrival, arrived) = channel();
        let (pass, passes) = channel();
        let (closed, passes) = (Arc::clone(&is_closed), Mutex::new(passes));
        let options = StoreOptions::default().clock(Clock::new(move || {
            if closed.load(Relaxed) && std::thread::current().name() == Some("tidewire-live") {
                arrival.send(()).unwrap();
                // A failed test drops the sender.
                let _ = passes.lock().unwrap().recv();
            }
            1000
        }));
        (Self { is_closed, arrived, pass }, options)
    }

    fn close(&self) {
        self.is_closed.store(true, Relaxed);
    }

    fn wait(&self) {
        self.arrived.recv().unwrap();
    }

    fn pass(&self) {
        self.pass.send(()).unwrap();
    }

    fn open(&self) {
        self.is_closed.store(false, Relaxed);
        self.pass();
    }
}

/// A query of the bucket `b`, distinct for each limit.
fn limited(limit: usize) -> Query {
    let mut query = Query::new("b");
    query.limit = Some(limit);
    query
}

/// Sends a request without waiting for the reply.
fn poll_pending<T>(future: Pin<&mut impl Future<Output = T>>) {
    assert!(future.poll(&mut Context::from_waker(Waker::noop())).is_pending());
}

#[test]
fn ended_subscription_frees_its_slot_immediately() {
    run(async {
        let (gate, options) = Gate::new();
        let store = store(options).await;
        let live = Live::with_options(store.clone(), LiveOptions::default().max_subscriptions(3));
        let _dropped = live.subscribe(Query::new("c"), Mode::Delta).await.unwrap();
        gate.close();
        let subscribe = |limit| live.subscribe(limited(limit), Mode::Delta);
        let (mut one, mut two, mut three) = (pin!(subscribe(1)), pin!(subscribe(2)), pin!(subscribe(3)));
        poll_pending(one.as_mut());
        gate.wait();
        poll_pending(two.as_mut());
        poll_pending(three.as_mut());
        gate.pass();
        gate.wait();
        store.drop_bucket("c").await.unwrap();
        gate.open();
        let _all = (one.await.unwrap(), two.await.unwrap(), three.await.unwrap());
    });
}
