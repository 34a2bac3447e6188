//! JSON Web Tokens of an external issuer.
//!
//! The options or the key set determine the algorithm; the header of a token is only compared with it. So a token cannot select `none`, or
//! an HMAC keyed with the public key. The signature is verified before any claim is read.
//!
//! A token can be used any number of times until it expires; used tokens are not tracked. If a token leaks, revoke its user until the
//! token has expired.
//!
//! Signatures are verified with ring, which TLS needs anyway. The crate `jsonwebtoken` supports only aws-lc and the `RustCrypto`
//! crates, so it would add a second cryptography library and an ASN.1 parser to save little code. It also reads the system clock.

mod key;
mod key_set;

use std::fmt;
use std::future;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde_json::{Map, Value as Json};

use self::key::Key;
pub use self::key::{JwtError, JwtKey};
use super::credential::{Credential, NoRandomness};
use super::{Session, TokenValidator, Validation};

/// A [`TokenValidator`] for JSON Web Tokens.
///
/// A token without `exp` never expires. Times are compared without leeway: a token is valid from its `nbf`, inclusive, until its
/// `exp`, exclusive.
pub struct Jwt {
    keys: Vec<VerificationKey>,
    options: JwtOptions,
}

/// A key that verifies tokens.
struct VerificationKey {
    /// The `kid` of a key in a set.
    id: Option<String>,
    algorithm: JwtAlgorithm,
    key: Key,
    /// The credential of the sessions of its tokens, derived from the key and the options.
    credential: Credential,
}

/// The keys with which signatures are verified.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum JwtKeys {
    /// One key for one algorithm. Tokens with another algorithm are rejected, and `kid` is ignored.
    One(JwtAlgorithm, JwtKey),
    /// A key set as JSON (JWKS). RSA keys verify RS256, P-256 keys ES256 and Ed25519 keys `EdDSA`; keys with another `alg`, `use` or
    /// `key_ops` are ignored. The `kid` of a token selects the key. A token without `kid` is accepted only if exactly one key has its
    /// algorithm.
    Set(String),
}

impl fmt::Debug for JwtKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::One(algorithm, key) => f.debug_tuple("One").field(algorithm).field(key).finish(),
            // Not shown, because it may contain private keys by mistake.
            Self::Set(_) => f.write_str("Set(..)"),
        }
    }
}

/// The options of [`Jwt`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct JwtOptions {
    /// The keys with which signatures are verified.
    pub keys: JwtKeys,
    /// The required `iss`. Default: any, because the key usually identifies the issuer.
    pub issuer: Option<String>,
    /// The required `aud`, as a string or in a list. Default: any, because many issuers do not set it. Set it if the issuer also signs
    /// tokens for other services.
    pub audience: Option<String>,
    /// The claim with the user id, a string. Default: `sub`, the registered claim.
    pub user_claim: String,
    /// The claim with the roles: a list of strings, or a string with roles separated by spaces. A token without the claim has no
    /// roles. Default: `roles`, the most common name.
    pub roles_claim: String,
    /// The maximum age of a token and its sessions since `iat`, in addition to `exp`. If set, tokens without `iat` are rejected.
    /// Default: none, because tokens usually have `exp`. Set it if tokens live longer than you want to accept.
    pub max_age: Option<Duration>,
}

/// A signature algorithm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum JwtAlgorithm {
    /// HMAC with SHA-256. The key that verifies can also sign.
    Hs256,
    /// RSA (PKCS #1 v1.5) with SHA-256.
    Rs256,
    /// ECDSA on P-256 with SHA-256.
    Es256,
    /// Ed25519.
    EdDsa,
}

impl JwtAlgorithm {
    /// All algorithms.
    pub const ALL: [Self; 4] = [Self::Hs256, Self::Rs256, Self::Es256, Self::EdDsa];

    /// Returns the name in the header of tokens.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Hs256 => "HS256",
            Self::Rs256 => "RS256",
            Self::Es256 => "ES256",
            Self::EdDsa => "EdDSA",
        }
    }

    /// Returns the algorithm with a name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|algorithm| algorithm.name() == name)
    }

    const fn key_type(self) -> &'static str {
        match self {
            Self::Hs256 => "a secret",
            Self::Rs256 => "an RSA key",
            Self::Es256 => "a P-256 key",
            Self::EdDsa => "an Ed25519 key",
        }
    }
}

impl JwtOptions {
    /// Creates options with these keys, for any issuer and audience, with the default claims.
    pub fn new(keys: JwtKeys) -> Self {
        Self {
            keys,
            issuer: None,
            audience: None,
            user_claim: "sub".to_owned(),
            roles_claim: "roles".to_owned(),
            max_age: None,
        }
    }

    /// Sets [`issuer`](#structfield.issuer).
    #[must_use]
    pub fn issuer(mut self, issuer: impl Into<String>) -> Self {
        self.issuer = Some(issuer.into());
        self
    }

    /// Sets [`audience`](#structfield.audience).
    #[must_use]
    pub fn audience(mut self, audience: impl Into<String>) -> Self {
        self.audience = Some(audience.into());
        self
    }

    /// Sets [`user_claim`](#structfield.user_claim).
    #[must_use]
    pub fn user_claim(mut self, user_claim: impl Into<String>) -> Self {
        self.user_claim = user_claim.into();
        self
    }

    /// Sets [`roles_claim`](#structfield.roles_claim).
    #[must_use]
    pub fn roles_claim(mut self, roles_claim: impl Into<String>) -> Self {
        self.roles_claim = roles_claim.into();
        self
    }

    /// Sets [`max_age`](#structfield.max_age).
    #[must_use]
    pub fn max_age(mut self, max_age: Duration) -> Self {
        self.max_age = Some(max_age);
        self
    }
}

/// Why a token was rejected. The reason is logged, but not sent to the client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
enum InvalidToken {
    #[error("longer than {} bytes", Jwt::MAX_LEN)]
    TooLong,
    #[error("not a JSON Web Token")]
    Malformed,
    #[error("the algorithm in the header does not match the key")]
    Algorithm,
    #[error("no key in the key set has the `kid` of the header")]
    UnknownKey,
    #[error("the header has no `kid`, but several keys have its algorithm")]
    NoKeyId,
    #[error("the header has critical extensions")]
    Critical,
    #[error("invalid signature")]
    Signature,
    #[error("`exp`, `nbf` or `iat` is not a time")]
    Time,
    #[error("`iat` is missing, but a maximum age is configured")]
    NoIssueTime,
    #[error("older than the configured maximum age")]
    TooOld,
    #[error("expired")]
    Expired,
    #[error("not valid yet")]
    NotBefore,
    #[error("`iss` is not the configured issuer")]
    Issuer,
    #[error("`aud` is not the configured audience")]
    Audience,
    #[error("the user claim is not a non-empty string")]
    User,
    #[error("the roles claim is neither a string nor a list of strings")]
    Roles,
}

impl Jwt {
    /// The maximum length of a token in bytes: 15 KiB, so that it fits in a message before login, which may have 16 KiB.
    pub const MAX_LEN: usize = 15 << 10;

    /// Creates a validator.
    ///
    /// # Errors
    ///
    /// Returns an error if a key does not match its algorithm, or if an option is empty or contradictory.
    pub fn new(options: JwtOptions) -> Result<Self, JwtError> {
        let given = [
            ("the issuer", options.issuer.as_deref()),
            ("the audience", options.audience.as_deref()),
            ("the user claim", Some(&*options.user_claim)),
            ("the roles claim", Some(&*options.roles_claim)),
        ];
        if let Some((setting, _)) = given.into_iter().find(|(_, value)| *value == Some("")) {
            return Err(JwtError::Empty { setting });
        }
        if options.user_claim == options.roles_claim {
            return Err(JwtError::SameClaim { claim: options.user_claim });
        }
        Ok(Self { keys: verification_keys(&options)?, options })
    }

    fn session(&self, token: &str, now: u64) -> Result<Session, InvalidToken> {
        let (mut claims, credential) = self.claims(token)?;
        let mut expires_at = claims.remove("exp").map(|exp| parse_time(&exp)).transpose()?;
        if let Some(max_age) = self.options.max_age {
            let issued_at = claims.get("iat").map(parse_time).transpose()?.ok_or(InvalidToken::NoIssueTime)?;
            let max_age = u64::try_from(max_age.as_millis()).unwrap_or(u64::MAX);
            let too_old_at = issued_at.saturating_add(max_age);
            if too_old_at <= now {
                return Err(InvalidToken::TooOld);
            }
            expires_at = Some(expires_at.map_or(too_old_at, |exp| exp.min(too_old_at)));
        }
        let not_before = claims.get("nbf").map(parse_time).transpose()?;
        if not_before.is_some_and(|not_before| now < not_before) {
            return Err(InvalidToken::NotBefore);
        }
        if let Some(issuer) = &self.options.issuer
            && claims.get("iss").and_then(Json::as_str) != Some(issuer)
        {
            return Err(InvalidToken::Issuer);
        }
        if let Some(audience) = &self.options.audience
            && !claims.get("aud").is_some_and(|aud| has_audience(aud, audience))
        {
            return Err(InvalidToken::Audience);
        }
        let user_id = match claims.remove(&self.options.user_claim) {
            Some(Json::String(user_id)) if !user_id.is_empty() => user_id,
            _ => return Err(InvalidToken::User),
        };
        let roles = claims.remove(&self.options.roles_claim).map_or_else(|| Ok(Vec::new()), parse_roles)?;
        let session = Session { user_id, roles, metadata: claims, expires_at, credential: Some(credential) };
        if session.is_expired(now) { Err(InvalidToken::Expired) } else { Ok(session) }
    }

    /// Verifies the signature of a token. Returns its claims and the credential of its session.
    fn claims(&self, token: &str) -> Result<(Map<String, Json>, Credential), InvalidToken> {
        if token.len() > Self::MAX_LEN {
            return Err(InvalidToken::TooLong);
        }
        let (signed, signature) = token.rsplit_once('.').ok_or(InvalidToken::Malformed)?;
        let (header, payload) = signed.split_once('.').ok_or(InvalidToken::Malformed)?;
        let header = parse_object(&decode(header)?)?;
        let key = self.select_key(&header)?;
        if header.contains_key("crit") {
            return Err(InvalidToken::Critical);
        }
        if !key.key.verifies(signed.as_bytes(), &decode(signature)?) {
            return Err(InvalidToken::Signature);
        }
        Ok((parse_object(&decode(payload)?)?, key.credential))
    }

    /// Returns the key that verifies a token with this header.
    fn select_key(&self, header: &Map<String, Json>) -> Result<&VerificationKey, InvalidToken> {
        let id = match (&self.options.keys, header.get("kid")) {
            (JwtKeys::One(..), _) | (_, None) => None,
            (JwtKeys::Set(_), Some(Json::String(id))) => Some(id),
            (JwtKeys::Set(_), Some(_)) => return Err(InvalidToken::Malformed),
        };
        let algorithm = header.get("alg").and_then(Json::as_str);
        let has_id = |key: &&VerificationKey| id.is_none() || key.id.as_ref() == id;
        let mut named = self.keys.iter().filter(has_id).peekable();
        if named.peek().is_none() {
            return Err(InvalidToken::UnknownKey);
        }
        let mut matching = named.filter(|key| Some(key.algorithm.name()) == algorithm);
        match (matching.next(), matching.next()) {
            (Some(key), None) => Ok(key),
            (None, _) => Err(InvalidToken::Algorithm),
            (Some(_), Some(_)) => Err(InvalidToken::NoKeyId),
        }
    }
}

fn verification_keys(options: &JwtOptions) -> Result<Vec<VerificationKey>, JwtError> {
    let JwtOptions { keys, issuer, audience, user_claim, roles_claim, max_age } = options;
    let settings = format!("{:?}", (issuer, audience, user_claim, roles_claim, max_age));
    let bind = |id, algorithm: JwtAlgorithm, key: Key, secret: &[u8]| {
        let parts = [algorithm.name().as_bytes(), &key.public_bytes(), secret, settings.as_bytes()];
        let credential = Credential::of(&parts).map_err(|NoRandomness| JwtError::NoRandomness)?;
        Ok(VerificationKey { id, algorithm, key, credential })
    };
    match keys {
        JwtKeys::One(algorithm, key) => {
            let secret = if let JwtKey::Secret(secret) = key { &secret[..] } else { &[] };
            Ok(vec![bind(None, *algorithm, Key::new(*algorithm, key)?, secret)?])
        }
        JwtKeys::Set(json) => {
            let keys = key_set::parse(json)?.into_iter();
            keys.map(|key| bind(key.id, key.algorithm, key.key, &[])).collect()
        }
    }
}

impl TokenValidator for Jwt {
    fn validate<'a>(&'a self, token: &'a str, now: u64) -> Validation<'a> {
        let session = self.session(token, now);
        if let Err(reason) = &session {
            tracing::debug!(%reason, "token rejected");
        }
        Box::pin(future::ready(Ok(session.ok())))
    }

    fn still_accepts(&self, session: &Session) -> bool {
        let is_known = |credential| self.keys.iter().any(|key| key.credential == credential);
        session.credential.is_none_or(is_known)
    }
}

impl fmt::Debug for Jwt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Jwt").field("options", &self.options).finish_non_exhaustive()
    }
}

fn decode(text: &str) -> Result<Vec<u8>, InvalidToken> {
    URL_SAFE_NO_PAD.decode(text).map_err(|_| InvalidToken::Malformed)
}

fn parse_object(json: &[u8]) -> Result<Map<String, Json>, InvalidToken> {
    serde_json::from_slice(json).map_err(|_| InvalidToken::Malformed)
}

/// Converts seconds, possibly with a fraction, to milliseconds. Times before 1970 become 0.
fn parse_time(seconds: &Json) -> Result<u64, InvalidToken> {
    if let Some(seconds) = seconds.as_u64() {
        return Ok(seconds.saturating_mul(1000));
    }
    let seconds = seconds.as_f64().ok_or(InvalidToken::Time)?;
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "the conversion saturates, as intended"
    )]
    Ok((seconds * 1000.0) as u64)
}

fn has_audience(aud: &Json, audience: &str) -> bool {
    let is = |one: &Json| one.as_str() == Some(audience);
    is(aud) || aud.as_array().is_some_and(|all| all.iter().any(is))
}

fn parse_roles(claim: Json) -> Result<Vec<String>, InvalidToken> {
    let role = |role| match role {
        Json::String(role) => Ok(role),
        _ => Err(InvalidToken::Roles),
    };
    match claim {
        Json::Null => Ok(Vec::new()),
        Json::String(roles) => Ok(roles.split_ascii_whitespace().map(str::to_owned).collect()),
        Json::Array(roles) => roles.into_iter().map(role).collect(),
        _ => Err(InvalidToken::Roles),
    }
}

#[cfg(test)]
mod tests {
    use std::pin::Pin;
    use std::task::{Context, Poll, Waker};

    use ring::hmac;
    use ring::rand::SystemRandom;
    use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, Ed25519KeyPair, KeyPair as _};
    use serde_json::json;

    use super::*;

    const SECRET: &[u8] = b"a secret of more than thirty-two bytes";
    /// Signed with OpenSSL: `{"sub":"mara","roles":["writer"],"exp":2000000000,"team":7}`.
    const SIGNED: [(JwtAlgorithm, &str, &str); 3] = [
        (JwtAlgorithm::Rs256, include_str!("fixtures/rs256.pem"), include_str!("fixtures/rs256.jwt")),
        (JwtAlgorithm::Es256, include_str!("fixtures/es256.pem"), include_str!("fixtures/es256.jwt")),
        (JwtAlgorithm::EdDsa, include_str!("fixtures/eddsa.pem"), include_str!("fixtures/eddsa.jwt")),
    ];

    fn hs256() -> JwtOptions {
        JwtOptions::new(JwtKeys::One(JwtAlgorithm::Hs256, JwtKey::Secret(SECRET.to_vec())))
    }

    fn public(algorithm: JwtAlgorithm, pem: &str) -> Jwt {
        Jwt::new(JwtOptions::new(JwtKeys::One(algorithm, JwtKey::PublicKey(pem.to_owned())))).unwrap()
    }

    fn signed(header: &Json, claims: &str, secret: &[u8]) -> String {
        let text = format!("{}.{}", URL_SAFE_NO_PAD.encode(header.to_string()), URL_SAFE_NO_PAD.encode(claims));
        let signature = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, secret), text.as_bytes());
        format!("{text}.{}", URL_SAFE_NO_PAD.encode(signature))
    }

    fn token(claims: &Json) -> String {
        signed(&json!({"alg": "HS256", "typ": "JWT"}), &claims.to_string(), SECRET)
    }

    fn session(options: JwtOptions, claims: &Json, now: u64) -> Result<Session, InvalidToken> {
        Jwt::new(options).unwrap().session(&token(claims), now)
    }

    #[test]
    fn tokens_of_every_algorithm_are_accepted() {
        for (algorithm, pem, token) in SIGNED {
            let jwt = public(algorithm, pem);
            let session = jwt.session(token, 1_999_999_999_999).unwrap();
            assert_eq!((&*session.user_id, &session.roles[..]), ("mara", &["writer".to_owned()][..]));
            assert_eq!(
                (Json::Object(session.metadata), session.expires_at),
                (json!({"team": 7}), Some(2_000_000_000_000))
            );
            assert_eq!(jwt.session(token, 2_000_000_000_000), Err(InvalidToken::Expired));
        }
        assert_eq!(session(hs256(), &json!({"sub": "mara"}), 0).unwrap(), Session::new("mara", [""; 0]));
    }

    #[test]
    fn validator_returns_session_or_none() {
        let jwt = Jwt::new(hs256()).unwrap();
        let validate = |token: &str| {
            let mut validation: Pin<_> = jwt.validate(token, 5);
            match validation.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                Poll::Ready(answer) => answer.unwrap().map(|session| session.user_id),
                Poll::Pending => panic!("validation must not wait"),
            }
        };
        assert_eq!(validate(&token(&json!({"sub": "ann"}))), Some("ann".to_owned()));
        assert_eq!(validate("x"), None);
    }

    #[test]
    fn modified_token_is_rejected() {
        let hs256 = (Jwt::new(hs256()).unwrap(), token(&json!({"sub": "mara", "exp": 2_000_000_000})));
        let others = SIGNED.map(|(algorithm, pem, token)| (public(algorithm, pem), token.to_owned()));
        for (jwt, token) in others.into_iter().chain([hs256]) {
            assert!(jwt.session(&token, 0).is_ok());
            let [header, payload, signature] = <[&str; 3]>::try_from(token.split('.').collect::<Vec<_>>()).unwrap();
            let admin = URL_SAFE_NO_PAD.encode(r#"{"sub":"mara","roles":["admin"],"exp":2000000000}"#);
            assert_eq!(jwt.session(&format!("{header}.{admin}.{signature}"), 0), Err(InvalidToken::Signature));
            assert_eq!(jwt.session(&format!("{header}.{payload}."), 0), Err(InvalidToken::Signature));
            for index in 0..token.len() {
                let mut bytes = token.clone().into_bytes();
                bytes[index] = if bytes[index] == b'A' { b'B' } else { b'A' };
                let changed = String::from_utf8(bytes).unwrap();
                assert!(jwt.session(&changed, 0).is_err(), "{index}");
                assert!(jwt.session(&token[..index], 0).is_err(), "{index}");
            }
        }
    }

    #[test]
    fn unsigned_token_is_rejected() {
        for (algorithm, pem, token) in SIGNED {
            let jwt = public(algorithm, pem);
            let payload = token.split('.').nth(1).unwrap();
            for alg in [json!("none"), json!("None"), json!("NONE"), json!(""), json!(null), json!([algorithm.name()])]
            {
                let header = URL_SAFE_NO_PAD.encode(json!({"alg": alg}).to_string());
                assert_eq!(jwt.session(&format!("{header}.{payload}."), 0), Err(InvalidToken::Algorithm), "{alg}");
            }
            let header = URL_SAFE_NO_PAD.encode("{}");
            assert_eq!(jwt.session(&format!("{header}.{payload}."), 0), Err(InvalidToken::Algorithm));
            // The right algorithm with an empty signature.
            let header = URL_SAFE_NO_PAD.encode(json!({"alg": algorithm.name()}).to_string());
            assert_eq!(jwt.session(&format!("{header}.{payload}."), 0), Err(InvalidToken::Signature));
        }
    }

    #[test]
    fn public_key_is_not_accepted_as_hmac_key() {
        for (algorithm, pem, _) in SIGNED {
            let jwt = public(algorithm, pem);
            for secret in [pem, pem.trim()] {
                let forged = signed(&json!({"alg": "HS256"}), r#"{"sub":"mara"}"#, secret.as_bytes());
                assert_eq!(jwt.session(&forged, 0), Err(InvalidToken::Algorithm));
                let forged = signed(&json!({"alg": algorithm.name()}), r#"{"sub":"mara"}"#, secret.as_bytes());
                assert_eq!(jwt.session(&forged, 0), Err(InvalidToken::Signature));
            }
        }
    }

    #[test]
    fn token_signed_with_another_key_is_rejected() {
        let other = signed(&json!({"alg": "HS256"}), r#"{"sub":"mara"}"#, &[7; 32]);
        assert_eq!(Jwt::new(hs256()).unwrap().session(&other, 0), Err(InvalidToken::Signature));
        let rs256 = public(JwtAlgorithm::Rs256, include_str!("fixtures/rs256-other.pem"));
        assert_eq!(rs256.session(SIGNED[0].2, 0), Err(InvalidToken::Signature));
        let random = SystemRandom::new();
        let text = |algorithm: &str| {
            let header = json!({"alg": algorithm}).to_string();
            format!("{}.{}", URL_SAFE_NO_PAD.encode(header), URL_SAFE_NO_PAD.encode(r#"{"sub":"eve"}"#))
        };
        let token = |text: &str, signature: &[u8]| format!("{text}.{}", URL_SAFE_NO_PAD.encode(signature));
        let pem = |prefix: &str, key: &[u8]| {
            let der = [&base64::engine::general_purpose::STANDARD.decode(prefix).unwrap(), key].concat();
            let der = base64::engine::general_purpose::STANDARD.encode(der);
            format!("-----BEGIN PUBLIC KEY-----\n{der}\n-----END PUBLIC KEY-----\n")
        };

        let document = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &random).unwrap();
        let pair = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, document.as_ref(), &random).unwrap();
        let signed_text = text("ES256");
        let eve = token(&signed_text, pair.sign(&random, signed_text.as_bytes()).unwrap().as_ref());
        let own = pem("MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgA=", pair.public_key().as_ref());
        assert_eq!(public(JwtAlgorithm::Es256, SIGNED[1].1).session(&eve, 0), Err(InvalidToken::Signature));
        assert_eq!(public(JwtAlgorithm::Es256, &own).session(&eve, 0).unwrap().user_id, "eve");

        let document = Ed25519KeyPair::generate_pkcs8(&random).unwrap();
        let pair = Ed25519KeyPair::from_pkcs8(document.as_ref()).unwrap();
        let signed_text = text("EdDSA");
        let eve = token(&signed_text, pair.sign(signed_text.as_bytes()).as_ref());
        let own = pem("MCowBQYDK2VwAyEA", pair.public_key().as_ref());
        assert_eq!(public(JwtAlgorithm::EdDsa, SIGNED[2].1).session(&eve, 0), Err(InvalidToken::Signature));
        assert_eq!(public(JwtAlgorithm::EdDsa, &own).session(&eve, 0).unwrap().user_id, "eve");
    }

    #[test]
    fn malformed_token_is_rejected() {
        let jwt = Jwt::new(hs256()).unwrap();
        let good = token(&json!({"sub": "mara"}));
        let (padded, spaced, more) = (format!("{good}="), format!(" {good}"), format!("{good}.x"));
        for text in ["", ".", "..", "...", "a.b", "a.b.c", "💧.💧.💧", &padded, &spaced, &more] {
            assert_eq!(jwt.session(text, 0), Err(InvalidToken::Malformed), "{text}");
        }
        let header = json!({"alg": "HS256"});
        for claims in ["", "[]", "null", "7", "{", "\"sub\"", "{\"sub\":\"mara\"} x"] {
            assert_eq!(jwt.session(&signed(&header, claims, SECRET), 0), Err(InvalidToken::Malformed), "{claims}");
        }
        let critical = signed(&json!({"alg": "HS256", "crit": ["b64"], "b64": false}), r#"{"sub":"mara"}"#, SECRET);
        assert_eq!(jwt.session(&critical, 0), Err(InvalidToken::Critical));
    }

    #[test]
    fn token_above_the_length_limit_is_rejected() {
        let jwt = Jwt::new(hs256()).unwrap();
        let of_len = |len: usize| token(&json!({"sub": "mara", "x": "x".repeat(len)}));
        let fits = (11_000..11_500).rev().map(of_len).find(|token| token.len() <= Jwt::MAX_LEN).unwrap();
        assert!(fits.len() > Jwt::MAX_LEN - 4 && jwt.session(&fits, 0).is_ok());
        assert_eq!(jwt.session(&of_len(Jwt::MAX_LEN), 0), Err(InvalidToken::TooLong));
        assert_eq!(jwt.session(&".".repeat(Jwt::MAX_LEN + 1), 0), Err(InvalidToken::TooLong));
    }

    #[test]
    fn exp_and_nbf_are_checked_to_the_millisecond() {
        let at = |claims: Json, now| session(hs256(), &claims, now).map(|session| session.expires_at);
        let exp = |exp: Json| json!({"sub": "mara", "exp": exp});
        assert_eq!(at(exp(json!(10)), 9_999), Ok(Some(10_000)));
        assert_eq!(at(exp(json!(10)), 10_000), Err(InvalidToken::Expired));
        assert_eq!(at(exp(json!(10.5)), 10_499), Ok(Some(10_500)));
        assert_eq!(at(exp(json!(10.5)), 10_500), Err(InvalidToken::Expired));
        assert_eq!(at(exp(json!(-5)), 0), Err(InvalidToken::Expired));
        assert_eq!(at(exp(json!(0)), 0), Err(InvalidToken::Expired));
        assert_eq!(at(exp(json!(1e300)), 5), Ok(Some(u64::MAX)));
        assert_eq!(at(exp(json!(u64::MAX)), 5), Ok(Some(u64::MAX)));
        for wrong in [json!("10"), json!(null), json!([10]), json!(true)] {
            assert_eq!(at(exp(wrong.clone()), 5), Err(InvalidToken::Time), "{wrong}");
            assert_eq!(at(json!({"sub": "mara", "nbf": wrong}), 5), Err(InvalidToken::Time));
        }
        assert_eq!(at(json!({"sub": "mara"}), u64::MAX), Ok(None));
        assert_eq!(at(json!({"sub": "mara", "nbf": 10}), 9_999), Err(InvalidToken::NotBefore));
        assert_eq!(at(json!({"sub": "mara", "nbf": 10}), 10_000), Ok(None));
    }

    #[test]
    fn token_expires_at_its_maximum_age() {
        let jwt = Jwt::new(hs256().max_age(Duration::from_millis(1500))).unwrap();
        let session = |claims: &Json, now| jwt.session(&token(claims), now);
        let claims = json!({"sub": "mara", "iat": 10});
        assert_eq!(session(&claims, 11_499).unwrap().expires_at, Some(11_500));
        assert_eq!(session(&claims, 11_500), Err(InvalidToken::TooOld));
        let short = json!({"sub": "mara", "iat": 10, "exp": 11});
        assert_eq!(session(&short, 10_999).unwrap().expires_at, Some(11_000));
        assert_eq!(session(&short, 11_000), Err(InvalidToken::Expired));
        let long = json!({"sub": "mara", "iat": 10, "exp": 99});
        assert_eq!(session(&long, 11_499).unwrap().expires_at, Some(11_500));
        assert_eq!(session(&long, 11_500), Err(InvalidToken::TooOld));
        assert_eq!(session(&json!({"sub": "mara", "exp": 99}), 0), Err(InvalidToken::NoIssueTime));
        assert_eq!(session(&json!({"sub": "mara", "iat": "now"}), 0), Err(InvalidToken::Time));
    }

    #[test]
    fn issuer_and_audience_must_match() {
        let options = hs256().issuer("me").audience("here");
        let claims = |iss: Json, aud: Json| json!({"sub": "mara", "iss": iss, "aud": aud});
        for (claims, expected) in [
            (claims(json!("me"), json!("here")), None),
            (claims(json!("me"), json!(["there", "here"])), None),
            (claims(json!("you"), json!("here")), Some(InvalidToken::Issuer)),
            (claims(json!(["me"]), json!("here")), Some(InvalidToken::Issuer)),
            (claims(json!("me"), json!("there")), Some(InvalidToken::Audience)),
            (claims(json!("me"), json!([])), Some(InvalidToken::Audience)),
            (claims(json!("me"), json!([["here"]])), Some(InvalidToken::Audience)),
            (claims(json!("me"), json!({"here": 1})), Some(InvalidToken::Audience)),
            (json!({"sub": "mara", "iss": "me"}), Some(InvalidToken::Audience)),
            (json!({"sub": "mara", "aud": "here"}), Some(InvalidToken::Issuer)),
        ] {
            assert_eq!(session(options.clone(), &claims, 0).err(), expected, "{claims}");
            assert!(session(hs256(), &claims, 0).is_ok());
        }
    }

    #[test]
    fn user_and_roles_are_claims_and_the_rest_is_metadata() {
        let of =
            |roles: Json| session(hs256(), &json!({"sub": "mara", "roles": roles}), 0).map(|session| session.roles);
        let both = || Ok(vec!["a".to_owned(), "b".to_owned()]);
        assert_eq!((of(json!(["a", "b"])), of(json!("a b")), of(json!(" a  b "))), (both(), both(), both()));
        assert_eq!((of(json!([])), of(json!("")), of(json!(null))), (Ok(vec![]), Ok(vec![]), Ok(vec![])));
        for wrong in [json!(7), json!({}), json!(["a", 7]), json!([["a"]]), json!(true)] {
            assert_eq!(of(wrong.clone()), Err(InvalidToken::Roles), "{wrong}");
        }
        for wrong in [json!({}), json!({"sub": ""}), json!({"sub": 7}), json!({"sub": null}), json!({"sub": ["mara"]})]
        {
            assert_eq!(session(hs256(), &wrong, 0), Err(InvalidToken::User), "{wrong}");
        }
        let options = hs256().user_claim("email").roles_claim("https://a.b/groups");
        let claims =
            json!({"sub": "7", "roles": ["x"], "email": "m@a.b", "https://a.b/groups": "g", "exp": 9, "iss": "i"});
        let session = session(options, &claims, 0).unwrap();
        assert_eq!((&*session.user_id, session.roles), ("m@a.b", vec!["g".to_owned()]));
        assert_eq!(Json::Object(session.metadata), json!({"sub": "7", "roles": ["x"], "iss": "i"}));
    }

    #[test]
    fn empty_settings_are_errors() {
        let error = |options| Jwt::new(options).unwrap_err().to_string();
        assert_eq!(error(hs256().issuer("")), "the issuer is empty; set a value or remove the setting");
        assert_eq!(error(hs256().audience("")), "the audience is empty; set a value or remove the setting");
        assert_eq!(error(hs256().user_claim("")), "the user claim is empty; set a value or remove the setting");
        assert_eq!(
            error(hs256().roles_claim("sub")),
            "user and roles are read from the same claim \"sub\"; use two claims"
        );
    }

    #[test]
    fn algorithms_have_names_and_debug_hides_secrets() {
        for algorithm in JwtAlgorithm::ALL {
            assert_eq!(JwtAlgorithm::named(algorithm.name()), Some(algorithm));
        }
        assert_eq!((JwtAlgorithm::named("none"), JwtAlgorithm::named("hs256")), (None, None));
        let debug = format!("{:?}", Jwt::new(hs256()).unwrap());
        assert!(!debug.contains("secret") && !debug.contains("97, 32"), "{debug}");
    }
}
