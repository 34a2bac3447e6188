//! The credential of a session, by which a reload determines which sessions must end.

use std::fmt;
use std::sync::OnceLock;

use ring::hmac;
use ring::rand::SystemRandom;

/// Identifies the credential of a login: a static token and its user, or the key and settings that verified a signed token.
///
/// It is an HMAC under a random key of this process, so that neither the timing of a comparison nor the memory of the process
/// reveals a token or secret.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Credential([u8; 32]);

/// The system failed to provide random numbers for the key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NoRandomness;

impl Credential {
    /// Returns the credential of a sequence of parts.
    pub(super) fn of(parts: &[&[u8]]) -> Result<Self, NoRandomness> {
        static KEY: OnceLock<Option<hmac::Key>> = OnceLock::new();
        let key = KEY.get_or_init(|| hmac::Key::generate(hmac::HMAC_SHA256, &SystemRandom::new()).ok());
        let mut context = hmac::Context::with_key(key.as_ref().ok_or(NoRandomness)?);
        for part in parts {
            // Prefixed by its length, so that different lists of parts never have the same encoding.
            context.update(&(part.len() as u64).to_le_bytes());
            context.update(part);
        }
        let mut credential = [0; 32];
        credential.copy_from_slice(context.sign().as_ref());
        Ok(Self(credential))
    }
}

impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Credential(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_are_equal_if_all_parts_are_equal() {
        let of = |parts: &[&[u8]]| Credential::of(parts).unwrap();
        assert_eq!(of(&[b"ab", b"c"]), of(&[b"ab", b"c"]));
        for other in [&[&b"a"[..], b"bc"][..], &[b"abc"], &[b"ab", b"c", b""], &[b"c", b"ab"], &[]] {
            assert_ne!(of(&[b"ab", b"c"]), of(other), "{other:?}");
        }
        // It depends on the random key: it is not a plain digest, which could be computed without the key.
        assert_ne!(of(&[]).0, ring::digest::digest(&ring::digest::SHA256, b"").as_ref());
    }
}
