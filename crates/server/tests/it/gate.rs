//! A programmatic query that a test can stop in the middle of its computation.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex};

use serde_json::{Map, Value as Json, json};
use tidewire::{ProgrammaticQuery, RequestError, View};
use tidewire_store::Answer;

/// Blocks computations while it is shut.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    is_shut: Mutex<bool>,
    opened: Condvar,
    waiting: AtomicUsize,
}

impl Gate {
    /// Shuts it until the guard is dropped, also if the test fails: a computation that waits would stop the runtime from ending.
    pub(crate) fn shut(&self) -> Shut<'_> {
        *self.is_shut.lock().unwrap() = true;
        Shut(self)
    }

    /// The number of computations that wait for it to open.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.load(SeqCst)
    }

    /// Waits while it is shut.
    pub(crate) fn pass(&self) {
        let mut is_shut = self.is_shut.lock().unwrap();
        if *is_shut {
            self.waiting.fetch_add(1, SeqCst);
            while *is_shut {
                is_shut = self.opened.wait(is_shut).unwrap();
            }
            self.waiting.fetch_sub(1, SeqCst);
        }
    }
}

/// Keeps a gate shut.
pub(crate) struct Shut<'a>(&'a Gate);

impl Drop for Shut<'_> {
    fn drop(&mut self) {
        *self.0.is_shut.lock().unwrap() = false;
        self.0.opened.notify_all();
    }
}

/// Returns the records of a bucket that the caller may see, once the gate is open.
#[derive(Debug)]
pub(crate) struct Gated {
    pub(crate) bucket: &'static str,
    pub(crate) gate: Arc<Gate>,
    /// If it is given, only results whose first record has this owner wait for the gate.
    pub(crate) owner: Option<&'static str>,
}

impl ProgrammaticQuery for Gated {
    fn buckets(&self) -> Vec<String> {
        vec![self.bucket.to_owned()]
    }

    fn answer(&self, view: &View<'_>, _: &Map<String, Json>) -> Result<Json, RequestError> {
        let Answer::Records(records) = view.query(&json!({"bucket": self.bucket}))? else { return Ok(Json::Null) };
        let has_owner = |owner| records.first().is_some_and(|first| first["owner"] == owner);
        if self.owner.is_none_or(has_owner) {
            self.gate.pass();
        }
        Ok(json!(records))
    }
}
