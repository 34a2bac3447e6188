//! A handler that tests can block, and that records the messages it has handled.

use std::collections::HashSet;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, ThreadId};

use tidewire_pool::{Context, Handler, Message};
use tidewire_testkit::PATIENCE;

/// Records the payloads in the order in which they were handled. While it is shut, the handler blocks.
#[derive(Clone, Default)]
pub(crate) struct Gate<P>(Arc<GateState<P>>);

struct GateState<P> {
    shut: Mutex<bool>,
    opened: Condvar,
    seen: Mutex<Vec<P>>,
    threads: Mutex<HashSet<ThreadId>>,
    inside: Mutex<usize>,
}

impl<P> Default for GateState<P> {
    fn default() -> Self {
        Self {
            shut: Mutex::default(),
            opened: Condvar::new(),
            seen: Mutex::default(),
            threads: Mutex::default(),
            inside: Mutex::default(),
        }
    }
}

impl<P: Clone + Send + 'static> Gate<P> {
    pub(crate) fn open() -> Self {
        Self(Arc::default())
    }

    pub(crate) fn shut() -> Self {
        let gate = Self::open();
        *gate.0.shut.lock().unwrap() = true;
        gate
    }

    pub(crate) fn shut_again(&self) {
        *self.0.shut.lock().unwrap() = true;
    }

    pub(crate) fn lift(&self) {
        *self.0.shut.lock().unwrap() = false;
        self.0.opened.notify_all();
    }

    /// Blocks while the gate is shut.
    pub(crate) fn pass(&self) {
        *self.0.inside.lock().unwrap() += 1;
        let mut shut = self.0.shut.lock().unwrap();
        while *shut {
            // A test that fails before it lifts the gate must not hang when it drops its pool.
            let (guard, time) = self.0.opened.wait_timeout(shut, PATIENCE).unwrap();
            assert!(!time.timed_out(), "the gate was not lifted in time");
            shut = guard;
        }
        drop(shut);
        *self.0.inside.lock().unwrap() -= 1;
    }

    /// Returns the handled payloads, in order.
    pub(crate) fn seen(&self) -> Vec<P> {
        self.0.seen.lock().unwrap().clone()
    }

    pub(crate) fn threads(&self) -> usize {
        self.0.threads.lock().unwrap().len()
    }

    /// Returns the number of messages in the handler.
    pub(crate) fn inside(&self) -> usize {
        *self.0.inside.lock().unwrap()
    }
}

impl<P: Clone + Send + 'static> Handler<P> for Gate<P> {
    type Error = String;

    fn handle(&self, message: &mut Message<P>, _: &mut Context<'_, P>) -> Result<(), String> {
        self.pass();
        self.0.threads.lock().unwrap().insert(thread::current().id());
        self.0.seen.lock().unwrap().push(message.payload.clone());
        Ok(())
    }
}
