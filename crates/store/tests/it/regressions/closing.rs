//! Closing a store.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};

use super::store;

#[test]
fn concurrent_close_waits_until_closed() {
    let store = store(&[]);
    let is_written = Arc::new(AtomicBool::new(false));
    let (release, released) = mpsc::channel::<()>();
    let written = Arc::clone(&is_written);
    let pending = store.write(move |_| {
        // Continues even if the sender was dropped.
        let _ = released.recv();
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
        // A `close` that does not wait would return during this time.
        for _ in 0..1000 {
            std::thread::yield_now();
        }
        drop(release);
        assert!(closers.into_iter().all(|closer| closer.join().unwrap()), "close returned before the write was done");
    });
    pending.wait().unwrap();
}
