//! Closing a store.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};

use super::store;

#[test]
fn concurrent_close_waits_until_closed() {
    let store = store(&[]);
    let is_written = Arc::new(AtomicBool::new(false));
    let (go_on, told) = mpsc::channel::<()>();
    let written = Arc::clone(&is_written);
    let pending = store.write(move |_| {
        // Continues even if the receiver is gone.
        let _ = told.recv();
        written.store(true, Ordering::SeqCst);
        Ok(())
    });
    std::thread::scope(|scope| {
        let closers: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    store.close().unwrap();
                    is_written.load(Ordering::SeqCst)
                })
            })
            .collect();
        // Repeated, because the race is rare.
        for _ in 0..1000 {
            std::thread::yield_now();
        }
        drop(go_on);
        assert!(closers.into_iter().all(|closer| closer.join().unwrap()), "one was told too soon");
    });
    pending.wait().unwrap();
}
