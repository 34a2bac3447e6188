//! Sleeping workers, and how they are woken without losing a message.
//!
//! A worker without work first *searches*, then sleeps. A submitter wakes a sleeping worker only if no worker is searching. The
//! last searcher that finds work looks at every queue, and wakes the next worker if there is more. So a burst wakes one worker
//! after the other, and a trickle wakes one.
//!
//! No wake-up is lost. A worker announces its sleep *before* it looks at every queue a last time, and it looks under the lock of
//! each queue. A submitter adds work under that lock, and reads the counts after it has taken the lock. One of the two critical
//! sections comes first: if the submitter's, the worker finds the work; if the worker's, the submitter sees the announcement and
//! wakes it. A searcher that a submitter relied upon looks at the queues once more: before it sleeps, or, as the last searcher,
//! after it has found work.

use std::time::Duration;

use crate::sync::{AtomicBool, AtomicUsize, Condvar, Mutex, Ordering::SeqCst, lock};

pub(crate) struct Idle {
    searching: AtomicUsize,
    sleeping: AtomicUsize,
    /// Who sleeps; `asleep` and `sleeping` change only under this lock.
    sleepers: Mutex<Vec<usize>>,
    workers: Vec<Parker>,
}

struct Parker {
    asleep: AtomicBool,
    woken: Mutex<bool>,
    bell: Condvar,
}

impl Idle {
    /// All workers begin as searchers.
    pub(crate) fn new(workers: usize) -> Self {
        let parker = || Parker { asleep: AtomicBool::new(false), woken: Mutex::new(false), bell: Condvar::new() };
        Self {
            searching: AtomicUsize::new(workers),
            sleeping: AtomicUsize::new(0),
            sleepers: Mutex::new(Vec::with_capacity(workers)),
            workers: (0..workers).map(|_| parker()).collect(),
        }
    }

    /// Whether work that anybody can do needs somebody woken. To be asked after taking the lock of the queue it is in.
    pub(crate) fn lacks_searchers(&self) -> bool {
        self.sleeping.load(SeqCst) > 0 && self.searching.load(SeqCst) == 0
    }

    /// Whether this worker sleeps. To be asked after taking the lock of its queue.
    pub(crate) fn sleeps(&self, worker: usize) -> bool {
        self.workers[worker].asleep.load(SeqCst)
    }

    /// Wakes this worker, if it sleeps.
    pub(crate) fn wake(&self, worker: usize) {
        let mut sleepers = lock(&self.sleepers);
        if let Some(position) = sleepers.iter().position(|&sleeper| sleeper == worker) {
            sleepers.swap_remove(position);
            self.up(worker);
        }
    }

    /// Wakes this worker if it sleeps, else any other that does.
    pub(crate) fn wake_any(&self, preferred: usize) {
        let mut sleepers = lock(&self.sleepers);
        let position = sleepers.iter().position(|&sleeper| sleeper == preferred);
        let woken = match position {
            Some(position) => Some(sleepers.swap_remove(position)),
            None => sleepers.pop(),
        };
        if let Some(worker) = woken {
            self.up(worker);
        }
    }

    pub(crate) fn wake_all(&self) {
        for worker in lock(&self.sleepers).drain(..) {
            self.up(worker);
        }
    }

    /// With the lock on `sleepers` held. The woken worker searches.
    fn up(&self, worker: usize) {
        let parker = &self.workers[worker];
        parker.asleep.store(false, SeqCst);
        self.searching.fetch_add(1, SeqCst);
        self.sleeping.fetch_sub(1, SeqCst);
        *lock(&parker.woken) = true;
        parker.bell.notify_one();
    }

    /// A worker that had work looks for more.
    pub(crate) fn search(&self) {
        self.searching.fetch_add(1, SeqCst);
    }

    /// A searcher has found work. Returns whether it was the last one.
    pub(crate) fn found(&self) -> bool {
        self.searching.fetch_sub(1, SeqCst) == 1
    }

    /// A searcher is about to sleep; it has a last look at every queue before it does.
    pub(crate) fn announce_sleep(&self, worker: usize) {
        let mut sleepers = lock(&self.sleepers);
        sleepers.push(worker);
        self.workers[worker].asleep.store(true, SeqCst);
        self.sleeping.fetch_add(1, SeqCst);
        self.searching.fetch_sub(1, SeqCst);
    }

    /// The last look found something: a searcher again, unless somebody has woken it already.
    pub(crate) fn cancel_sleep(&self, worker: usize) {
        self.wake(worker);
        *lock(&self.workers[worker].woken) = false;
    }

    /// Sleeps until woken or until the time is over. It wakes up as a searcher.
    pub(crate) fn sleep(&self, worker: usize, at_most: Option<Duration>) {
        let parker = &self.workers[worker];
        let mut woken = lock(&parker.woken);
        match at_most {
            None => {
                while !*woken {
                    woken = parker.bell.wait(woken).unwrap_or_else(std::sync::PoisonError::into_inner);
                }
            }
            Some(time) => {
                if !*woken {
                    woken = parker.bell.wait_timeout(woken, time).unwrap_or_else(std::sync::PoisonError::into_inner).0;
                }
            }
        }
        drop(woken);
        self.cancel_sleep(worker);
    }
}
