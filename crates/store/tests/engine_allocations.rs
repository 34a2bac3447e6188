//! A commit does not allocate once its buffer has grown.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use tidewire_store::Cause;
use tidewire_store::engine::{Embedded, EmbeddedOptions, Engine, Write, WriteSet};

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: every method forwards its arguments to `System` unchanged and returns its result. Counting uses a thread-local cell
// without lazy initialization or destructor, so it neither allocates nor unwinds.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller upholds the contract of `System`, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn commit_does_not_allocate() {
    let dir = tempfile::tempdir().unwrap();
    let (mut engine, _) = Embedded::open(dir.path(), EmbeddedOptions::default(), |_| {}).unwrap();
    let writes = [Write { bucket: "users", key: b"key", row: Some(&[7; 256]) }; 64];
    let commits = [WriteSet { writes: &writes, at: 1, cause: Cause::of(2).next() }; 3];
    engine.commit(&commits).unwrap();
    let before = ALLOCATIONS.get();
    for _ in 0..20 {
        engine.commit(&commits).unwrap();
    }
    assert_eq!(ALLOCATIONS.get() - before, 0);
}
