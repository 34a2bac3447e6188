//! UTF-8 validation of text that arrives in pieces.

use std::str;

/// Checks text as it arrives. An invalid sequence is found at its first byte that cannot continue what came before, not at the
/// end of the piece or of the text.
#[derive(Debug, Default)]
pub(super) struct Utf8 {
    /// Of these, the first `len` are the beginning of a character whose end has not come. The fourth completes any.
    begun: [u8; 4],
    len: u8,
}

/// Bytes that no text has.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct InvalidUtf8;

impl Utf8 {
    /// Checks what comes next.
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
                // At most three bytes can be the beginning of a character and not all of it.
                self.len = u8::try_from(begun.len()).map_err(|_| InvalidUtf8)?;
                Ok(())
            }
            Err(_) => Err(InvalidUtf8),
        }
    }

    /// Whether the text may end here: not within a character.
    pub(super) fn is_complete(&self) -> bool {
        self.len == 0
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    /// After how many bytes it is known that `bytes` begin no text: one past the longest beginning that some text has.
    fn first_wrong(bytes: &[u8]) -> Option<usize> {
        (0..=bytes.len()).find(|&end| str::from_utf8(&bytes[..end]).is_err_and(|error| error.error_len().is_some()))
    }

    /// After how many bytes it fails when `bytes` come in pieces of these sizes, and whether the text may end.
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

    fn agree(bytes: &[u8]) {
        let expected = (first_wrong(bytes), str::from_utf8(bytes).is_ok());
        assert_eq!(fail_at(bytes, std::iter::repeat(1)), expected, "{bytes:x?}");
        for cut in 1..bytes.len() {
            let (at, whole) = fail_at(bytes, [cut, bytes.len()].into_iter());
            assert_eq!(at, expected.0.map(|at| if at <= cut { cut } else { bytes.len() }), "{bytes:x?} cut at {cut}");
            assert_eq!(whole, expected.1, "{bytes:x?} cut at {cut}");
        }
    }

    #[test]
    fn crafted_bytes_fail_where_they_must() {
        let edges = [0x00, 0x7f, 0x80, 0x8f, 0x90, 0x9f, 0xa0, 0xbf, 0xc0, 0xc1, 0xc2, 0xdf, 0xe0, 0xe1, 0xec, 0xed];
        let edges: Vec<u8> = edges.into_iter().chain([0xee, 0xef, 0xf0, 0xf1, 0xf3, 0xf4, 0xf5, 0xff]).collect();
        for &a in &edges {
            for &b in &edges {
                agree(&[a, b]);
                for &c in &edges {
                    agree(&[a, b, c, b'.']);
                    agree(&[a, b, c, 0x80]);
                }
            }
        }
    }

    #[test]
    fn every_character_may_be_cut() {
        for character in ['\0', '~', '\u{80}', '\u{7ff}', '\u{800}', '\u{d7ff}', '\u{e000}', '\u{ffff}', '\u{10000}'] {
            agree(format!("a{character}\u{10ffff}").as_bytes());
        }
    }

    proptest! {
        #[test]
        fn random_bytes_fail_where_they_must(
            text in "\\PC{0,20}",
            wrong in vec((any::<prop::sample::Index>(), any::<u8>()), 0..3),
        ) {
            let mut bytes = text.into_bytes();
            for (at, byte) in wrong {
                bytes.insert(at.index(bytes.len() + 1), byte);
            }
            agree(&bytes);
        }
    }
}
