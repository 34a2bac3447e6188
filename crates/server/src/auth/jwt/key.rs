//! What signatures are verified with.

use std::fmt;

use ring::{hmac, signature};
use rustls_pki_types::pem::{self, PemObject, SectionKind};

use super::JwtAlgorithm;

/// What signatures are verified with, as it is given.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum JwtKey {
    /// For HS256: what the issuer signs with, too. At least 32 bytes.
    Secret(Vec<u8>),
    /// For the others: the public key in PEM, as `openssl pkey -pubout` writes it.
    PublicKey(String),
}

impl fmt::Debug for JwtKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Secret(_) => f.write_str("Secret(..)"),
            Self::PublicKey(pem) => f.debug_tuple("PublicKey").field(pem).finish(),
        }
    }
}

/// Why tokens could not be verified with what was given.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JwtError {
    /// The algorithm verifies with the other kind of key.
    #[error("{} takes {takes}", algorithm.name())]
    WrongKey {
        /// Which it is.
        algorithm: JwtAlgorithm,
        /// What it verifies with.
        takes: &'static str,
    },
    /// A secret that can be guessed.
    #[error("the secret has {len} bytes, and HS256 needs at least 32 random ones: make one by `openssl rand -hex 32`")]
    SecretTooShort {
        /// How long it is.
        len: usize,
    },
    /// A secret that is no secret.
    #[error("the secret of HS256 is a key in PEM: for a public key choose RS256, ES256 or EdDSA")]
    SecretIsPem,
    /// It is not PEM.
    #[error("the public key is not proper PEM: {0:?}")]
    Pem(pem::Error),
    /// There is no public key in it.
    #[error("there is no public key in the PEM: it begins with -----BEGIN PUBLIC KEY-----")]
    NoPublicKey,
    /// There are several.
    #[error("there are {count} public keys in the PEM: give the one that the tokens are signed for")]
    SeveralPublicKeys {
        /// How many.
        count: usize,
    },
    /// The key of the issuer, which is for nobody else.
    #[error(
        "this is a private key, which only the issuer should have: give its public key, `openssl pkey -in FILE -pubout`"
    )]
    PrivateKey,
    /// A certificate.
    #[error("this is a certificate: give its public key, `openssl x509 -in FILE -noout -pubkey`")]
    Certificate,
    /// A public key in the older form.
    #[error("this is a public key in PKCS #1: write it anew by `openssl rsa -RSAPublicKey_in -in FILE -pubout`")]
    Pkcs1,
    /// A public key for something else.
    #[error("the public key is {found}, and {} takes {}", algorithm.name(), algorithm.takes())]
    OtherKind {
        /// What it is.
        found: &'static str,
        /// What it was given for.
        algorithm: JwtAlgorithm,
    },
    /// A public key of RSA that is too short to be safe, or too long to be taken.
    #[error("the RSA key has {bits} bits: 2048 to 8192 are taken")]
    RsaSize {
        /// How long it is.
        bits: usize,
    },
    /// The key is damaged.
    #[error("the public key cannot be read: write it anew by `openssl pkey -pubout`")]
    Malformed,
    /// A setting that may be left out is there and empty.
    #[error("{setting} is empty: leave it out, or say what it is")]
    Empty {
        /// Which one.
        setting: &'static str,
    },
    /// One claim cannot be both.
    #[error("the user and the roles are both the claim {claim:?}: each needs its own")]
    SameClaim {
        /// Which one.
        claim: String,
    },
}

/// A key, ready to verify signatures of its algorithm, and no other.
pub(super) enum Key {
    Secret(hmac::Key),
    Public(signature::UnparsedPublicKey<Vec<u8>>),
}

impl Key {
    pub(super) fn new(algorithm: JwtAlgorithm, key: &JwtKey) -> Result<Self, JwtError> {
        let verification: &'static dyn signature::VerificationAlgorithm = match algorithm {
            JwtAlgorithm::Hs256 => return Self::secret(key),
            JwtAlgorithm::Rs256 => &signature::RSA_PKCS1_2048_8192_SHA256,
            JwtAlgorithm::Es256 => &signature::ECDSA_P256_SHA256_FIXED,
            JwtAlgorithm::EdDsa => &signature::ED25519,
        };
        let JwtKey::PublicKey(pem) = key else {
            return Err(JwtError::WrongKey { algorithm, takes: "a public key in PEM, and not a secret" });
        };
        let der = public_key(pem)?;
        let key = subject_public_key(algorithm, &der)?;
        Ok(Self::Public(signature::UnparsedPublicKey::new(verification, key.to_vec())))
    }

    fn secret(key: &JwtKey) -> Result<Self, JwtError> {
        let JwtKey::Secret(secret) = key else {
            return Err(JwtError::WrongKey { algorithm: JwtAlgorithm::Hs256, takes: "a secret, and not a public key" });
        };
        // Whoever has the public key could sign with it.
        if secret.trim_ascii_start().starts_with(b"-----BEGIN") {
            return Err(JwtError::SecretIsPem);
        }
        if secret.len() < 32 {
            return Err(JwtError::SecretTooShort { len: secret.len() });
        }
        Ok(Self::Secret(hmac::Key::new(hmac::HMAC_SHA256, secret)))
    }

    pub(super) fn verifies(&self, message: &[u8], signature: &[u8]) -> bool {
        match self {
            Self::Secret(key) => hmac::verify(key, message, signature).is_ok(),
            Self::Public(key) => key.verify(message, signature).is_ok(),
        }
    }
}

/// The one public key in a PEM.
fn public_key(pem: &str) -> Result<Vec<u8>, JwtError> {
    let sections: Result<Vec<(SectionKind, Vec<u8>)>, _> = PemObject::pem_slice_iter(pem.as_bytes()).collect();
    let sections = sections.map_err(JwtError::Pem)?;
    let has = |wanted: &[SectionKind]| sections.iter().any(|(kind, _)| wanted.contains(kind));
    if has(&[SectionKind::PrivateKey, SectionKind::RsaPrivateKey, SectionKind::EcPrivateKey]) {
        return Err(JwtError::PrivateKey);
    }
    let has_certificate = has(&[SectionKind::Certificate]);
    let mut keys = sections.into_iter().filter(|(kind, _)| *kind == SectionKind::PublicKey).map(|(_, der)| der);
    match (keys.next(), keys.count()) {
        (Some(key), 0) => Ok(key),
        (Some(_), more) => Err(JwtError::SeveralPublicKeys { count: more + 1 }),
        (None, _) if has_certificate => Err(JwtError::Certificate),
        (None, _) if pem.contains("-----BEGIN RSA PUBLIC KEY-----") => Err(JwtError::Pkcs1),
        (None, _) => Err(JwtError::NoPublicKey),
    }
}

/// Kinds of keys, by the content of their `AlgorithmIdentifier`.
const RSA: &[u8] = b"\x06\x09\x2a\x86\x48\x86\xf7\x0d\x01\x01\x01\x05\x00";
const P256: &[u8] = b"\x06\x07\x2a\x86\x48\xce\x3d\x02\x01\x06\x08\x2a\x86\x48\xce\x3d\x03\x01\x07";
const ED25519: &[u8] = b"\x06\x03\x2b\x65\x70";
/// The beginning of those of all elliptic curves.
const ELLIPTIC: &[u8] = b"\x06\x07\x2a\x86\x48\xce\x3d\x02\x01";

const INTEGER: u8 = 0x02;
const BIT_STRING: u8 = 0x03;
const SEQUENCE: u8 = 0x30;

/// The key in a `SubjectPublicKeyInfo`, if it is for this algorithm.
fn subject_public_key(algorithm: JwtAlgorithm, der: &[u8]) -> Result<&[u8], JwtError> {
    let (kind, key) = parts(der).ok_or(JwtError::Malformed)?;
    let other = |found| Err(JwtError::OtherKind { found, algorithm });
    match (algorithm, kind) {
        (JwtAlgorithm::Rs256, RSA) => match modulus_bits(key).ok_or(JwtError::Malformed)? {
            2048..=8192 => Ok(key),
            bits => Err(JwtError::RsaSize { bits }),
        },
        // A point that is not compressed.
        (JwtAlgorithm::Es256, P256) if key.len() == 65 && key[0] == 4 => Ok(key),
        (JwtAlgorithm::EdDsa, ED25519) if key.len() == 32 => Ok(key),
        (JwtAlgorithm::Es256, P256) | (JwtAlgorithm::EdDsa, ED25519) => Err(JwtError::Malformed),
        (_, RSA) => other("an RSA key"),
        (_, P256) => other("a P-256 key"),
        (_, ED25519) => other("an Ed25519 key"),
        (_, kind) if kind.starts_with(ELLIPTIC) => other("a key on another curve"),
        _ => other("of another kind"),
    }
}

/// The `AlgorithmIdentifier` and the key.
fn parts(mut der: &[u8]) -> Option<(&[u8], &[u8])> {
    let mut info = element(&mut der, SEQUENCE)?;
    let kind = element(&mut info, SEQUENCE)?;
    let key = element(&mut info, BIT_STRING)?.strip_prefix(&[0])?;
    (der.is_empty() && info.is_empty()).then_some((kind, key))
}

fn modulus_bits(mut key: &[u8]) -> Option<usize> {
    let mut numbers = element(&mut key, SEQUENCE)?;
    let modulus = element(&mut numbers, INTEGER)?;
    let modulus = modulus.strip_prefix(&[0]).unwrap_or(modulus);
    Some(modulus.len() * 8 - modulus.first()?.leading_zeros() as usize)
}

/// The content of the next element, which must have this tag.
fn element<'a>(der: &mut &'a [u8], tag: u8) -> Option<&'a [u8]> {
    let rest = der.strip_prefix(&[tag])?;
    let (len, rest) = match *rest {
        [len @ 0..=0x7f, ref rest @ ..] | [0x81, len, ref rest @ ..] => (usize::from(len), rest),
        [0x82, high, low, ref rest @ ..] => (usize::from(u16::from_be_bytes([high, low])), rest),
        _ => return None,
    };
    let (content, rest) = rest.split_at_checked(len)?;
    *der = rest;
    Some(content)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RS256: &str = include_str!("fixtures/rs256.pem");
    const ES256: &str = include_str!("fixtures/es256.pem");
    const EDDSA: &str = include_str!("fixtures/eddsa.pem");

    fn error(algorithm: JwtAlgorithm, pem: &str) -> String {
        match Key::new(algorithm, &JwtKey::PublicKey(pem.to_owned())) {
            Ok(_) => panic!("taken: {pem}"),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn a_public_key_is_for_its_algorithm_only() {
        use JwtAlgorithm::{EdDsa, Es256, Rs256};
        for (algorithm, pem) in [(Rs256, RS256), (Es256, ES256), (EdDsa, EDDSA)] {
            assert!(Key::new(algorithm, &JwtKey::PublicKey(pem.to_owned())).is_ok());
        }
        for (algorithm, pem, expected) in [
            (Rs256, ES256, "the public key is a P-256 key, and RS256 takes an RSA key"),
            (Rs256, EDDSA, "the public key is an Ed25519 key, and RS256 takes an RSA key"),
            (Es256, RS256, "the public key is an RSA key, and ES256 takes a P-256 key"),
            (EdDsa, ES256, "the public key is a P-256 key, and EdDSA takes an Ed25519 key"),
            (
                Es256,
                include_str!("fixtures/p-384.pem"),
                "the public key is a key on another curve, and ES256 takes a P-256 key",
            ),
            (Rs256, include_str!("fixtures/rsa-1024.pem"), "the RSA key has 1024 bits: 2048 to 8192 are taken"),
        ] {
            assert_eq!(error(algorithm, pem), expected);
        }
    }

    #[test]
    fn what_is_no_public_key_is_called_what_it_is() {
        let private = RS256.replace("PUBLIC KEY", "PRIVATE KEY");
        let two = format!("{RS256}{RS256}");
        for (pem, expected) in [
            ("", "there is no public key in the PEM"),
            ("what-is-this", "there is no public key in the PEM"),
            ("-----BEGIN PUBLIC KEY-----\n*\n-----END PUBLIC KEY-----\n", "the public key is not proper PEM"),
            ("-----BEGIN PUBLIC KEY-----\nAAAA\n", "the public key is not proper PEM"),
            ("-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n", "the public key cannot be read"),
            (&private, "this is a private key"),
            (&two, "there are 2 public keys"),
            (include_str!("fixtures/certificate.pem"), "this is a certificate"),
            (include_str!("fixtures/rs256-pkcs1.pem"), "this is a public key in PKCS #1"),
        ] {
            let error = error(JwtAlgorithm::Rs256, pem);
            assert!(error.starts_with(expected), "{error}");
        }
    }

    #[test]
    fn a_damaged_key_is_told_and_nothing_panics() {
        for (algorithm, pem) in
            [(JwtAlgorithm::Rs256, RS256), (JwtAlgorithm::Es256, ES256), (JwtAlgorithm::EdDsa, EDDSA)]
        {
            let der = public_key(pem).unwrap();
            for end in 0..der.len() {
                assert!(subject_public_key(algorithm, &der[..end]).is_err(), "{end}");
            }
            assert!(subject_public_key(algorithm, &[&der[..], &[0]].concat()).is_err());
            for place in 0..der.len() {
                let mut der = der.clone();
                der[place] ^= 0xff;
                let _ = subject_public_key(algorithm, &der);
            }
        }
    }

    #[test]
    fn a_secret_must_be_one() {
        let error = |secret: &[u8]| {
            Key::new(JwtAlgorithm::Hs256, &JwtKey::Secret(secret.to_vec())).err().map(|e| e.to_string())
        };
        assert_eq!(error(&[7; 32]), None);
        assert!(error(&[7; 31]).unwrap().starts_with("the secret has 31 bytes, and HS256 needs at least 32"));
        assert!(error(b"").unwrap().starts_with("the secret has 0 bytes"));
        assert!(error(RS256.as_bytes()).unwrap().starts_with("the secret of HS256 is a key in PEM"));
        let public = Key::new(JwtAlgorithm::Hs256, &JwtKey::PublicKey(RS256.to_owned()));
        assert_eq!(public.err().unwrap().to_string(), "HS256 takes a secret, and not a public key");
        let secret = Key::new(JwtAlgorithm::Rs256, &JwtKey::Secret(vec![7; 32]));
        assert_eq!(secret.err().unwrap().to_string(), "RS256 takes a public key in PEM, and not a secret");
        assert_eq!(format!("{:?}", JwtKey::Secret(b"abc".to_vec())), "Secret(..)");
    }
}
