//! Requests while there are commits that the driver has not applied yet.

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
    is_shut: Arc<AtomicBool>,
    arrived: Receiver<()>,
    go: Sender<()>,
}

impl Gate {
    fn new() -> (Self, StoreOptions) {
        let is_shut = Arc::new(AtomicBool::new(false));
        let (arrives, arrived) = channel();
        let (go, goes) = channel();
        let (shut, goes) = (Arc::clone(&is_shut), Mutex::new(goes));
        let options = StoreOptions::default().clock(Clock::new(move || {
            if shut.load(Relaxed) && std::thread::current().name() == Some("tidewire-live") {
                arrives.send(()).unwrap();
                // A failed test drops the sender.
                let _ = goes.lock().unwrap().recv();
            }
            1000
        }));
        (Self { is_shut, arrived, go }, options)
    }

    fn shut(&self) {
        self.is_shut.store(true, Relaxed);
    }

    fn wait(&self) {
        self.arrived.recv().unwrap();
    }

    fn pass(&self) {
        self.go.send(()).unwrap();
    }

    fn open(&self) {
        self.is_shut.store(false, Relaxed);
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
fn ask<T>(future: Pin<&mut impl Future<Output = T>>) {
    assert!(future.poll(&mut Context::from_waker(Waker::noop())).is_pending());
}

#[test]
fn ended_subscription_frees_its_slot_immediately() {
    run(async {
        let (gate, options) = Gate::new();
        let store = store(options).await;
        let live = Live::with_options(store.clone(), LiveOptions::default().max_subscriptions(3));
        let _dropped = live.subscribe(Query::new("c"), Mode::Delta).await.unwrap();
        gate.shut();
        let subscribe = |limit| live.subscribe(limited(limit), Mode::Delta);
        let (mut one, mut two, mut three) = (pin!(subscribe(1)), pin!(subscribe(2)), pin!(subscribe(3)));
        ask(one.as_mut());
        gate.wait();
        ask(two.as_mut());
        ask(three.as_mut());
        gate.pass();
        gate.wait();
        store.drop_bucket("c").await.unwrap();
        gate.open();
        let _all = (one.await.unwrap(), two.await.unwrap(), three.await.unwrap());
    });
}
