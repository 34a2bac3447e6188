//! An allocator that counts the memory of a process.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

static LIVE: AtomicUsize = AtomicUsize::new(0);
/// The largest value of `LIVE` since it was last reset.
static PEAK: AtomicUsize = AtomicUsize::new(0);

fn add(bytes: usize) {
    PEAK.fetch_max(LIVE.fetch_add(bytes, Relaxed) + bytes, Relaxed);
}

/// The system allocator, with a count of the bytes that are allocated and not freed. A test binary installs it and calls
/// [`live_bytes`](Self::live_bytes). Its tests must not run at the same time, because they share the count.
///
/// ```
/// use tidewire_testkit::CountingAllocator;
///
/// #[global_allocator]
/// static ALLOCATOR: CountingAllocator = CountingAllocator;
///
/// let before = ALLOCATOR.live_bytes();
/// let bytes = vec![0_u8; 1000];
/// assert!(ALLOCATOR.live_bytes() >= before + 1000);
/// drop(bytes);
/// ```
#[derive(Debug)]
pub struct CountingAllocator;

impl CountingAllocator {
    /// Returns the bytes that are allocated now, as requested, without the overhead of the allocator.
    pub fn live_bytes(&self) -> usize {
        LIVE.load(Relaxed)
    }

    /// Starts a new measurement of the peak. Returns the bytes that are allocated now.
    pub fn reset_peak(&self) -> usize {
        let live = self.live_bytes();
        PEAK.store(live, Relaxed);
        live
    }

    /// Returns the most bytes that were allocated at one time since the last [`reset_peak`](Self::reset_peak).
    pub fn peak_bytes(&self) -> usize {
        PEAK.load(Relaxed)
    }
}

// SAFETY: every method hands its arguments to `System` unchanged and returns what it returns; counting touches an atomic only,
// so it neither allocates nor unwinds.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller upholds the contract of `GlobalAlloc`, which `System` has too.
        let allocated = unsafe { System.alloc(layout) };
        if !allocated.is_null() {
            add(layout.size());
        }
        allocated
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: as above.
        let moved = unsafe { System.realloc(pointer, layout, size) };
        if !moved.is_null() {
            add(size);
            LIVE.fetch_sub(layout.size(), Relaxed);
        }
        moved
    }
}
