//! Masking: a client XORs its payloads with random keys, so that a web page cannot choose the bytes on the wire.

/// The key of a frame.
pub(super) type Key = [u8; 4];

/// Returns the key for the bytes that follow `n` bytes masked with `key`.
#[expect(clippy::cast_possible_truncation, reason = "only the lowest two bits matter")]
pub(super) fn after(key: Key, n: usize) -> Key {
    u32::from_le_bytes(key).rotate_right((n & 3) as u32 * 8).to_le_bytes()
}

/// Masks or unmasks in place. Returns whether the result is ASCII, which is almost free to find out here.
pub(super) fn apply(bytes: &mut [u8], key: Key) -> bool {
    match bytes.len() {
        8.. => apply_words(bytes, key),
        4.. => {
            // Two words of four bytes, which may overlap: both are read before either is written.
            let last = bytes.len() - 4;
            let low = word32(&bytes[..4]) ^ u32::from_le_bytes(key);
            let high = word32(&bytes[last..]) ^ u32::from_le_bytes(after(key, last));
            bytes[..4].copy_from_slice(&low.to_le_bytes());
            bytes[last..].copy_from_slice(&high.to_le_bytes());
            (low | high) & 0x8080_8080 == 0
        }
        _ => {
            let mut seen = 0;
            for (byte, key) in bytes.iter_mut().zip(key) {
                *byte ^= key;
                seen |= *byte;
            }
            seen.is_ascii()
        }
    }
}

/// Masks at least eight bytes in words of eight, in a loop that the compiler vectorizes.
fn apply_words(bytes: &mut [u8], key: Key) -> bool {
    // The last word may overlap with one in the loop, so it is read before the loop and written after it.
    let start = bytes.len() - 8;
    let last = word64(&bytes[start..]) ^ wide(after(key, start));
    let key = wide(key);
    let mut seen = last;
    for word in bytes.as_chunks_mut::<8>().0 {
        let plain = u64::from_le_bytes(*word) ^ key;
        seen |= plain;
        *word = plain.to_le_bytes();
    }
    bytes[start..].copy_from_slice(&last.to_le_bytes());
    seen & 0x8080_8080_8080_8080 == 0
}

/// Repeats the key to the width of a word.
fn wide(key: Key) -> u64 {
    u64::from(u32::from_le_bytes(key)) * 0x1_0000_0001
}

fn word32(bytes: &[u8]) -> u32 {
    u32::from_le_bytes(bytes.try_into().expect("four bytes"))
}

fn word64(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes.try_into().expect("eight bytes"))
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn bytewise(bytes: &[u8], key: Key) -> Vec<u8> {
        bytes.iter().zip(key.iter().cycle()).map(|(byte, key)| byte ^ key).collect()
    }

    proptest! {
        #[test]
        fn masking_in_chunks_gives_the_same_bytes(
            bytes in prop_oneof![vec(any::<u8>(), 0..40), vec(any::<u8>(), 0..400)],
            key in any::<Key>(),
            cut in any::<prop::sample::Index>(),
        ) {
            let expected = bytewise(&bytes, key);
            let mut whole = bytes.clone();
            prop_assert_eq!(apply(&mut whole, key), expected.is_ascii());
            prop_assert_eq!(&whole, &expected);

            let mut pieces = bytes;
            let (one, two) = pieces.split_at_mut(cut.index(expected.len() + 1));
            apply(one, key);
            apply(two, after(key, one.len()));
            prop_assert_eq!(&pieces, &expected);
        }
    }

    #[test]
    fn ascii_is_detected_at_every_length_and_position() {
        let key = [0x80, 0x7f, 0xff, 0x01];
        for len in 0..70 {
            let plain = vec![b'a'; len];
            assert!(apply(&mut bytewise(&plain, key), key));
            for at in 0..len {
                let mut plain = plain.clone();
                plain[at] = 0x80;
                let mut masked = bytewise(&plain, key);
                assert!(!apply(&mut masked, key));
                assert_eq!(masked, plain);
            }
        }
    }
}
