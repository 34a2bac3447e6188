//! Key sets: the public keys of an issuer as JSON (JWKS, RFC 7517), identified by `kid`.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::Deserialize;

use super::JwtAlgorithm;
use super::key::{JwtError, Key};

/// Limit of a key set: 1 MiB, which is thousands of keys.
const MAX_KEY_SET_BYTES: usize = 1 << 20;

/// A key of a set.
pub(super) struct SetKey {
    pub(super) id: Option<String>,
    pub(super) algorithm: JwtAlgorithm,
    pub(super) key: Key,
}

#[derive(Deserialize)]
struct KeySet {
    keys: Vec<Jwk>,
}

/// A key as JSON.
#[derive(Deserialize)]
struct Jwk {
    kty: String,
    kid: Option<String>,
    alg: Option<String>,
    #[serde(rename = "use")]
    usage: Option<String>,
    key_ops: Option<Vec<String>>,
    crv: Option<String>,
    n: Option<String>,
    e: Option<String>,
    x: Option<String>,
    y: Option<String>,
    /// The private part of an asymmetric key.
    d: Option<String>,
    /// A symmetric key.
    k: Option<String>,
}

/// Returns the keys of a set that verify signatures of a supported algorithm. Other keys are skipped.
pub(super) fn parse(json: &str) -> Result<Vec<SetKey>, JwtError> {
    if json.len() > MAX_KEY_SET_BYTES {
        return Err(JwtError::KeySetTooLong { max: MAX_KEY_SET_BYTES });
    }
    let KeySet { keys } = serde_json::from_str(json).map_err(JwtError::KeySet)?;
    let mut usable: Vec<SetKey> = Vec::new();
    for (index, jwk) in keys.into_iter().enumerate() {
        if jwk.d.is_some() || jwk.k.is_some() {
            return Err(JwtError::KeySetSecret { number: index + 1 });
        }
        let Some(algorithm) = jwk.algorithm() else { continue };
        let key = jwk.key(algorithm).ok_or(JwtError::KeySetMalformed { number: index + 1 })?;
        if let Some(bits) = key.rsa_bits().filter(|bits| !(2048..=8192).contains(bits)) {
            return Err(JwtError::RsaSize { bits });
        }
        if usable.iter().any(|other| other.algorithm == algorithm && other.id.is_some() && other.id == jwk.kid) {
            return Err(JwtError::KeySetDuplicate { kid: jwk.kid.unwrap_or_default() });
        }
        usable.push(SetKey { id: jwk.kid, algorithm, key });
    }
    if usable.is_empty() { Err(JwtError::KeySetEmpty) } else { Ok(usable) }
}

impl Jwk {
    /// Returns the algorithm of the key; `None` if it is not for signatures of a supported algorithm.
    fn algorithm(&self) -> Option<JwtAlgorithm> {
        let algorithm = match (&*self.kty, self.crv.as_deref()) {
            ("RSA", _) => JwtAlgorithm::Rs256,
            ("EC", Some("P-256")) => JwtAlgorithm::Es256,
            ("OKP", Some("Ed25519")) => JwtAlgorithm::EdDsa,
            _ => return None,
        };
        let has_algorithm = self.alg.as_ref().is_none_or(|alg| alg == algorithm.name());
        let is_for_signatures = self.usage.as_ref().is_none_or(|usage| usage == "sig");
        let verifies = self.key_ops.as_ref().is_none_or(|ops| ops.iter().any(|op| op == "verify"));
        (has_algorithm && is_for_signatures && verifies).then_some(algorithm)
    }

    fn key(&self, algorithm: JwtAlgorithm) -> Option<Key> {
        let bytes = |member: &Option<String>| URL_SAFE_NO_PAD.decode(member.as_ref()?).ok();
        let coordinate = |member| bytes(member).filter(|bytes| bytes.len() == 32);
        match algorithm {
            JwtAlgorithm::Rs256 => Key::rsa(&bytes(&self.n)?, &bytes(&self.e)?),
            // An uncompressed point.
            JwtAlgorithm::Es256 => {
                Some(Key::public(algorithm, [vec![4], coordinate(&self.x)?, coordinate(&self.y)?].concat()))
            }
            JwtAlgorithm::EdDsa => Some(Key::public(algorithm, coordinate(&self.x)?)),
            JwtAlgorithm::Hs256 => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use ring::rand::SystemRandom;
    use ring::signature::{Ed25519KeyPair, KeyPair as _};
    use serde_json::{Value as Json, json};

    use super::super::{InvalidToken, Jwt, JwtKeys, JwtOptions};
    use super::*;
    use crate::auth::{Session, TokenValidator as _};

    /// The public keys of the other fixtures, and a key for encryption.
    const JWKS: &str = include_str!("fixtures/jwks.json");

    fn jwt(json: &str) -> Jwt {
        Jwt::new(JwtOptions::new(JwtKeys::Set(json.to_owned()))).unwrap()
    }

    fn error(json: &str) -> String {
        Jwt::new(JwtOptions::new(JwtKeys::Set(json.to_owned()))).expect_err("the key set is invalid").to_string()
    }

    /// Changes a key of [`JWKS`].
    fn changed(index: usize, change: impl Fn(&mut Json)) -> String {
        let mut set: Json = serde_json::from_str(JWKS).unwrap();
        change(&mut set["keys"][index]);
        set.to_string()
    }

    /// A key that tests can sign with.
    struct Signer(Ed25519KeyPair);

    impl Signer {
        fn new() -> Self {
            let pkcs8 = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).unwrap();
            Self(Ed25519KeyPair::from_pkcs8(pkcs8.as_ref()).unwrap())
        }

        fn jwk(&self, kid: &Json) -> Json {
            let x = URL_SAFE_NO_PAD.encode(self.0.public_key());
            json!({"kty": "OKP", "crv": "Ed25519", "kid": kid, "x": x})
        }

        fn token(&self, header: &Json) -> String {
            let encode = |json: &Json| URL_SAFE_NO_PAD.encode(json.to_string());
            let text = format!("{}.{}", encode(header), encode(&json!({"sub": "mara"})));
            format!("{text}.{}", URL_SAFE_NO_PAD.encode(self.0.sign(text.as_bytes())))
        }
    }

    fn session(jwt: &Jwt, token: &str) -> Result<Session, InvalidToken> {
        jwt.session(token, 0)
    }

    #[test]
    fn keys_of_every_type_verify() {
        let set = jwt(JWKS);
        assert_eq!(set.keys.len(), 3, "the key for encryption is not used");
        for token in
            [include_str!("fixtures/rs256.jwt"), include_str!("fixtures/es256.jwt"), include_str!("fixtures/eddsa.jwt")]
        {
            assert_eq!(session(&set, token).unwrap().user_id, "mara");
            let [header, payload, _] = <[&str; 3]>::try_from(token.split('.').collect::<Vec<_>>()).unwrap();
            assert_eq!(session(&set, &format!("{header}.{payload}.AAAA")), Err(InvalidToken::Signature));
        }
    }

    #[test]
    fn kid_selects_the_key() {
        let (one, two, stranger) = (Signer::new(), Signer::new(), Signer::new());
        let set = jwt(&json!({"keys": [one.jwk(&json!("one")), two.jwk(&json!("two"))]}).to_string());
        let header = |kid: &str| json!({"alg": "EdDSA", "kid": kid});
        assert!(session(&set, &one.token(&header("one"))).is_ok() && session(&set, &two.token(&header("two"))).is_ok());
        for (token, reason) in [
            (one.token(&header("two")), InvalidToken::Signature),
            (stranger.token(&header("one")), InvalidToken::Signature),
            (one.token(&header("three")), InvalidToken::UnknownKey),
            (one.token(&header("")), InvalidToken::UnknownKey),
            (one.token(&json!({"alg": "EdDSA"})), InvalidToken::NoKeyId),
            (one.token(&json!({"alg": "EdDSA", "kid": 1})), InvalidToken::Malformed),
            (one.token(&json!({"alg": "ES256", "kid": "one"})), InvalidToken::Algorithm),
            (one.token(&json!({"alg": "none", "kid": "one"})), InvalidToken::Algorithm),
            (one.token(&json!({"kid": "one"})), InvalidToken::Algorithm),
        ] {
            assert_eq!(session(&set, &token), Err(reason), "{token}");
        }
        // Without `kid` the only matching key is selected, even if it has a `kid`.
        let set = jwt(&json!({"keys": [one.jwk(&json!("one"))]}).to_string());
        assert!(session(&set, &one.token(&json!({"alg": "EdDSA"}))).is_ok());
        let set = jwt(&json!({"keys": [one.jwk(&Json::Null)]}).to_string());
        assert!(session(&set, &one.token(&json!({"alg": "EdDSA"}))).is_ok());
        assert_eq!(session(&set, &one.token(&header("one"))), Err(InvalidToken::UnknownKey));
    }

    #[test]
    fn session_is_accepted_while_its_key_is_in_the_set() {
        let (one, two) = (Signer::new(), Signer::new());
        let (of_one, of_two) = (one.jwk(&json!("one")), two.jwk(&json!("two")));
        let both = jwt(&json!({"keys": [of_one, of_two]}).to_string());
        let session = session(&both, &one.token(&json!({"alg": "EdDSA", "kid": "one"}))).unwrap();
        assert!(both.still_accepts(&session) && jwt(&json!({"keys": [of_one]}).to_string()).still_accepts(&session));
        assert!(!jwt(&json!({"keys": [of_two]}).to_string()).still_accepts(&session));
        assert!(
            !jwt(&json!({"keys": [two.jwk(&json!("one"))]}).to_string()).still_accepts(&session),
            "another key of that id"
        );
        let options = JwtOptions::new(JwtKeys::Set(json!({"keys": [of_one]}).to_string())).audience("tides");
        assert!(!Jwt::new(options).unwrap().still_accepts(&session), "the token would not be accepted");
    }

    #[test]
    fn alg_use_and_key_ops_are_respected() {
        let count = |json: String| jwt(&json).keys.len();
        for (member, value) in [("alg", json!("RS512")), ("use", json!("enc")), ("key_ops", json!(["encrypt"]))] {
            assert_eq!(count(changed(0, |key| key[member] = value.clone())), 2, "{member}");
        }
        assert_eq!(count(changed(1, |key| key["crv"] = json!("P-384"))), 2);
        assert_eq!(count(changed(2, |key| key["kty"] = json!("new"))), 2);
    }

    #[test]
    fn invalid_key_sets_are_rejected() {
        let ec = |key: &str| changed(1, |jwk| jwk["x"] = json!(key));
        let short = changed(0, |jwk| jwk["n"] = json!(URL_SAFE_NO_PAD.encode([0xff; 128])));
        let missing = changed(0, |jwk| jwk["e"] = Json::Null);
        let private = changed(2, |jwk| jwk["d"] = json!("AAAA"));
        let twice = json!({"keys": [Signer::new().jwk(&json!("one")), Signer::new().jwk(&json!("one"))]}).to_string();
        for (json, expected) in [
            (
                "",
                "invalid key set: EOF while parsing a value at line 1 column 0; expected an object with a list \"keys\"",
            ),
            ("[]", "invalid key set: "),
            (r#"{"keys": []}"#, "the key set has no key for RS256, ES256 or EdDSA signatures"),
            (r#"{"keys": [{"kty": "oct", "k": "AAAA"}]}"#, "key 1 of the key set is a private or symmetric key"),
            (&ec("AAAA"), "key 2 of the key set is malformed"),
            (&ec("*"), "key 2 of the key set is malformed"),
            (&missing, "key 1 of the key set is malformed"),
            (&short, "the RSA key has 1024 bits; expected 2048 to 8192"),
            (&private, "key 3 of the key set is a private or symmetric key; expected only public keys"),
            (&twice, "two keys of the key set have the `kid` \"one\"; each key needs a different one"),
            (&" ".repeat(MAX_KEY_SET_BYTES + 1), "the key set has more than 1048576 bytes"),
        ] {
            let error = error(json);
            assert!(error.starts_with(expected), "{error}");
        }
    }
}
