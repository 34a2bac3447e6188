//! Counts allocations and the bytes they hold, with a wrapper around the allocator of our binaries. Every program that links this
//! crate uses it, and so does every contender.
//!
//! It counts only on request. Timed rounds pay one load of a flag that never changes, and contenders on several threads do not
//! contend for a counter.

use std::alloc::{GlobalAlloc, Layout};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::Relaxed};

use mimalloc::MiMalloc;

static COUNTING: AtomicBool = AtomicBool::new(false);
static COUNT: AtomicU64 = AtomicU64::new(0);
static HELD: AtomicI64 = AtomicI64::new(0);

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Runs `work` and counts the allocations, growths included, that all threads of this process made meanwhile.
///
/// There is one counter: two counts at the same time disturb each other.
pub fn count_allocations<T>(work: impl FnOnce() -> T) -> (T, u64) {
    let before = COUNT.load(Relaxed);
    COUNTING.store(true, Relaxed);
    let result = work();
    COUNTING.store(false, Relaxed);
    (result, COUNT.load(Relaxed) - before)
}

/// Runs `work` and counts the bytes that all threads of this process allocated meanwhile, less those that they freed. Bytes are
/// those that were asked for.
///
/// Like allocations, they are counted by one at a time.
pub fn count_bytes<T>(work: impl FnOnce() -> T) -> (T, i64) {
    let before = HELD.load(Relaxed);
    COUNTING.store(true, Relaxed);
    let result = work();
    COUNTING.store(false, Relaxed);
    (result, HELD.load(Relaxed) - before)
}

struct Counting;

impl Counting {
    /// Notes so many allocations, and how many bytes more are held.
    fn note(allocations: u64, bytes: isize) {
        if COUNTING.load(Relaxed) {
            COUNT.fetch_add(allocations, Relaxed);
            HELD.fetch_add(bytes as i64, Relaxed);
        }
    }
}

// SAFETY: every method hands its arguments to `MiMalloc` unchanged and returns what it returns; `note` touches atomics only,
// so it neither allocates nor unwinds.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        Self::note(1, layout.size().cast_signed());
        // SAFETY: the caller keeps the contract of `GlobalAlloc::alloc`, which is that of `MiMalloc`.
        unsafe { MiMalloc.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        Self::note(1, layout.size().cast_signed());
        // SAFETY: as in `alloc`.
        unsafe { MiMalloc.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        Self::note(1, size.cast_signed() - layout.size().cast_signed());
        // SAFETY: as in `alloc`; `block` came from `MiMalloc`, because every block does.
        unsafe { MiMalloc.realloc(block, layout, size) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        Self::note(0, -layout.size().cast_signed());
        // SAFETY: as in `realloc`.
        unsafe { MiMalloc.dealloc(block, layout) }
    }
}
