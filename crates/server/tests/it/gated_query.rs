//! A programmatic query that a test can block during its computation.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex};

use serde_json::{Map, Value as Json, json};
use tidewire::{ProgrammaticQuery, RequestError, View};
use tidewire_store::QueryOutput;

/// Blocks computations while it is shut.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    is_shut: Mutex<bool>,
    opened: Condvar,
    waiting: AtomicUsize,
}

impl Gate {
    /// Shuts the gate until the guard is dropped, even if the test panics: a blocked computation would keep the runtime from
    /// shutting down.
    pub(crate) fn shut(&self) -> GateGuard<'_> {
        *self.is_shut.lock().unwrap() = true;
        GateGuard(self)
    }

    /// Returns the number of blocked computations.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.load(SeqCst)
    }

    /// Blocks while the gate is shut.
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
pub(crate) struct GateGuard<'a>(&'a Gate);

impl Drop for GateGuard<'_> {
    fn drop(&mut self) {
        *self.0.is_shut.lock().unwrap() = false;
        self.0.opened.notify_all();
    }
}

/// A query for the records of a bucket that the caller may see. It blocks while the gate is shut.
#[derive(Debug)]
pub(crate) struct GatedQuery {
    pub(crate) bucket: &'static str,
    pub(crate) gate: Arc<Gate>,
    /// If set, only results whose first record has this owner wait for the gate.
    pub(crate) owner: Option<&'static str>,
}

impl ProgrammaticQuery for GatedQuery {
    fn buckets(&self) -> Vec<String> {
        vec![self.bucket.to_owned()]
    }

    fn compute(&self, view: &View<'_>, _: &Map<String, Json>) -> Result<Json, RequestError> {
        let QueryOutput::Records(records) = view.query(&json!({"bucket": self.bucket}))? else { return Ok(Json::Null) };
        let has_owner = |owner| records.first().is_some_and(|first| first["owner"] == owner);
        if self.owner.is_none_or(has_owner) {
            self.gate.pass();
        }
        Ok(json!(records))
    }
}
