//! Arbitrary bytes, in arbitrary pieces: no panic, bounded memory, and the same frames or error as in one piece.

#![no_main]

use libfuzzer_sys::fuzz_target;
use tidewire_conn::codec::{ByteOrder, LengthDelimited, LengthDelimitedOptions, LengthPrefix};
use tidewire_fuzz::{decode_pieces, split};

fuzz_target!(|data: &[u8]| {
    let Some(([prefix, order, max_frame], sizes, wire)) = split(data) else { return };
    let prefix = match prefix % 4 {
        0 => LengthPrefix::One,
        1 => LengthPrefix::Two,
        2 => LengthPrefix::Four,
        _ => LengthPrefix::Eight,
    };
    let order = if order % 2 == 0 { ByteOrder::Big } else { ByteOrder::Little };
    let options = LengthDelimitedOptions::default().prefix(prefix).order(order).max_frame(usize::from(max_frame) + 1);
    let Ok(codec) = LengthDelimited::new(options) else { return };
    let max_capacity = options.max_frame + 8 + 4096;
    let whole = decode_pieces(codec.clone(), wire, &[], usize::MAX);
    assert_eq!(whole, decode_pieces(codec.clone(), wire, &sizes, max_capacity));
    assert_eq!(whole, decode_pieces(codec, wire, &[1], max_capacity));
});
