//! Tests that the counters of allocations and bytes are exact. There is no test harness, because it allocates at any time.

use std::hint::black_box;
use std::thread;

use tidewire_bench::{count_allocations, count_bytes};

fn main() {
    let ((), none) = count_allocations(|| {
        black_box([0_u8; 64]);
    });
    assert_eq!(none, 0);

    let mut boxes = Vec::with_capacity(1000);
    let ((), some) = count_allocations(|| boxes.extend((0..1000).map(|number| Box::new(black_box(number)))));
    assert_eq!(some, 1000);

    let ((), grown) = count_allocations(|| boxes.reserve_exact(1000));
    assert_eq!(grown, 1);

    black_box(vec![0_u8; 64]);
    let ((), dropped) = count_allocations(|| drop(boxes));
    assert_eq!(dropped, 0, "neither earlier allocations nor frees are counted");

    // Starting a thread allocates too, the same number of times each time.
    let on_a_thread = |boxes: u64| {
        let work = move || (0..boxes).for_each(|number| drop(black_box(Box::new(number))));
        count_allocations(|| thread::spawn(work).join().unwrap()).1
    };
    on_a_thread(0);
    assert_eq!(on_a_thread(1000) - on_a_thread(0), 1000, "other threads count");

    let (mut bytes, held) = count_bytes(|| {
        drop(black_box(vec![0_u8; 4000]));
        let mut bytes = Vec::<u8>::with_capacity(100);
        bytes.push(1);
        bytes.reserve_exact(999);
        black_box(bytes)
    });
    assert_eq!(held, 1000, "reallocations count, and freed memory does not");
    let ((), less) = count_bytes(|| bytes.shrink_to(400));
    assert_eq!(less, -600);
    let ((), freed) = count_bytes(|| drop(bytes));
    assert_eq!(freed, -400);
    let (kept, elsewhere) = count_bytes(|| {
        let kept = Box::new([black_box(0_u8); 512]);
        thread::spawn(|| drop(kept)).join().unwrap();
    });
    let ((), nothing) = count_bytes(|| thread::spawn(|| ()).join().unwrap());
    assert_eq!((kept, elsewhere), ((), nothing), "other threads count");
}
