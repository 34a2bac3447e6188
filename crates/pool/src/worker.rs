//! The loop of a worker thread: takes messages, handles them, searches for more, and sleeps.

use crate::engine::{Engine, NextWork, WorkerState};
use crate::sync::thread;

/// The number of checks for new work before a worker sleeps. Sleeping and waking cost the worker and the submitter some microseconds.
/// Spinning for about as long is never much worse, and much better under load. Each check takes the cache line of the intake away from
/// submitters, so the pauses between checks grow. This also lets a batch accumulate. Under the model checker, workers do not spin.
const MAX_CHECKS: u32 = if cfg!(loom) { 0 } else { 24 };
/// The longest pause between two checks, as a power of two of spins. After twice this number of checks the thread also yields.
const MAX_PAUSE_EXPONENT: u32 = 7;

/// Runs until the pool is closed.
pub(crate) fn run<P: Send + 'static>(engine: &Engine<P>, home: usize) {
    let mut state = WorkerState::of(home);
    let mut searching = true;
    while !engine.is_closed() {
        if let Some(envelope) = engine.next(home, &mut state) {
            if std::mem::take(&mut searching) && engine.idle.stop_search() {
                engine.wake_next(home);
            }
            engine.handle(envelope, &mut state);
            continue;
        }
        engine.flush(&mut state);
        if !std::mem::replace(&mut searching, true) {
            engine.idle.start_search();
        }
        if spin(engine, home) {
            continue;
        }
        engine.idle.announce_sleep(home);
        match engine.next_work(home) {
            NextWork::Now => engine.idle.cancel_sleep(home),
            NextWork::Later(time) => engine.idle.sleep(home, Some(time)),
            NextWork::Never => engine.idle.sleep(home, None),
        }
    }
    engine.complete(&mut state);
    engine.flush(&mut state);
    if searching {
        engine.idle.stop_search();
    }
}

/// Spins until there may be work. Returns false if no work arrived.
fn spin<P: Send + 'static>(engine: &Engine<P>, home: usize) -> bool {
    (0..MAX_CHECKS).any(|check| {
        for _ in 0..1 << check.min(MAX_PAUSE_EXPONENT) {
            std::hint::spin_loop();
        }
        if check > 2 * MAX_PAUSE_EXPONENT {
            thread::yield_now();
        }
        engine.may_have_work(home)
    })
}
