//! Arbitrary fragments, in arbitrary pieces: no panic, bounded memory, and the same messages or error as in one piece.

#![no_main]

use libfuzzer_sys::fuzz_target;
use tidewire_conn::codec::{FragmentOptions, Fragmented, LengthDelimited, LengthDelimitedOptions, LengthPrefix};
use tidewire_fuzz::{decode_pieces, split};

fuzz_target!(|data: &[u8]| {
    let Some(([max_message, max_assemblies, max_held], sizes, wire)) = split(data) else { return };
    // A length prefix of one byte, so that the fuzzer finds complete fragments quickly.
    let inner = LengthDelimitedOptions::default().prefix(LengthPrefix::One).max_frame(255);
    let options = FragmentOptions::default()
        .max_message(usize::from(max_message))
        .max_assemblies(usize::from(max_assemblies % 4))
        .max_held(usize::from(max_held));
    let codec = || Fragmented::new(LengthDelimited::new(inner).expect("the limit fits the prefix"), options);
    let max_capacity = 255 + 1 + 4096;
    let whole = decode_pieces(codec(), wire, &[], usize::MAX);
    assert_eq!(whole, decode_pieces(codec(), wire, &sizes, max_capacity));
    assert_eq!(whole, decode_pieces(codec(), wire, &[1], max_capacity));
    let longest: usize = whole.0.frames.iter().map(tidewire_conn::Frame::len).max().unwrap_or(0);
    assert!(longest <= options.max_message, "a message of {longest} bytes exceeds the limit");
});
