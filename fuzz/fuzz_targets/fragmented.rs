//! Any fragments, in any pieces: no panic, bounded memory, and the same messages or error as in one piece.

#![no_main]

use libfuzzer_sys::fuzz_target;
use tidewire_conn::codec::{FragmentOptions, Fragmented, LengthDelimited, LengthDelimitedOptions, LengthPrefix};
use tidewire_fuzz::{hear, split};

fuzz_target!(|data: &[u8]| {
    let Some(([max_message, max_assemblies, max_held], sizes, wire)) = split(data) else { return };
    // One byte, so that a fuzzer finds whole fragments soon.
    let inner = LengthDelimitedOptions::default().prefix(LengthPrefix::One).max_frame(255);
    let options = FragmentOptions::default()
        .max_message(usize::from(max_message))
        .max_assemblies(usize::from(max_assemblies % 4))
        .max_held(usize::from(max_held));
    let codec = || Fragmented::new(LengthDelimited::new(inner).expect("it fits the prefix"), options);
    let bound = 255 + 1 + 4096;
    let whole = hear(codec(), wire, &[], usize::MAX);
    assert_eq!(whole, hear(codec(), wire, &sizes, bound));
    assert_eq!(whole, hear(codec(), wire, &[1], bound));
    let held: usize = whole.0.frames.iter().map(tidewire_conn::Frame::len).max().unwrap_or(0);
    assert!(held <= options.max_message, "a message of {held} bytes");
});
