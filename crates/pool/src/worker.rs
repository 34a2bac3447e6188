//! The loop of a worker thread: take a message, handle it, search for more, sleep.

use crate::engine::{Engine, Hand, Look};
use crate::sync::thread;

/// How often a worker looks for new work before it sleeps. Falling asleep and being woken costs both sides some
/// microseconds, so looking for about as long is never much worse, and much better under load. Each look takes the line of
/// the intake away from whoever submits, so they come ever less often, and find a batch rather than a message. The model
/// checker sees none of it.
const LOOKS: u32 = if cfg!(loom) { 0 } else { 24 };
/// The longest pause between two looks is two to this power; from then on another thread is let run in between.
const LONGEST: u32 = 7;

/// Runs until the pool is closed.
pub(crate) fn run<P: Send + 'static>(engine: &Engine<P>, home: usize) {
    let mut hand = Hand::of(home);
    let mut searching = true;
    while !engine.is_closed() {
        if let Some(envelope) = engine.next(home, &mut hand) {
            if std::mem::take(&mut searching) && engine.idle.found() {
                engine.hand_over(home);
            }
            engine.handle(envelope, &mut hand);
            continue;
        }
        engine.flush(&mut hand);
        if !std::mem::replace(&mut searching, true) {
            engine.idle.search();
        }
        if spin(engine, home) {
            continue;
        }
        engine.idle.announce_sleep(home);
        match engine.look(home) {
            Look::Work => engine.idle.cancel_sleep(home),
            Look::Later(time) => engine.idle.sleep(home, Some(time)),
            Look::Nothing => engine.idle.sleep(home, None),
        }
    }
    engine.settle(&mut hand);
    engine.flush(&mut hand);
    if searching {
        engine.idle.found();
    }
}

fn spin<P: Send + 'static>(engine: &Engine<P>, home: usize) -> bool {
    (0..LOOKS).any(|look| {
        for _ in 0..1 << look.min(LONGEST) {
            std::hint::spin_loop();
        }
        if look > 2 * LONGEST {
            thread::yield_now();
        }
        engine.smells_work(home)
    })
}
