//! What is asked for while commits come that the driver has not seen yet.

use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::task::{Context, Waker};

use serde_json::{Map, json};
use tidewire_live::{End, Live, LiveError, LiveOptions, Mode};
use tidewire_store::{Clock, Query, StoreOptions};

use super::{object, run, store};

/// Holds the driver whenever it asks for the time, which it does when somebody subscribes.
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
        let mut options = StoreOptions::default();
        options.clock = Clock::new(move || {
            if shut.load(Relaxed) && std::thread::current().name() == Some("tidewire-live") {
                arrives.send(()).unwrap();
                // A test that has failed says no more.
                let _ = goes.lock().unwrap().recv();
            }
            1000
        });
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

/// Asks, and does not wait for the answer.
fn ask<T>(future: Pin<&mut impl Future<Output = T>>) {
    assert!(future.poll(&mut Context::from_waker(Waker::noop())).is_pending());
}

#[test]
fn a_subscription_that_has_just_ended_gets_no_other_query() {
    run(async {
        let (gate, options) = Gate::new();
        let store = store(options).await;
        store.define_query("named", json!({"bucket": "b"})).await.unwrap();
        let live = Live::new(store.clone());
        let mut named = live.subscribe_named("named", Map::new(), None, Mode::Delta, None).await.unwrap();
        gate.shut();
        let (mut one, mut two) = (
            pin!(live.subscribe(Query::all("b"), Mode::Delta, None)),
            pin!(live.subscribe(Query::all("b"), Mode::Delta, None)),
        );
        let mut one_of_all = Query::all("b");
        one_of_all.limit = Some(1);
        let mut replaced = pin!(live.replace(named.id(), one_of_all));
        ask(one.as_mut());
        gate.wait();
        // These two are taken together, and the query is undefined between them.
        ask(two.as_mut());
        ask(replaced.as_mut());
        gate.pass();
        gate.wait();
        store.undefine_query("named").await.unwrap();
        gate.open();
        assert_eq!(replaced.await, Err(LiveError::NotSubscribed { id: named.id() }));
        assert_eq!(named.next().await.unwrap_err(), End::QueryUndefined);
        drop((one.await.unwrap(), two.await.unwrap()));
        live.settled().await.unwrap();
        live.settled().await.unwrap();
        assert_eq!((live.stats().queries, live.stats().subscriptions), (0, 0));
    });
}

#[test]
fn a_subscription_that_has_just_ended_makes_room() {
    run(async {
        let (gate, options) = Gate::new();
        let store = store(options).await;
        let mut options = LiveOptions::default();
        options.max_subscriptions = 3;
        let live = Live::with_options(store.clone(), options);
        let _dropped = live.subscribe(Query::all("c"), Mode::Delta, None).await.unwrap();
        gate.shut();
        let subscribe = || live.subscribe(Query::all("b"), Mode::Delta, None);
        let (mut one, mut two, mut three) = (pin!(subscribe()), pin!(subscribe()), pin!(subscribe()));
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

/// The history holds nothing, so that the driver begins anew with every commit.
#[test]
fn requests_wait_for_one_restart_at_most() {
    run(async {
        let (gate, mut options) = Gate::new();
        options.history_bytes = 1;
        let store = store(options).await;
        let live = Live::new(store.clone());
        let subscription = live.subscribe(Query::all("b"), Mode::Delta, None).await.unwrap();
        gate.shut();
        store.insert("b", object(json!({"id": 1}))).await.unwrap();
        gate.wait();
        drop(subscription);
        store.insert("b", object(json!({"id": 2}))).await.unwrap();
        gate.pass();
        gate.wait();
        let left = live.stats().subscriptions;
        gate.open();
        assert_eq!(left, 0);
    });
}
