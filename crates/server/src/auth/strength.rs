//! An estimate of the strength of static tokens.

use std::collections::BTreeSet;

/// Weaker tokens cause a warning. 128 bits cannot be guessed at any rate of attempts.
pub(crate) const MIN_TOKEN_BITS: u32 = 128;

/// A token with fewer distinct characters is assumed to be drawn from these characters only.
const MIN_DISTINCT_CHARACTERS: usize = 8;

/// Returns the strength of a token in bits, assuming that its characters are random: their number times the bits per character of
/// their alphabet. This is an upper bound, because a phrase or date is not random.
///
/// The alphabet is the smallest of these that contains all letters and digits of the token: digits, hexadecimal digits, letters of
/// one case, letters of one case and digits, base64. Except for base64, other characters are separators, as in a UUID, and do not
/// count. A token with fewer than eight distinct characters, such as `aaaa…`, has only these as its alphabet.
pub(crate) fn strength_bits(token: &str) -> u32 {
    let is = |class: fn(char) -> bool| token.chars().filter(char::is_ascii_alphanumeric).all(class);
    let (count_all, count) = (token.chars().count(), token.chars().filter(char::is_ascii_alphanumeric).count());
    let (alphabet, len) = if !token.is_ascii() {
        (64, count_all)
    } else if is(|c| c.is_ascii_digit()) {
        (10, count)
    } else if is(|c| matches!(c, '0'..='9' | 'a'..='f')) || is(|c| matches!(c, '0'..='9' | 'A'..='F')) {
        (16, count)
    } else if is(|c| c.is_ascii_lowercase()) || is(|c| c.is_ascii_uppercase()) {
        (26, count)
    } else if is(|c| !c.is_ascii_uppercase()) || is(|c| !c.is_ascii_lowercase()) {
        (36, count)
    } else {
        (64, count_all)
    };
    let distinct = token.chars().collect::<BTreeSet<_>>().len();
    let (alphabet, len) =
        if distinct < MIN_DISTINCT_CHARACTERS { (distinct.max(1), count_all) } else { (alphabet, len) };
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "an estimate of a small positive number"
    )]
    let bits = (len as f64 * (alphabet as f64).log2()) as u32;
    bits
}

#[cfg(test)]
mod tests {
    use base64::Engine as _;
    use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
    use ring::digest::{SHA256, digest};

    use super::*;

    /// Returns the pseudorandom bytes of a number. The same in every run: one random base64 token of 22 characters in 50 000 has no
    /// upper-case or no lower-case letter, and is estimated too low.
    fn random<const N: usize>(number: u32) -> [u8; N] {
        std::array::from_fn(|index| digest(&SHA256, &number.to_le_bytes()).as_ref()[index])
    }

    fn hex(bytes: &[u8]) -> String {
        bytes
            .iter()
            .flat_map(|byte| [byte >> 4, byte & 15])
            .map(|digit| char::from(b"0123456789abcdef"[usize::from(digit)]))
            .collect()
    }

    #[test]
    fn random_tokens_of_128_bits_are_strong_enough() {
        for number in 0..1000 {
            let bytes = random::<16>(number);
            let hex = hex(&bytes);
            let uuid = format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]);
            for token in [
                hex.to_uppercase(),
                hex,
                uuid,
                URL_SAFE_NO_PAD.encode(bytes),
                STANDARD.encode(bytes),
                self::hex(&random::<32>(number)),
            ] {
                assert!(strength_bits(&token) >= MIN_TOKEN_BITS, "{token} {}", strength_bits(&token));
            }
        }
    }

    #[test]
    fn short_tokens_words_and_repetitions_are_weak() {
        for (token, bits) in [
            ("", 0),
            ("a", 0),
            ("7", 0),
            ("secret", 13),
            ("1f0c8a52", 32),
            ("123456789", 29),
            ("correct-horse-battery", 89),
            ("Tr0ub4dor&3", 66),
            ("ключ от моря", 72),
        ] {
            assert_eq!(strength_bits(token), bits, "{token}");
        }
        for token in ["a".repeat(1000), "ab".repeat(60), hex(&random::<15>(0)), URL_SAFE_NO_PAD.encode(random::<15>(0))]
        {
            assert!(strength_bits(&token) < MIN_TOKEN_BITS, "{token}");
        }
    }
}
