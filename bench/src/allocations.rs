//! Counts allocations and allocated bytes, by wrapping the global allocator. Every program that links this crate uses the wrapper, so
//! all contenders do.
//!
//! Counting is off by default. In a timed round, an allocation loads a flag that does not change, and threads do not contend for a
//! counter.

use std::alloc::{GlobalAlloc, Layout};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::Relaxed};

use mimalloc::MiMalloc;

static COUNTING: AtomicBool = AtomicBool::new(false);
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
static LIVE_BYTES: AtomicI64 = AtomicI64::new(0);

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Runs `work` and returns the number of allocations and reallocations that all threads of this process made meanwhile.
///
/// The counter is global, so concurrent calls count the allocations of each other.
pub fn count_allocations<T>(work: impl FnOnce() -> T) -> (T, u64) {
    let before = ALLOCATIONS.load(Relaxed);
    COUNTING.store(true, Relaxed);
    let result = work();
    COUNTING.store(false, Relaxed);
    (result, ALLOCATIONS.load(Relaxed) - before)
}

/// Runs `work` and returns the bytes that all threads of this process allocated meanwhile, minus the bytes that they freed. Counts the
/// requested sizes.
///
/// The counter is global, so concurrent calls count the allocations of each other.
pub fn count_bytes<T>(work: impl FnOnce() -> T) -> (T, i64) {
    let before = LIVE_BYTES.load(Relaxed);
    COUNTING.store(true, Relaxed);
    let result = work();
    COUNTING.store(false, Relaxed);
    (result, LIVE_BYTES.load(Relaxed) - before)
}

struct CountingAllocator;

impl CountingAllocator {
    /// Adds to the counters, if counting is on. `bytes` is negative if memory was freed.
    fn record(allocations: u64, bytes: isize) {
        if COUNTING.load(Relaxed) {
            ALLOCATIONS.fetch_add(allocations, Relaxed);
            LIVE_BYTES.fetch_add(bytes as i64, Relaxed);
        }
    }
}

// SAFETY: every method passes its arguments to `MiMalloc` unchanged and returns its result; `record` touches atomics only,
// so it neither allocates nor unwinds.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        Self::record(1, layout.size().cast_signed());
        // SAFETY: the caller upholds the contract of `GlobalAlloc::alloc`, which is that of `MiMalloc`.
        unsafe { MiMalloc.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        Self::record(1, layout.size().cast_signed());
        // SAFETY: as in `alloc`.
        unsafe { MiMalloc.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        Self::record(1, size.cast_signed() - layout.size().cast_signed());
        // SAFETY: as in `alloc`; `block` came from `MiMalloc`, because every block does.
        unsafe { MiMalloc.realloc(block, layout, size) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        Self::record(0, -layout.size().cast_signed());
        // SAFETY: as in `realloc`.
        unsafe { MiMalloc.dealloc(block, layout) }
    }
}
