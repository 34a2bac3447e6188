//! Locking without poisoning, and what the model checker needs: its tests use its own locks.

use std::sync::PoisonError;

#[cfg(all(test, shuttle))]
pub(crate) use shuttle::sync::{Mutex, MutexGuard};
#[cfg(not(all(test, shuttle)))]
pub(crate) use std::sync::{Mutex, MutexGuard};

/// Locks a mutex, also after a panic in another critical section. No critical section of this crate runs code of a caller, and
/// each leaves its data consistent at every step that could panic.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Lets the model checker switch threads before a call that it does not know, such as one of tokio. It does nothing otherwise.
#[inline]
pub(crate) fn switch_point() {
    #[cfg(all(test, shuttle))]
    drop(lock(&Mutex::new(())));
}
