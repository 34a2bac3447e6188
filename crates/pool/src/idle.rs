//! Sleeping workers, and how they are woken without losing a message.
//!
//! A worker without work first *searches* and then sleeps. A submitter wakes a sleeping worker only if no worker is searching. If the
//! last searcher finds work, it checks every queue, and wakes another worker if there is more. So a burst wakes one worker after the
//! other, and a single message wakes only one.
//!
//! No wake-up is lost. A worker announces its sleep *before* it checks every queue a last time, under the lock of each queue. A
//! submitter adds work under that lock, and reads the counts before it releases the lock. One of the two critical sections comes first:
//! if it is the submitter's, the worker finds the work; if it is the worker's, the submitter sees the announcement and wakes the
//! worker. A submitter that sees a searcher wakes no worker: the searcher checks the queues again before it sleeps, or, if it is the
//! last searcher, after it has found work.

use std::time::Duration;

use crate::sync::{AtomicBool, AtomicUsize, Condvar, Mutex, Ordering::SeqCst, lock};

/// The searching and sleeping workers of a pool.
pub(crate) struct Idle {
    searching: AtomicUsize,
    sleeping: AtomicUsize,
    /// The sleeping workers. `asleep` and `sleeping` change only under this lock.
    sleepers: Mutex<Vec<usize>>,
    workers: Vec<Parker>,
}

struct Parker {
    asleep: AtomicBool,
    woken: Mutex<bool>,
    condvar: Condvar,
}

impl Idle {
    /// Creates the state for workers that all start as searchers.
    pub(crate) fn new(workers: usize) -> Self {
        let parker = || Parker { asleep: AtomicBool::new(false), woken: Mutex::new(false), condvar: Condvar::new() };
        Self {
            searching: AtomicUsize::new(workers),
            sleeping: AtomicUsize::new(0),
            sleepers: Mutex::new(Vec::with_capacity(workers)),
            workers: (0..workers).map(|_| parker()).collect(),
        }
    }

    /// Returns whether a worker must be woken for new work that any worker may do. The caller must hold the lock of the queue.
    pub(crate) fn must_wake_worker(&self) -> bool {
        self.sleeping.load(SeqCst) > 0 && self.searching.load(SeqCst) == 0
    }

    /// Returns whether a worker sleeps. The caller must hold the lock of its queue.
    pub(crate) fn is_asleep(&self, worker: usize) -> bool {
        self.workers[worker].asleep.load(SeqCst)
    }

    /// Wakes a worker, if it sleeps.
    pub(crate) fn wake(&self, worker: usize) {
        let mut sleepers = lock(&self.sleepers);
        if let Some(position) = sleepers.iter().position(|&sleeper| sleeper == worker) {
            sleepers.swap_remove(position);
            self.unpark(worker);
        }
    }

    /// Wakes the preferred worker if it sleeps, or else any other sleeping worker.
    pub(crate) fn wake_any(&self, preferred: usize) {
        let mut sleepers = lock(&self.sleepers);
        let position = sleepers.iter().position(|&sleeper| sleeper == preferred);
        let woken = match position {
            Some(position) => Some(sleepers.swap_remove(position)),
            None => sleepers.pop(),
        };
        if let Some(worker) = woken {
            self.unpark(worker);
        }
    }

    pub(crate) fn wake_all(&self) {
        for worker in lock(&self.sleepers).drain(..) {
            self.unpark(worker);
        }
    }

    /// Wakes a worker, which becomes a searcher. The caller must hold the lock of `sleepers`.
    fn unpark(&self, worker: usize) {
        let parker = &self.workers[worker];
        parker.asleep.store(false, SeqCst);
        self.searching.fetch_add(1, SeqCst);
        self.sleeping.fetch_sub(1, SeqCst);
        *lock(&parker.woken) = true;
        parker.condvar.notify_one();
    }

    /// Registers a worker without work as a searcher.
    pub(crate) fn start_search(&self) {
        self.searching.fetch_add(1, SeqCst);
    }

    /// Registers that a searcher has found work. Returns whether it was the last searcher.
    pub(crate) fn stop_search(&self) -> bool {
        self.searching.fetch_sub(1, SeqCst) == 1
    }

    /// Registers a searcher as sleeping. It must check every queue again before it sleeps.
    pub(crate) fn announce_sleep(&self, worker: usize) {
        let mut sleepers = lock(&self.sleepers);
        sleepers.push(worker);
        self.workers[worker].asleep.store(true, SeqCst);
        self.sleeping.fetch_add(1, SeqCst);
        self.searching.fetch_sub(1, SeqCst);
    }

    /// Registers the worker as a searcher again, unless another thread has woken it.
    pub(crate) fn cancel_sleep(&self, worker: usize) {
        self.wake(worker);
        *lock(&self.workers[worker].woken) = false;
    }

    /// Sleeps until woken or until the timeout. The worker is a searcher afterwards.
    pub(crate) fn sleep(&self, worker: usize, at_most: Option<Duration>) {
        let parker = &self.workers[worker];
        let mut woken = lock(&parker.woken);
        match at_most {
            None => {
                while !*woken {
                    woken = parker.condvar.wait(woken).unwrap_or_else(std::sync::PoisonError::into_inner);
                }
            }
            Some(time) => {
                if !*woken {
                    woken =
                        parker.condvar.wait_timeout(woken, time).unwrap_or_else(std::sync::PoisonError::into_inner).0;
                }
            }
        }
        drop(woken);
        self.cancel_sleep(worker);
    }
}
