//! UTF-8 validation of text that arrives in pieces.

use std::str;

/// An incremental UTF-8 validator. It fails at the first invalid byte, not at the end of the chunk or of the text.
#[derive(Debug, Default)]
pub(super) struct Utf8 {
    /// The first `len` bytes are the beginning of an incomplete character.
    begun: [u8; 4],
    len: u8,
}

/// The bytes are not valid UTF-8.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct InvalidUtf8;

impl Utf8 {
    /// Checks the next chunk.
    pub(super) fn feed(&mut self, mut bytes: &[u8]) -> Result<(), InvalidUtf8> {
        while !self.is_complete() {
            let Some((&next, rest)) = bytes.split_first() else { return Ok(()) };
            bytes = rest;
            self.begun[usize::from(self.len)] = next;
            self.len += 1;
            match str::from_utf8(&self.begun[..usize::from(self.len)]) {
                Ok(_) => self.len = 0,
                Err(error) if error.error_len().is_none() => {}
                Err(_) => return Err(InvalidUtf8),
            }
        }
        match str::from_utf8(bytes) {
            Ok(_) => Ok(()),
            Err(error) if error.error_len().is_none() => {
                let begun = &bytes[error.valid_up_to()..];
                self.begun[..begun.len()].copy_from_slice(begun);
                // An incomplete character has at most three bytes.
                self.len = u8::try_from(begun.len()).map_err(|_| InvalidUtf8)?;
                Ok(())
            }
            Err(_) => Err(InvalidUtf8),
        }
    }

    /// Whether the text may end here, because no character is incomplete.
    pub(super) fn is_complete(&self) -> bool {
        self.len == 0
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    /// Returns the length of the shortest prefix of `bytes` that no valid text begins with.
    fn first_invalid(bytes: &[u8]) -> Option<usize> {
        (0..=bytes.len()).find(|&end| str::from_utf8(&bytes[..end]).is_err_and(|error| error.error_len().is_some()))
    }

    /// Feeds `bytes` in chunks of these sizes. Returns after how many bytes it fails, and whether the text may end.
    fn fail_at(bytes: &[u8], mut sizes: impl Iterator<Item = usize>) -> (Option<usize>, bool) {
        let (mut utf8, mut fed) = (Utf8::default(), 0);
        while fed < bytes.len() {
            let end = bytes.len().min(fed + sizes.next().unwrap());
            if utf8.feed(&bytes[fed..end]).is_err() {
                return (Some(end), false);
            }
            fed = end;
        }
        (None, utf8.is_complete())
    }

    /// Checks that every split gives the same result as the standard library.
    fn assert_same(bytes: &[u8]) {
        let expected = (first_invalid(bytes), str::from_utf8(bytes).is_ok());
        assert_eq!(fail_at(bytes, std::iter::repeat(1)), expected, "{bytes:x?}");
        for cut in 1..bytes.len() {
            let (at, whole) = fail_at(bytes, [cut, bytes.len()].into_iter());
            assert_eq!(at, expected.0.map(|at| if at <= cut { cut } else { bytes.len() }), "{bytes:x?} cut at {cut}");
            assert_eq!(whole, expected.1, "{bytes:x?} cut at {cut}");
        }
    }

    #[test]
    fn boundary_bytes_fail_at_the_first_invalid_byte() {
        let edges = [0x00, 0x7f, 0x80, 0x8f, 0x90, 0x9f, 0xa0, 0xbf, 0xc0, 0xc1, 0xc2, 0xdf, 0xe0, 0xe1, 0xec, 0xed];
        let edges: Vec<u8> = edges.into_iter().chain([0xee, 0xef, 0xf0, 0xf1, 0xf3, 0xf4, 0xf5, 0xff]).collect();
        for &a in &edges {
            for &b in &edges {
                assert_same(&[a, b]);
                for &c in &edges {
                    assert_same(&[a, b, c, b'.']);
                    assert_same(&[a, b, c, 0x80]);
                }
            }
        }
    }

    #[test]
    fn characters_may_be_split_anywhere() {
        for character in ['\0', '~', '\u{80}', '\u{7ff}', '\u{800}', '\u{d7ff}', '\u{e000}', '\u{ffff}', '\u{10000}'] {
            assert_same(format!("a{character}\u{10ffff}").as_bytes());
        }
    }

    proptest! {
        #[test]
        fn random_bytes_fail_at_the_first_invalid_byte(
            text in "\\PC{0,20}",
            wrong in vec((any::<prop::sample::Index>(), any::<u8>()), 0..3),
        ) {
            let mut bytes = text.into_bytes();
            for (at, byte) in wrong {
                bytes.insert(at.index(bytes.len() + 1), byte);
            }
            assert_same(&bytes);
        }
    }
}
