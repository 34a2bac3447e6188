//! JSON Web Tokens, signed by somebody else.
//!
//! There is one algorithm, and it comes from the settings: what a token says of itself is only compared with it. So a token can
//! choose neither no algorithm, nor one for which the public key is a secret. The signature is verified before a claim is read.
//!
//! Whoever has a token may use it, as often as they like, until it expires: it is not remembered which were used. A user whose
//! tokens got into wrong hands is revoked until they have expired.
//!
//! Signatures are verified by the library that does TLS here anyway. One for tokens would bring a reader of ASN.1 with big numbers
//! and dates, and ask the system for the time.

mod key;

use std::fmt;
use std::future;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde_json::{Map, Value as Json};

use self::key::Key;
pub use self::key::{JwtError, JwtKey};
use super::{Session, TokenValidator, Validation};

/// Knows whose a JSON Web Token is.
///
/// A token without `exp` is good for ever. Times are compared without leeway: a token is over at the millisecond of its `exp`, and
/// good from that of its `nbf`.
pub struct Jwt {
    key: Key,
    options: JwtOptions,
}

/// Which tokens are good, and what they say.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct JwtOptions {
    /// How they are signed; a token that is signed in another way is refused.
    pub algorithm: JwtAlgorithm,
    /// What signatures are verified with.
    pub key: JwtKey,
    /// What `iss` must be. Default: anything, because the key says enough if it is that of one issuer.
    pub issuer: Option<String>,
    /// What `aud` must be, or have among others. Default: anything; set it if the issuer has other customers.
    pub audience: Option<String>,
    /// The claim that has the user id, a string. Default: `sub`.
    pub user_claim: String,
    /// The claim that has the roles: a list of strings, or a string with spaces between them. A token without it has none.
    /// Default: `roles`.
    pub roles_claim: String,
}

/// How tokens are signed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum JwtAlgorithm {
    /// HMAC with SHA-256: whoever can verify can sign.
    Hs256,
    /// RSA (PKCS #1 v1.5) with SHA-256.
    Rs256,
    /// ECDSA on P-256 with SHA-256.
    Es256,
    /// Ed25519.
    EdDsa,
}

impl JwtAlgorithm {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Hs256, Self::Rs256, Self::Es256, Self::EdDsa];

    /// As it is called in tokens.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Hs256 => "HS256",
            Self::Rs256 => "RS256",
            Self::Es256 => "ES256",
            Self::EdDsa => "EdDSA",
        }
    }

    /// The one that is called so in tokens.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|algorithm| algorithm.name() == name)
    }

    const fn takes(self) -> &'static str {
        match self {
            Self::Hs256 => "a secret",
            Self::Rs256 => "an RSA key",
            Self::Es256 => "a P-256 key",
            Self::EdDsa => "an Ed25519 key",
        }
    }
}

impl JwtOptions {
    /// Tokens of any issuer and for anybody, with the usual claims.
    pub fn new(algorithm: JwtAlgorithm, key: JwtKey) -> Self {
        Self {
            algorithm,
            key,
            issuer: None,
            audience: None,
            user_claim: "sub".to_owned(),
            roles_claim: "roles".to_owned(),
        }
    }
}

/// Why a token was refused. Its sender is not told; whoever runs the server is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
enum Refused {
    #[error("it is longer than {} bytes", Jwt::MAX_LEN)]
    TooLong,
    #[error("it is no JSON Web Token")]
    Malformed,
    #[error("it says that it is signed in another way")]
    Algorithm,
    #[error("it has extensions that must be understood")]
    Critical,
    #[error("the signature is wrong")]
    Signature,
    #[error("exp or nbf is no time")]
    Time,
    #[error("it has expired")]
    Expired,
    #[error("it is not good yet")]
    NotYet,
    #[error("it is from another issuer")]
    Issuer,
    #[error("it is for another audience")]
    Audience,
    #[error("the claim of the user is not a string, or empty")]
    User,
    #[error("the claim of the roles is neither a list of strings nor a string")]
    Roles,
}

impl Jwt {
    /// The longest token that is read: 16 KiB.
    pub const MAX_LEN: usize = 16 << 10;

    /// Knows the tokens that these settings describe.
    pub fn new(options: JwtOptions) -> Result<Self, JwtError> {
        let given = [
            ("the issuer", options.issuer.as_deref()),
            ("the audience", options.audience.as_deref()),
            ("the claim of the user", Some(&*options.user_claim)),
            ("the claim of the roles", Some(&*options.roles_claim)),
        ];
        if let Some((setting, _)) = given.into_iter().find(|(_, value)| *value == Some("")) {
            return Err(JwtError::Empty { setting });
        }
        if options.user_claim == options.roles_claim {
            return Err(JwtError::SameClaim { claim: options.user_claim });
        }
        Ok(Self { key: Key::new(options.algorithm, &options.key)?, options })
    }

    fn session(&self, token: &str, now: u64) -> Result<Session, Refused> {
        let mut claims = self.claims(token)?;
        let expires_at = claims.remove("exp").map(|exp| time(&exp)).transpose()?;
        let not_before = claims.get("nbf").map(time).transpose()?;
        if not_before.is_some_and(|not_before| now < not_before) {
            return Err(Refused::NotYet);
        }
        if let Some(issuer) = &self.options.issuer
            && claims.get("iss").and_then(Json::as_str) != Some(issuer)
        {
            return Err(Refused::Issuer);
        }
        if let Some(audience) = &self.options.audience
            && !claims.get("aud").is_some_and(|aud| is_for(aud, audience))
        {
            return Err(Refused::Audience);
        }
        let user_id = match claims.remove(&self.options.user_claim) {
            Some(Json::String(user_id)) if !user_id.is_empty() => user_id,
            _ => return Err(Refused::User),
        };
        let roles = claims.remove(&self.options.roles_claim).map_or_else(|| Ok(Vec::new()), roles)?;
        let session = Session { user_id, roles, metadata: claims, expires_at };
        if session.is_expired(now) { Err(Refused::Expired) } else { Ok(session) }
    }

    /// What a token says, if its signature is right.
    fn claims(&self, token: &str) -> Result<Map<String, Json>, Refused> {
        if token.len() > Self::MAX_LEN {
            return Err(Refused::TooLong);
        }
        let (signed, signature) = token.rsplit_once('.').ok_or(Refused::Malformed)?;
        let (header, payload) = signed.split_once('.').ok_or(Refused::Malformed)?;
        let header = object(&decode(header)?)?;
        if header.get("alg").and_then(Json::as_str) != Some(self.options.algorithm.name()) {
            return Err(Refused::Algorithm);
        }
        if header.contains_key("crit") {
            return Err(Refused::Critical);
        }
        if !self.key.verifies(signed.as_bytes(), &decode(signature)?) {
            return Err(Refused::Signature);
        }
        object(&decode(payload)?)
    }
}

impl TokenValidator for Jwt {
    fn validate<'a>(&'a self, token: &'a str, now: u64) -> Validation<'a> {
        let session = self.session(token, now);
        if let Err(reason) = &session {
            tracing::debug!(%reason, "a token was refused");
        }
        Box::pin(future::ready(Ok(session.ok())))
    }
}

impl fmt::Debug for Jwt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Jwt").field("options", &self.options).finish_non_exhaustive()
    }
}

fn decode(text: &str) -> Result<Vec<u8>, Refused> {
    URL_SAFE_NO_PAD.decode(text).map_err(|_| Refused::Malformed)
}

fn object(json: &[u8]) -> Result<Map<String, Json>, Refused> {
    serde_json::from_slice(json).map_err(|_| Refused::Malformed)
}

/// From seconds, which may have a fraction, to milliseconds. What is before 1970 is as long ago as can be.
fn time(seconds: &Json) -> Result<u64, Refused> {
    if let Some(seconds) = seconds.as_u64() {
        return Ok(seconds.saturating_mul(1000));
    }
    let seconds = seconds.as_f64().ok_or(Refused::Time)?;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it ends at the bounds, as it should")]
    Ok((seconds * 1000.0) as u64)
}

fn is_for(aud: &Json, audience: &str) -> bool {
    let is = |one: &Json| one.as_str() == Some(audience);
    is(aud) || aud.as_array().is_some_and(|all| all.iter().any(is))
}

fn roles(claim: Json) -> Result<Vec<String>, Refused> {
    let role = |role| match role {
        Json::String(role) => Ok(role),
        _ => Err(Refused::Roles),
    };
    match claim {
        Json::Null => Ok(Vec::new()),
        Json::String(roles) => Ok(roles.split_ascii_whitespace().map(str::to_owned).collect()),
        Json::Array(roles) => roles.into_iter().map(role).collect(),
        _ => Err(Refused::Roles),
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
    /// Signed by OpenSSL, whose private keys are gone: `{"sub":"mara","roles":["writer"],"exp":2000000000,"team":7}`.
    const SIGNED: [(JwtAlgorithm, &str, &str); 3] = [
        (JwtAlgorithm::Rs256, include_str!("fixtures/rs256.pem"), include_str!("fixtures/rs256.jwt")),
        (JwtAlgorithm::Es256, include_str!("fixtures/es256.pem"), include_str!("fixtures/es256.jwt")),
        (JwtAlgorithm::EdDsa, include_str!("fixtures/eddsa.pem"), include_str!("fixtures/eddsa.jwt")),
    ];

    fn hs256() -> JwtOptions {
        JwtOptions::new(JwtAlgorithm::Hs256, JwtKey::Secret(SECRET.to_vec()))
    }

    fn public(algorithm: JwtAlgorithm, pem: &str) -> Jwt {
        Jwt::new(JwtOptions::new(algorithm, JwtKey::PublicKey(pem.to_owned()))).unwrap()
    }

    fn signed(header: &Json, claims: &str, secret: &[u8]) -> String {
        let text = format!("{}.{}", URL_SAFE_NO_PAD.encode(header.to_string()), URL_SAFE_NO_PAD.encode(claims));
        let signature = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, secret), text.as_bytes());
        format!("{text}.{}", URL_SAFE_NO_PAD.encode(signature))
    }

    fn token(claims: &Json) -> String {
        signed(&json!({"alg": "HS256", "typ": "JWT"}), &claims.to_string(), SECRET)
    }

    fn session(options: JwtOptions, claims: &Json, now: u64) -> Result<Session, Refused> {
        Jwt::new(options).unwrap().session(&token(claims), now)
    }

    #[test]
    fn tokens_of_every_algorithm_are_somebodys() {
        for (algorithm, pem, token) in SIGNED {
            let jwt = public(algorithm, pem);
            let session = jwt.session(token, 1_999_999_999_999).unwrap();
            assert_eq!((&*session.user_id, &session.roles[..]), ("mara", &["writer".to_owned()][..]));
            assert_eq!(
                (Json::Object(session.metadata), session.expires_at),
                (json!({"team": 7}), Some(2_000_000_000_000))
            );
            assert_eq!(jwt.session(token, 2_000_000_000_000), Err(Refused::Expired));
        }
        assert_eq!(session(hs256(), &json!({"sub": "mara"}), 0).unwrap(), Session::new("mara", [""; 0]));
    }

    #[test]
    fn a_validator_says_who_or_nobody() {
        let jwt = Jwt::new(hs256()).unwrap();
        let ask = |token: &str| {
            let mut validation: Pin<_> = jwt.validate(token, 5);
            match validation.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                Poll::Ready(answer) => answer.unwrap().map(|session| session.user_id),
                Poll::Pending => panic!("it has nothing to wait for"),
            }
        };
        assert_eq!(ask(&token(&json!({"sub": "ann"}))), Some("ann".to_owned()));
        assert_eq!(ask("x"), None);
    }

    #[test]
    fn a_token_that_was_changed_is_refused() {
        let hs256 = (Jwt::new(hs256()).unwrap(), token(&json!({"sub": "mara", "exp": 2_000_000_000})));
        let others = SIGNED.map(|(algorithm, pem, token)| (public(algorithm, pem), token.to_owned()));
        for (jwt, token) in others.into_iter().chain([hs256]) {
            assert!(jwt.session(&token, 0).is_ok());
            let [header, payload, signature] = <[&str; 3]>::try_from(token.split('.').collect::<Vec<_>>()).unwrap();
            let admin = URL_SAFE_NO_PAD.encode(r#"{"sub":"mara","roles":["admin"],"exp":2000000000}"#);
            assert_eq!(jwt.session(&format!("{header}.{admin}.{signature}"), 0), Err(Refused::Signature));
            assert_eq!(jwt.session(&format!("{header}.{payload}."), 0), Err(Refused::Signature));
            for place in 0..token.len() {
                let mut bytes = token.clone().into_bytes();
                bytes[place] = if bytes[place] == b'A' { b'B' } else { b'A' };
                let changed = String::from_utf8(bytes).unwrap();
                assert!(jwt.session(&changed, 0).is_err(), "{place}");
                assert!(jwt.session(&token[..place], 0).is_err(), "{place}");
            }
        }
    }

    #[test]
    fn a_token_that_is_not_signed_is_refused() {
        for (algorithm, pem, token) in SIGNED {
            let jwt = public(algorithm, pem);
            let payload = token.split('.').nth(1).unwrap();
            for alg in [json!("none"), json!("None"), json!("NONE"), json!(""), json!(null), json!([algorithm.name()])]
            {
                let header = URL_SAFE_NO_PAD.encode(json!({"alg": alg}).to_string());
                assert_eq!(jwt.session(&format!("{header}.{payload}."), 0), Err(Refused::Algorithm), "{alg}");
            }
            let header = URL_SAFE_NO_PAD.encode("{}");
            assert_eq!(jwt.session(&format!("{header}.{payload}."), 0), Err(Refused::Algorithm));
            // Nor one that only says that it is.
            let header = URL_SAFE_NO_PAD.encode(json!({"alg": algorithm.name()}).to_string());
            assert_eq!(jwt.session(&format!("{header}.{payload}."), 0), Err(Refused::Signature));
        }
    }

    #[test]
    fn a_public_key_is_no_secret() {
        for (algorithm, pem, _) in SIGNED {
            let jwt = public(algorithm, pem);
            for secret in [pem, pem.trim()] {
                let forged = signed(&json!({"alg": "HS256"}), r#"{"sub":"mara"}"#, secret.as_bytes());
                assert_eq!(jwt.session(&forged, 0), Err(Refused::Algorithm));
                let forged = signed(&json!({"alg": algorithm.name()}), r#"{"sub":"mara"}"#, secret.as_bytes());
                assert_eq!(jwt.session(&forged, 0), Err(Refused::Signature));
            }
        }
    }

    #[test]
    fn a_token_signed_with_another_key_is_refused() {
        let other = signed(&json!({"alg": "HS256"}), r#"{"sub":"mara"}"#, &[7; 32]);
        assert_eq!(Jwt::new(hs256()).unwrap().session(&other, 0), Err(Refused::Signature));
        let rs256 = public(JwtAlgorithm::Rs256, include_str!("fixtures/rs256-other.pem"));
        assert_eq!(rs256.session(SIGNED[0].2, 0), Err(Refused::Signature));
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
        let text_of_it = text("ES256");
        let eve = token(&text_of_it, pair.sign(&random, text_of_it.as_bytes()).unwrap().as_ref());
        let own = pem("MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgA=", pair.public_key().as_ref());
        assert_eq!(public(JwtAlgorithm::Es256, SIGNED[1].1).session(&eve, 0), Err(Refused::Signature));
        assert_eq!(public(JwtAlgorithm::Es256, &own).session(&eve, 0).unwrap().user_id, "eve");

        let document = Ed25519KeyPair::generate_pkcs8(&random).unwrap();
        let pair = Ed25519KeyPair::from_pkcs8(document.as_ref()).unwrap();
        let text_of_it = text("EdDSA");
        let eve = token(&text_of_it, pair.sign(text_of_it.as_bytes()).as_ref());
        let own = pem("MCowBQYDK2VwAyEA", pair.public_key().as_ref());
        assert_eq!(public(JwtAlgorithm::EdDsa, SIGNED[2].1).session(&eve, 0), Err(Refused::Signature));
        assert_eq!(public(JwtAlgorithm::EdDsa, &own).session(&eve, 0).unwrap().user_id, "eve");
    }

    #[test]
    fn what_is_no_token_is_refused() {
        let jwt = Jwt::new(hs256()).unwrap();
        let good = token(&json!({"sub": "mara"}));
        let (padded, spaced, more) = (format!("{good}="), format!(" {good}"), format!("{good}.x"));
        for text in ["", ".", "..", "...", "a.b", "a.b.c", "💧.💧.💧", &padded, &spaced, &more] {
            assert_eq!(jwt.session(text, 0), Err(Refused::Malformed), "{text}");
        }
        let header = json!({"alg": "HS256"});
        for claims in ["", "[]", "null", "7", "{", "\"sub\"", "{\"sub\":\"mara\"} x"] {
            assert_eq!(jwt.session(&signed(&header, claims, SECRET), 0), Err(Refused::Malformed), "{claims}");
        }
        let critical = signed(&json!({"alg": "HS256", "crit": ["b64"], "b64": false}), r#"{"sub":"mara"}"#, SECRET);
        assert_eq!(jwt.session(&critical, 0), Err(Refused::Critical));
    }

    #[test]
    fn a_token_that_is_too_long_is_not_read() {
        let jwt = Jwt::new(hs256()).unwrap();
        let of_len = |len: usize| token(&json!({"sub": "mara", "x": "x".repeat(len)}));
        let fits = (12_000..12_300).rev().map(of_len).find(|token| token.len() <= Jwt::MAX_LEN).unwrap();
        assert!(fits.len() > Jwt::MAX_LEN - 4 && jwt.session(&fits, 0).is_ok());
        assert_eq!(jwt.session(&of_len(Jwt::MAX_LEN), 0), Err(Refused::TooLong));
        assert_eq!(jwt.session(&".".repeat(Jwt::MAX_LEN + 1), 0), Err(Refused::TooLong));
    }

    #[test]
    fn times_are_those_that_are_given() {
        let at = |claims: Json, now| session(hs256(), &claims, now).map(|session| session.expires_at);
        let exp = |exp: Json| json!({"sub": "mara", "exp": exp});
        assert_eq!(at(exp(json!(10)), 9_999), Ok(Some(10_000)));
        assert_eq!(at(exp(json!(10)), 10_000), Err(Refused::Expired));
        assert_eq!(at(exp(json!(10.5)), 10_499), Ok(Some(10_500)));
        assert_eq!(at(exp(json!(10.5)), 10_500), Err(Refused::Expired));
        assert_eq!(at(exp(json!(-5)), 0), Err(Refused::Expired));
        assert_eq!(at(exp(json!(0)), 0), Err(Refused::Expired));
        assert_eq!(at(exp(json!(1e300)), 5), Ok(Some(u64::MAX)));
        assert_eq!(at(exp(json!(u64::MAX)), 5), Ok(Some(u64::MAX)));
        for wrong in [json!("10"), json!(null), json!([10]), json!(true)] {
            assert_eq!(at(exp(wrong.clone()), 5), Err(Refused::Time), "{wrong}");
            assert_eq!(at(json!({"sub": "mara", "nbf": wrong}), 5), Err(Refused::Time));
        }
        assert_eq!(at(json!({"sub": "mara"}), u64::MAX), Ok(None));
        assert_eq!(at(json!({"sub": "mara", "nbf": 10}), 9_999), Err(Refused::NotYet));
        assert_eq!(at(json!({"sub": "mara", "nbf": 10}), 10_000), Ok(None));
    }

    #[test]
    fn issuer_and_audience_must_be_the_right_ones() {
        let mut options = hs256();
        (options.issuer, options.audience) = (Some("me".to_owned()), Some("here".to_owned()));
        let claims = |iss: Json, aud: Json| json!({"sub": "mara", "iss": iss, "aud": aud});
        for (claims, expected) in [
            (claims(json!("me"), json!("here")), None),
            (claims(json!("me"), json!(["there", "here"])), None),
            (claims(json!("you"), json!("here")), Some(Refused::Issuer)),
            (claims(json!(["me"]), json!("here")), Some(Refused::Issuer)),
            (claims(json!("me"), json!("there")), Some(Refused::Audience)),
            (claims(json!("me"), json!([])), Some(Refused::Audience)),
            (claims(json!("me"), json!([["here"]])), Some(Refused::Audience)),
            (claims(json!("me"), json!({"here": 1})), Some(Refused::Audience)),
            (json!({"sub": "mara", "iss": "me"}), Some(Refused::Audience)),
            (json!({"sub": "mara", "aud": "here"}), Some(Refused::Issuer)),
        ] {
            assert_eq!(session(options.clone(), &claims, 0).err(), expected, "{claims}");
            assert!(session(hs256(), &claims, 0).is_ok());
        }
    }

    #[test]
    fn users_and_roles_are_claims_and_the_rest_is_metadata() {
        let of =
            |roles: Json| session(hs256(), &json!({"sub": "mara", "roles": roles}), 0).map(|session| session.roles);
        let both = || Ok(vec!["a".to_owned(), "b".to_owned()]);
        assert_eq!((of(json!(["a", "b"])), of(json!("a b")), of(json!(" a  b "))), (both(), both(), both()));
        assert_eq!((of(json!([])), of(json!("")), of(json!(null))), (Ok(vec![]), Ok(vec![]), Ok(vec![])));
        for wrong in [json!(7), json!({}), json!(["a", 7]), json!([["a"]]), json!(true)] {
            assert_eq!(of(wrong.clone()), Err(Refused::Roles), "{wrong}");
        }
        for wrong in [json!({}), json!({"sub": ""}), json!({"sub": 7}), json!({"sub": null}), json!({"sub": ["mara"]})]
        {
            assert_eq!(session(hs256(), &wrong, 0), Err(Refused::User), "{wrong}");
        }
        let mut options = hs256();
        (options.user_claim, options.roles_claim) = ("email".to_owned(), "https://a.b/groups".to_owned());
        let claims =
            json!({"sub": "7", "roles": ["x"], "email": "m@a.b", "https://a.b/groups": "g", "exp": 9, "iss": "i"});
        let session = session(options, &claims, 0).unwrap();
        assert_eq!((&*session.user_id, session.roles), ("m@a.b", vec!["g".to_owned()]));
        assert_eq!(Json::Object(session.metadata), json!({"sub": "7", "roles": ["x"], "iss": "i"}));
    }

    #[test]
    fn settings_that_say_nothing_are_errors() {
        let error = |change: fn(&mut JwtOptions)| {
            let mut options = hs256();
            change(&mut options);
            Jwt::new(options).unwrap_err().to_string()
        };
        assert_eq!(error(|o| o.issuer = Some(String::new())), "the issuer is empty: leave it out, or say what it is");
        assert_eq!(
            error(|o| o.audience = Some(String::new())),
            "the audience is empty: leave it out, or say what it is"
        );
        assert_eq!(error(|o| o.user_claim.clear()), "the claim of the user is empty: leave it out, or say what it is");
        assert_eq!(
            error(|o| o.roles_claim = "sub".to_owned()),
            "the user and the roles are both the claim \"sub\": each needs its own"
        );
    }

    #[test]
    fn algorithms_have_names_and_secrets_are_not_shown() {
        for algorithm in JwtAlgorithm::ALL {
            assert_eq!(JwtAlgorithm::named(algorithm.name()), Some(algorithm));
        }
        assert_eq!((JwtAlgorithm::named("none"), JwtAlgorithm::named("hs256")), (None, None));
        let debug = format!("{:?}", Jwt::new(hs256()).unwrap());
        assert!(!debug.contains("secret") && !debug.contains("97, 32"), "{debug}");
    }
}
