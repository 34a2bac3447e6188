//! Background threads for long work: evaluating queries, reading the history, encoding large results.
//!
//! A job has no access to the driver's state. Its output goes back to the driver. Only the driver changes results and delivers events,
//! so events stay in order.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;

use tidewire_pool::{BuildError, Context, Key, Message, Pool};

use crate::evaluation::{Evaluated, EvaluationError};
use crate::query::{QueryResult, ResultTooLarge};
use crate::resume::{HistoryUnavailable, MissedChanges};
use crate::shared::LiveShared;

/// Identifies a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct JobId(u64);

/// The output of a job.
#[derive(Debug)]
pub(crate) enum JobOutput {
    Evaluated(Result<Box<Evaluated>, EvaluationError>),
    Read(Result<MissedChanges, HistoryUnavailable>),
    Encoded(Result<QueryResult, ResultTooLarge>),
    /// The job dropped a value.
    Discarded,
}

/// A job that has ended.
#[derive(Debug)]
pub(crate) struct FinishedJob {
    pub(crate) job: JobId,
    /// `None` if the job panicked.
    pub(crate) output: Option<JobOutput>,
}

type Run = Box<dyn FnOnce(&LiveShared) -> JobOutput + Send>;

/// A queued or running job. Dropping it reports its end to the driver, even after a panic.
struct Task {
    id: JobId,
    run: Option<Run>,
    output: Option<JobOutput>,
    shared: Arc<LiveShared>,
}

impl Drop for Task {
    fn drop(&mut self) {
        self.shared.finish(FinishedJob { job: self.id, output: self.output.take() });
    }
}

/// A pool of background threads.
pub(crate) struct Background {
    pool: Pool<Option<Task>>,
    shared: Arc<LiveShared>,
    /// Jobs that wait until the pool accepts them.
    backlog: VecDeque<(Key, Task)>,
}

impl Background {
    /// Limit of the jobs in the pool.
    const MAX_QUEUED: usize = 4096;
    /// Niceness of the threads, so that costly evaluations do not delay the live thread.
    const NICENESS: u8 = 10;

    pub(crate) fn new(name: &str, threads: usize, shared: Arc<LiveShared>) -> Result<Self, BuildError> {
        let handle = |message: &mut Message<Option<Task>>, _: &mut Context<'_, Option<Task>>| {
            // Moved out of the message, so that the task is dropped here even if the job panics.
            if let Some(mut task) = message.payload.take()
                && let Some(run) = task.run.take()
            {
                task.output = Some(run(&task.shared));
            }
            Ok::<(), Infallible>(())
        };
        let pool = Pool::builder().workers(threads).messages(Self::MAX_QUEUED).dead_letters(0).name(name);
        let pool = pool.niceness(Self::NICENESS);
        Ok(Self { pool: pool.start(handle)?, shared, backlog: VecDeque::new() })
    }

    /// Returns whether half of the capacity is used. New evaluations must then be rejected.
    pub(crate) fn is_full(&self) -> bool {
        !self.backlog.is_empty() || self.pool.depth() >= Self::MAX_QUEUED / 2
    }

    /// Submits a job. Jobs with the same key run one after the other.
    pub(crate) fn submit(&mut self, key: Key, run: impl FnOnce(&LiveShared) -> JobOutput + Send + 'static) -> JobId {
        let id = JobId(self.shared.next_id());
        let task = Task { id, run: Some(Box::new(run)), output: None, shared: Arc::clone(&self.shared) };
        self.backlog.push_back((key, task));
        self.submit_backlog();
        id
    }

    /// Moves jobs from the backlog to the pool, up to its capacity.
    pub(crate) fn submit_backlog(&mut self) {
        while let Some((key, task)) = self.backlog.pop_front() {
            if let Err(refused) = self.pool.try_submit(Message::new(key, Some(task))) {
                if let Some(task) = refused.into_message().payload {
                    self.backlog.push_front((key, task));
                }
                return;
            }
        }
    }
}
