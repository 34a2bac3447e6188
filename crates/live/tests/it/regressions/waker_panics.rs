//! A waker that panics affects only its own subscriber.

use std::pin::pin;
use std::sync::{Arc, mpsc};
use std::task::{Context, Wake, Waker};
use std::time::Duration;

use serde_json::{Value as Json, json};
use tidewire_live::{Event, Live, LiveOptions, Mode, Subscription};
use tidewire_store::{Query, StoreOptions};

use super::{run, store};

struct Panics;

impl Wake for Panics {
    fn wake(self: Arc<Self>) {
        panic!("injected panic");
    }
}

fn query(json: &Json) -> Query {
    let mut query = json.clone();
    query["bucket"] = json!("b");
    Query::parse(&query).unwrap()
}

fn panics_when_woken(subscription: &mut Subscription) {
    let waker = Waker::from(Arc::new(Panics));
    assert!(subscription.poll_event(&mut Context::from_waker(&waker)).is_pending());
}

/// Runs on a separate thread, so that a deadlock of live queries fails the test.
fn run_within_a_minute(test: impl Future<Output = ()> + Send + 'static) {
    let (done, is_done) = mpsc::channel();
    let running = std::thread::spawn(move || {
        run(test);
        done.send(()).unwrap();
    });
    match is_done.recv_timeout(Duration::from_mins(1)) {
        Ok(()) | Err(mpsc::RecvTimeoutError::Disconnected) => running.join().unwrap(),
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("live queries are blocked"),
    }
}

/// The pool retains the message of a handler that panicked. The live thread must not wait until it is dropped.
#[test]
fn waker_panic_on_a_worker_does_not_stop_the_driver() {
    run_within_a_minute(async {
        let store = store(StoreOptions::default()).await;
        let live = Live::with_options(store.clone(), LiveOptions::default().workers(4));
        let mut all = Vec::new();
        for limit in 1..=100 {
            all.push(live.subscribe(query(&json!({"limit": limit})), Mode::Delta).await.unwrap());
        }
        for id in 0..3 {
            panics_when_woken(&mut all[10]);
            panics_when_woken(&mut all[99]);
            store.insert("b", json!({"id": id})).await.unwrap();
            live.settled().await.unwrap();
            for (index, subscription) in all.iter_mut().enumerate() {
                let event = subscription.try_next().unwrap();
                // Results with a smaller limit are full and do not change.
                assert_eq!(matches!(event, Some(Event::Delta { .. })), index as u64 >= id, "subscriber {index}");
            }
        }
    });
}

#[test]
fn waker_panic_on_the_live_thread_does_not_end_live_queries() {
    run_within_a_minute(async {
        let store = store(StoreOptions::default()).await;
        let live = Live::new(store.clone());
        let mut delta = live.subscribe(query(&json!({})), Mode::Delta).await.unwrap();
        let mut snapshot = live.subscribe(query(&json!({})), Mode::Snapshot).await.unwrap();
        let mut other = live.subscribe(query(&json!({})), Mode::Delta).await.unwrap();
        panics_when_woken(&mut delta);
        panics_when_woken(&mut snapshot);
        store.insert("b", json!({"id": 1})).await.unwrap();
        live.settled().await.unwrap();
        for subscription in [&mut delta, &mut snapshot, &mut other] {
            assert!(subscription.try_next().unwrap().is_some());
        }
        // A caller whose waker panics at the reply.
        {
            let waker = Waker::from(Arc::new(Panics));
            let mut asking = pin!(live.settled());
            assert!(asking.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
            live.settled().await.unwrap();
        }
        // Wakers that panic at the end of all subscriptions.
        panics_when_woken(&mut delta);
        panics_when_woken(&mut snapshot);
        drop(live);
        for subscription in [&mut delta, &mut snapshot, &mut other] {
            assert!(subscription.next().await.is_err());
        }
    });
}
