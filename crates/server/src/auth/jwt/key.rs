//! Keys that verify signatures.

use std::fmt;

use ring::{hmac, signature};
use rustls_pki_types::pem::{self, PemObject, SectionKind};

use super::JwtAlgorithm;

/// A key for the verification of signatures.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum JwtKey {
    /// The shared secret of HS256, at least 32 bytes.
    Secret(Vec<u8>),
    /// The public key of the other algorithms in PEM, as `openssl pkey -pubout` writes it.
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

/// Why the options of [`Jwt`](super::Jwt) are invalid.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JwtError {
    /// The algorithm needs the other kind of key.
    #[error("{} needs {expected}", algorithm.name())]
    WrongKey {
        /// The algorithm.
        algorithm: JwtAlgorithm,
        /// The kind of key that it needs.
        expected: &'static str,
    },
    /// The secret is too short.
    #[error("the secret has {len} bytes, but HS256 needs at least 32; create one with `openssl rand -hex 32`")]
    SecretTooShort {
        /// Its length in bytes.
        len: usize,
    },
    /// The secret is a key in PEM.
    #[error("the secret of HS256 is a key in PEM; for a public key use RS256, ES256 or EdDSA")]
    SecretIsPem,
    /// The file is not valid PEM.
    #[error("invalid PEM: {0:?}")]
    Pem(pem::Error),
    /// The PEM has no public key.
    #[error("no public key found in the PEM; expected a block -----BEGIN PUBLIC KEY-----")]
    NoPublicKey,
    /// The PEM has several public keys.
    #[error("the PEM has {count} public keys; expected exactly one")]
    SeveralPublicKeys {
        /// The number of keys.
        count: usize,
    },
    /// The PEM has a private key.
    #[error("the PEM has a private key; expected only the public key: `openssl pkey -in FILE -pubout`")]
    PrivateKey,
    /// The PEM has a certificate.
    #[error("the PEM has a certificate; expected its public key: `openssl x509 -in FILE -noout -pubkey`")]
    Certificate,
    /// The public key is in PKCS #1 format.
    #[error("the public key is in PKCS #1 format; convert it with `openssl rsa -RSAPublicKey_in -in FILE -pubout`")]
    Pkcs1,
    /// The public key is of another type.
    #[error("{} needs {}, got {found}", algorithm.name(), algorithm.key_type())]
    WrongKeyType {
        /// The type of the key.
        found: &'static str,
        /// The algorithm.
        algorithm: JwtAlgorithm,
    },
    /// The RSA key is too short to be secure, or longer than supported.
    #[error("the RSA key has {bits} bits; expected 2048 to 8192")]
    RsaSize {
        /// Its length in bits.
        bits: usize,
    },
    /// The public key is malformed.
    #[error("the public key is malformed; export it again with `openssl pkey -pubout`")]
    Malformed,
    /// The key set is too long.
    #[error("the key set has more than {max} bytes; expected the public keys of one issuer")]
    KeySetTooLong {
        /// The limit in bytes.
        max: usize,
    },
    /// The key set is not valid JSON, or not a key set.
    #[error("invalid key set: {0}; expected an object with a list \"keys\" (JWKS)")]
    KeySet(#[source] serde_json::Error),
    /// The key set has no usable key.
    #[error("the key set has no key for RS256, ES256 or EdDSA signatures")]
    KeySetEmpty,
    /// A key of the set is malformed.
    #[error("key {number} of the key set is malformed")]
    KeySetMalformed {
        /// The one-based number of the key.
        number: usize,
    },
    /// A key of the set is secret.
    #[error("key {number} of the key set is a private or symmetric key; expected only public keys")]
    KeySetSecret {
        /// The one-based number of the key.
        number: usize,
    },
    /// Two keys of the set have the same id.
    #[error("two keys of the key set have the `kid` {kid:?}; each key needs a different one")]
    KeySetDuplicate {
        /// The id.
        kid: String,
    },
    /// The system failed to provide random numbers.
    #[error("the random number generator of the system failed")]
    NoRandomness,
    /// A setting is the empty string.
    #[error("{setting} is empty; set a value or remove the setting")]
    Empty {
        /// The setting.
        setting: &'static str,
    },
    /// User and roles are read from the same claim.
    #[error("user and roles are read from the same claim {claim:?}; use two claims")]
    SameClaim {
        /// The claim.
        claim: String,
    },
}

/// A parsed key, bound to its algorithm.
pub(super) enum Key {
    Secret(hmac::Key),
    Public(signature::UnparsedPublicKey<Vec<u8>>),
    /// The modulus and exponent of an RSA key, without leading zeros.
    Rsa(signature::RsaPublicKeyComponents<Vec<u8>>),
}

impl Key {
    pub(super) fn new(algorithm: JwtAlgorithm, key: &JwtKey) -> Result<Self, JwtError> {
        if algorithm == JwtAlgorithm::Hs256 {
            return Self::secret(key);
        }
        let JwtKey::PublicKey(pem) = key else {
            return Err(JwtError::WrongKey { algorithm, expected: "a public key in PEM, not a secret" });
        };
        let der = public_key(pem)?;
        let key = subject_public_key(algorithm, &der)?;
        Ok(Self::public(algorithm, key.to_vec()))
    }

    /// Creates a public key from the format of ring.
    pub(super) fn public(algorithm: JwtAlgorithm, key: Vec<u8>) -> Self {
        let verification: &'static dyn signature::VerificationAlgorithm = match algorithm {
            JwtAlgorithm::Es256 => &signature::ECDSA_P256_SHA256_FIXED,
            JwtAlgorithm::EdDsa => &signature::ED25519,
            JwtAlgorithm::Rs256 | JwtAlgorithm::Hs256 => &signature::RSA_PKCS1_2048_8192_SHA256,
        };
        Self::Public(signature::UnparsedPublicKey::new(verification, key))
    }

    /// Creates an RSA key from its big-endian modulus and exponent. Returns `None` if one of them is zero.
    pub(super) fn rsa(n: &[u8], e: &[u8]) -> Option<Self> {
        let number = |bytes: &[u8]| {
            let first = bytes.iter().position(|byte| *byte != 0)?;
            Some(bytes[first..].to_vec())
        };
        Some(Self::Rsa(signature::RsaPublicKeyComponents { n: number(n)?, e: number(e)? }))
    }

    /// Returns the length of the modulus of a key created by [`rsa`](Self::rsa).
    pub(super) fn rsa_bits(&self) -> Option<usize> {
        let Self::Rsa(key) = self else { return None };
        Some(key.n.len() * 8 - key.n.first()?.leading_zeros() as usize)
    }

    /// Returns the bytes of a public key; empty for a secret.
    pub(super) fn public_bytes(&self) -> Vec<u8> {
        match self {
            Self::Secret(_) => Vec::new(),
            Self::Public(key) => key.as_ref().to_vec(),
            Self::Rsa(key) => [&key.n[..], b".", &key.e].concat(),
        }
    }

    fn secret(key: &JwtKey) -> Result<Self, JwtError> {
        let JwtKey::Secret(secret) = key else {
            return Err(JwtError::WrongKey { algorithm: JwtAlgorithm::Hs256, expected: "a secret, not a public key" });
        };
        // A public key is not secret, so any of its holders could sign tokens.
        if secret.trim_ascii_start().starts_with(b"-----BEGIN") {
            return Err(JwtError::SecretIsPem);
        }
        if secret.len() < 32 {
            return Err(JwtError::SecretTooShort { len: secret.len() });
        }
        Ok(Self::Secret(hmac::Key::new(hmac::HMAC_SHA256, secret)))
    }

    pub(super) fn verifies(&self, message: &[u8], signed: &[u8]) -> bool {
        match self {
            Self::Secret(key) => hmac::verify(key, message, signed).is_ok(),
            Self::Public(key) => key.verify(message, signed).is_ok(),
            Self::Rsa(key) => key.verify(&signature::RSA_PKCS1_2048_8192_SHA256, message, signed).is_ok(),
        }
    }
}

/// Returns the DER of the only public key in a PEM.
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

/// Key types, by the content of their `AlgorithmIdentifier`.
const RSA: &[u8] = b"\x06\x09\x2a\x86\x48\x86\xf7\x0d\x01\x01\x01\x05\x00";
const P256: &[u8] = b"\x06\x07\x2a\x86\x48\xce\x3d\x02\x01\x06\x08\x2a\x86\x48\xce\x3d\x03\x01\x07";
const ED25519: &[u8] = b"\x06\x03\x2b\x65\x70";
/// The common prefix of elliptic curve keys.
const ELLIPTIC: &[u8] = b"\x06\x07\x2a\x86\x48\xce\x3d\x02\x01";

const INTEGER: u8 = 0x02;
const BIT_STRING: u8 = 0x03;
const SEQUENCE: u8 = 0x30;

/// Returns the key of a `SubjectPublicKeyInfo` after checking that it matches the algorithm.
fn subject_public_key(algorithm: JwtAlgorithm, der: &[u8]) -> Result<&[u8], JwtError> {
    let (kind, key) = split_key_info(der).ok_or(JwtError::Malformed)?;
    let wrong_type = |found| Err(JwtError::WrongKeyType { found, algorithm });
    match (algorithm, kind) {
        (JwtAlgorithm::Rs256, RSA) => match modulus_bits(key).ok_or(JwtError::Malformed)? {
            2048..=8192 => Ok(key),
            bits => Err(JwtError::RsaSize { bits }),
        },
        // An uncompressed point.
        (JwtAlgorithm::Es256, P256) if key.len() == 65 && key[0] == 4 => Ok(key),
        (JwtAlgorithm::EdDsa, ED25519) if key.len() == 32 => Ok(key),
        (JwtAlgorithm::Es256, P256) | (JwtAlgorithm::EdDsa, ED25519) => Err(JwtError::Malformed),
        (_, RSA) => wrong_type("an RSA key"),
        (_, P256) => wrong_type("a P-256 key"),
        (_, ED25519) => wrong_type("an Ed25519 key"),
        (_, kind) if kind.starts_with(ELLIPTIC) => wrong_type("a key on another curve"),
        _ => wrong_type("an unknown key type"),
    }
}

/// Returns the `AlgorithmIdentifier` and the key.
fn split_key_info(mut der: &[u8]) -> Option<(&[u8], &[u8])> {
    let mut info = read_element(&mut der, SEQUENCE)?;
    let kind = read_element(&mut info, SEQUENCE)?;
    let key = read_element(&mut info, BIT_STRING)?.strip_prefix(&[0])?;
    (der.is_empty() && info.is_empty()).then_some((kind, key))
}

fn modulus_bits(mut key: &[u8]) -> Option<usize> {
    let mut numbers = read_element(&mut key, SEQUENCE)?;
    let modulus = read_element(&mut numbers, INTEGER)?;
    let modulus = modulus.strip_prefix(&[0]).unwrap_or(modulus);
    Some(modulus.len() * 8 - modulus.first()?.leading_zeros() as usize)
}

/// Returns the content of the next DER element, which must have this tag.
fn read_element<'a>(der: &mut &'a [u8], tag: u8) -> Option<&'a [u8]> {
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
            Ok(_) => panic!("accepted: {pem}"),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn public_key_must_match_its_algorithm() {
        use JwtAlgorithm::{EdDsa, Es256, Rs256};
        for (algorithm, pem) in [(Rs256, RS256), (Es256, ES256), (EdDsa, EDDSA)] {
            assert!(Key::new(algorithm, &JwtKey::PublicKey(pem.to_owned())).is_ok());
        }
        for (algorithm, pem, expected) in [
            (Rs256, ES256, "RS256 needs an RSA key, got a P-256 key"),
            (Rs256, EDDSA, "RS256 needs an RSA key, got an Ed25519 key"),
            (Es256, RS256, "ES256 needs a P-256 key, got an RSA key"),
            (EdDsa, ES256, "EdDSA needs an Ed25519 key, got a P-256 key"),
            (Es256, include_str!("fixtures/p-384.pem"), "ES256 needs a P-256 key, got a key on another curve"),
            (Rs256, include_str!("fixtures/rsa-1024.pem"), "the RSA key has 1024 bits; expected 2048 to 8192"),
        ] {
            assert_eq!(error(algorithm, pem), expected);
        }
    }

    #[test]
    fn errors_describe_unexpected_pem_contents() {
        let private = RS256.replace("PUBLIC KEY", "PRIVATE KEY");
        let two = format!("{RS256}{RS256}");
        for (pem, expected) in [
            ("", "no public key found in the PEM"),
            ("what-is-this", "no public key found in the PEM"),
            ("-----BEGIN PUBLIC KEY-----\n*\n-----END PUBLIC KEY-----\n", "invalid PEM"),
            ("-----BEGIN PUBLIC KEY-----\nAAAA\n", "invalid PEM"),
            ("-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n", "the public key is malformed"),
            (&private, "the PEM has a private key"),
            (&two, "the PEM has 2 public keys"),
            (include_str!("fixtures/certificate.pem"), "the PEM has a certificate"),
            (include_str!("fixtures/rs256-pkcs1.pem"), "the public key is in PKCS #1 format"),
        ] {
            let error = error(JwtAlgorithm::Rs256, pem);
            assert!(error.starts_with(expected), "{error}");
        }
    }

    #[test]
    fn malformed_key_is_an_error_and_never_panics() {
        for (algorithm, pem) in
            [(JwtAlgorithm::Rs256, RS256), (JwtAlgorithm::Es256, ES256), (JwtAlgorithm::EdDsa, EDDSA)]
        {
            let der = public_key(pem).unwrap();
            for end in 0..der.len() {
                assert!(subject_public_key(algorithm, &der[..end]).is_err(), "{end}");
            }
            assert!(subject_public_key(algorithm, &[&der[..], &[0]].concat()).is_err());
            for index in 0..der.len() {
                let mut der = der.clone();
                der[index] ^= 0xff;
                let _ = subject_public_key(algorithm, &der);
            }
        }
    }

    #[test]
    fn secret_must_be_long_and_not_a_pem() {
        let error = |secret: &[u8]| {
            Key::new(JwtAlgorithm::Hs256, &JwtKey::Secret(secret.to_vec())).err().map(|e| e.to_string())
        };
        assert_eq!(error(&[7; 32]), None);
        assert!(error(&[7; 31]).unwrap().starts_with("the secret has 31 bytes, but HS256 needs at least 32"));
        assert!(error(b"").unwrap().starts_with("the secret has 0 bytes"));
        assert!(error(RS256.as_bytes()).unwrap().starts_with("the secret of HS256 is a key in PEM"));
        let public = Key::new(JwtAlgorithm::Hs256, &JwtKey::PublicKey(RS256.to_owned()));
        assert_eq!(public.err().unwrap().to_string(), "HS256 needs a secret, not a public key");
        let secret = Key::new(JwtAlgorithm::Rs256, &JwtKey::Secret(vec![7; 32]));
        assert_eq!(secret.err().unwrap().to_string(), "RS256 needs a public key in PEM, not a secret");
        assert_eq!(format!("{:?}", JwtKey::Secret(b"abc".to_vec())), "Secret(..)");
    }
}
