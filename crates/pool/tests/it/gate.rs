//! A handler that tests can block, and that records its messages.

use std::collections::HashSet;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, ThreadId};

use tidewire_pool::{Context, Handler, Message};
use tidewire_testkit::PATIENCE;

/// Records the payloads in the order in which they were handled. While it is closed, the handler blocks.
#[derive(Clone, Default)]
pub(crate) struct Gate<P>(Arc<GateState<P>>);

struct GateState<P> {
    is_closed: Mutex<bool>,
    changed: Condvar,
    handled: Mutex<Vec<P>>,
    threads: Mutex<HashSet<ThreadId>>,
    inside: Mutex<usize>,
}

impl<P> Default for GateState<P> {
    fn default() -> Self {
        Self {
            is_closed: Mutex::default(),
            changed: Condvar::new(),
            handled: Mutex::default(),
            threads: Mutex::default(),
            inside: Mutex::default(),
        }
    }
}

impl<P: Clone + Send + 'static> Gate<P> {
    pub(crate) fn opened() -> Self {
        Self(Arc::default())
    }

    pub(crate) fn closed() -> Self {
        let gate = Self::opened();
        gate.close();
        gate
    }

    pub(crate) fn close(&self) {
        *self.0.is_closed.lock().unwrap() = true;
    }

    pub(crate) fn open(&self) {
        *self.0.is_closed.lock().unwrap() = false;
        self.0.changed.notify_all();
    }

    /// Blocks while the gate is closed.
    pub(crate) fn pass(&self) {
        *self.0.inside.lock().unwrap() += 1;
        let mut is_closed = self.0.is_closed.lock().unwrap();
        while *is_closed {
            // A test that fails before it opens the gate must not hang when it drops its pool.
            let (guard, time) = self.0.changed.wait_timeout(is_closed, PATIENCE).unwrap();
            assert!(!time.timed_out(), "the gate was not opened in time");
            is_closed = guard;
        }
        drop(is_closed);
        *self.0.inside.lock().unwrap() -= 1;
    }

    /// Returns the handled payloads, in order.
    pub(crate) fn handled(&self) -> Vec<P> {
        self.0.handled.lock().unwrap().clone()
    }

    /// Returns the number of threads that have handled a message.
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
        self.0.handled.lock().unwrap().push(message.payload.clone());
        Ok(())
    }
}
