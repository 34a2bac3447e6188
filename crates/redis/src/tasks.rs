//! The background tasks of a client: its connections besides the shared one, and the work that outlives a caller.
//!
//! They run in the driver of the client ([`Connection`](crate::Connection)), so that they end with it and none is detached.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;

use tokio::sync::Notify;
use tokio::task::{JoinError, JoinSet};

use crate::sync::{Mutex, lock};

type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Starts background tasks.
#[derive(Clone)]
pub(crate) struct Tasks {
    shared: Arc<TasksShared>,
}

struct TasksShared {
    /// Tasks that the runner has not started yet. `None` once the runner has ended.
    submitted: Mutex<Option<Vec<Task>>>,
    added: Notify,
}

/// Runs the tasks. Dropping it aborts them.
pub(crate) struct TaskRunner {
    shared: Arc<TasksShared>,
    running: JoinSet<()>,
}

impl Tasks {
    pub(crate) fn new() -> (Self, TaskRunner) {
        let shared = Arc::new(TasksShared { submitted: Mutex::new(Some(Vec::new())), added: Notify::new() });
        (Self { shared: Arc::clone(&shared) }, TaskRunner { shared, running: JoinSet::new() })
    }

    /// Starts a task on the runtime of the driver. Returns false, and drops the task, if the driver has ended.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> bool {
        let mut submitted = lock(&self.shared.submitted);
        let Some(tasks) = &mut *submitted else { return false };
        tasks.push(Box::pin(task));
        drop(submitted);
        self.shared.added.notify_one();
        true
    }
}

impl TaskRunner {
    /// Runs tasks until the future is dropped. It is cancellation safe.
    pub(crate) async fn run(&mut self) -> Infallible {
        loop {
            self.start_submitted();
            tokio::select! {
                () = self.shared.added.notified() => {}
                Some(ended) = self.running.join_next() => log_panic(ended),
            }
        }
    }

    /// Runs tasks until all have ended. It is cancellation safe.
    pub(crate) async fn finish(&mut self) {
        loop {
            self.start_submitted();
            tokio::select! {
                () = self.shared.added.notified() => {}
                ended = self.running.join_next() => match ended {
                    Some(ended) => log_panic(ended),
                    None => return,
                },
            }
        }
    }

    /// Aborts all tasks, and returns when they have been dropped. No other task is started.
    pub(crate) async fn abort(&mut self) {
        self.reject();
        self.running.shutdown().await;
    }

    fn reject(&self) {
        // Dropped outside of the critical section: a task may hold a handle that starts another one when it is dropped.
        let submitted = lock(&self.shared.submitted).take();
        drop(submitted);
    }

    fn start_submitted(&mut self) {
        let tasks = lock(&self.shared.submitted).as_mut().map(std::mem::take).unwrap_or_default();
        for task in tasks {
            self.running.spawn(task);
        }
    }
}

impl Drop for TaskRunner {
    fn drop(&mut self) {
        self.reject();
    }
}

fn log_panic(ended: Result<(), JoinError>) {
    if let Err(error) = ended {
        tracing::error!(%error, "background task of a Redis client panicked");
    }
}
