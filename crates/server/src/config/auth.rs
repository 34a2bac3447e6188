//! Reads `auth`, and makes of it what the server asks.

use std::sync::Arc;

use serde_json::Value as Json;

use super::check::{Given, Report};
use super::error::Problem;
use super::later::{IDENTITY_KEYS, identity};
use super::layers::Environment;
use super::node::Value;
use super::permissions::permissions;
use super::place::Place;
use crate::{
    Auth, Jwt, JwtAlgorithm, JwtError, JwtKey, JwtOptions, Permissions, StaticToken, StaticTokens, TokenExpiry,
    TokenValidator,
};

pub(super) const KEYS: &[&str] = &[
    "required",
    "tokens",
    "jwt",
    "permissions",
    "builtIn",
    "adminSecret",
    "sessionTtl",
    "passwordMinLength",
    "maxSessionsPerUser",
    "loginRateLimit",
];
pub(super) const TOKEN_KEYS: &[&str] = &["userId", "roles", "metadata", "expiresAt", "expiresInMs"];
pub(super) const JWT_KEYS: &[&str] =
    &["algorithm", "secretEnv", "secret", "publicKeyFile", "issuer", "audience", "userClaim", "rolesClaim"];

/// What has been said so far.
#[derive(Default)]
pub(super) struct AuthDraft {
    required: Option<(bool, Place)>,
    tokens: Option<(Vec<(String, StaticToken)>, Place)>,
    /// None inside if something is wrong with it, which is told already.
    jwt: Option<(Option<Jwt>, Place)>,
    built_in: Option<(bool, Place)>,
    permissions: Option<(Permissions, Place)>,
    /// Settings of the built-in identity.
    identity: Vec<(String, Place)>,
}

impl AuthDraft {
    pub(super) fn read(&mut self, given: &Given<'_>, environment: Environment<'_>, report: &mut Report) {
        for (key, given) in given.members(report, KEYS) {
            match key {
                "required" => self.required = given.flag(report).map(|required| (required, given.place())),
                "tokens" => {
                    let tokens = given.named(report);
                    let tokens = tokens.iter().filter_map(|(name, given)| token(name, given, report)).collect();
                    self.tokens = Some((tokens, given.place()));
                }
                "jwt" => self.jwt = Some((jwt(&given, environment, report), given.place())),
                "permissions" => self.permissions = Some((permissions(&given, report), given.place())),
                "builtIn" => {
                    if let Some(is_on) = given.flag(report) {
                        self.built_in = Some((is_on, given.place()));
                    }
                }
                _ if IDENTITY_KEYS.contains(&key) && identity(key, &given, report) => {
                    self.identity.push((given.key.clone(), given.place()));
                }
                _ => {}
            }
        }
    }

    /// What it all amounts to; none if there is no auth.
    pub(super) fn finish(self, report: &mut Report) -> Option<Auth> {
        let key = "auth";
        let built_in = self.built_in.and_then(|(is_on, place)| is_on.then_some(place));
        let sources = [
            ("tokens", self.tokens.as_ref().map(|(_, place)| place)),
            ("jwt", self.jwt.as_ref().map(|(_, place)| place)),
        ];
        let given: Vec<(&'static str, &Place)> = sources
            .into_iter()
            .chain([("builtIn", built_in.as_ref())])
            .filter_map(|(name, place)| Some((name, place?)))
            .collect();
        if let [(one, _), (other, place), ..] = given[..] {
            report.add(place.clone(), key, Problem::Alternatives { one, other });
        }
        if let Some(place) = built_in {
            return report.fail(place, "auth.builtIn", Problem::NoIdentity);
        }
        for (key, place) in self.identity {
            let what = "it belongs to the built-in identity, which this version does not have; it is ignored";
            report.warnings.push(match &place {
                Place::File { .. } => format!("{place}: {key}: {what}"),
                _ => format!("{place}: {what}"),
            });
        }
        let is_meant = self.required.as_ref().filter(|(required, _)| *required).map(|(_, place)| place);
        let is_meant = is_meant.or(self.permissions.as_ref().map(|(_, place)| place)).cloned();
        let validator: Arc<dyn TokenValidator> = match (self.tokens, self.jwt) {
            (Some((tokens, place)), _) => Arc::new(static_tokens(tokens, &place, report)?),
            (None, Some((jwt, _))) => Arc::new(jwt?),
            (None, None) => return report.fail(is_meant?, key, Problem::NoSource),
        };
        let mut auth = Auth::new(validator);
        auth.required = self.required.is_none_or(|(required, _)| required);
        auth.permissions = self.permissions.map(|(permissions, _)| permissions).unwrap_or_default();
        Some(auth)
    }
}

fn static_tokens(tokens: Vec<(String, StaticToken)>, place: &Place, report: &mut Report) -> Option<StaticTokens> {
    let key = "auth.tokens";
    if tokens.is_empty() {
        report.warnings.push(format!("{place}: {key}: there are none, so nobody can log in"));
    }
    // What is wrong with one of them is told with its own place, and need not be told again of all together.
    if !report.errors.is_empty() {
        return None;
    }
    StaticTokens::new(tokens).map_err(|error| report.add(place.clone(), key, error.into())).ok()
}

fn token(name: &str, given: &Given<'_>, report: &mut Report) -> Option<(String, StaticToken)> {
    if name.is_empty() {
        let problem = Problem::Expected { expected: "a token".to_owned(), found: "an empty key".to_owned() };
        given.reject(report, problem);
    }
    let is_object = matches!(given.node.value, Value::Object(_));
    let (mut user_id, mut is_named) = (None, false);
    let mut token = StaticToken::new("", [""; 0]);
    let (mut at, mut after) = (None, None);
    for (key, given) in given.members(report, TOKEN_KEYS) {
        match key {
            "userId" => (user_id, is_named) = (given.text(report, "the name of a user"), true),
            "roles" => token.roles = given.texts(report, "a list of roles").unwrap_or_default(),
            "metadata" => match given.node.json() {
                Json::Object(members) => token.metadata = members,
                _ => drop(given.wrong::<()>(report, "an object")),
            },
            // The greatest that dates of JavaScript can be.
            "expiresAt" => at = given.whole(report, 0..=8_640_000_000_000_000).map(TokenExpiry::At),
            _ => after = given.milliseconds(report, 1).map(TokenExpiry::After),
        }
    }
    if at.is_some() && after.is_some() {
        given.reject(report, Problem::Alternatives { one: "expiresAt", other: "expiresInMs" });
    }
    if is_object && !is_named {
        given.missing::<()>(report, "userId", "the name of a user");
    }
    user_id?.clone_into(&mut token.user_id);
    token.expiry = at.or(after).unwrap_or_default();
    Some((name.to_owned(), token))
}

fn jwt(given: &Given<'_>, environment: Environment<'_>, report: &mut Report) -> Option<Jwt> {
    let mut algorithm = JwtAlgorithm::Hs256;
    let mut keys: Vec<(&'static str, JwtKey, Given<'_>)> = Vec::new();
    let (mut issuer, mut audience) = (None, None);
    let (mut user_claim, mut roles_claim) = (None, None);
    let errors = report.errors.len();
    for (key, given) in given.members(report, JWT_KEYS) {
        match key {
            "algorithm" => {
                let all = JwtAlgorithm::ALL.map(|algorithm| (algorithm.name(), algorithm));
                algorithm = given.one_of(report, &all).unwrap_or(algorithm);
            }
            "secret" => {
                let secret = given.optional_secret(report).map(|secret| JwtKey::Secret(secret.into()));
                keys.extend(secret.map(|secret| ("secret", secret, given)));
            }
            "secretEnv" => {
                let Some(name) = given.optional_text(report, "the name of a variable") else { continue };
                let secret = environment(name).and_then(|secret| secret.into_string().ok());
                match secret.filter(|secret| !secret.is_empty()) {
                    Some(secret) => keys.push(("secretEnv", JwtKey::Secret(secret.into()), given)),
                    None => given.reject(report, Problem::Variable { name: name.to_owned() }),
                }
            }
            "publicKeyFile" => {
                let Some(file) = given.optional_text(report, "the name of a file in PEM") else { continue };
                match std::fs::read_to_string(file) {
                    Ok(pem) => keys.push(("publicKeyFile", JwtKey::PublicKey(pem), given)),
                    Err(source) => given.reject(report, Problem::Unreadable { file: file.to_owned(), source }),
                }
            }
            "issuer" => issuer = given.optional_text(report, "a string").map(str::to_owned),
            "audience" => audience = given.optional_text(report, "a string").map(str::to_owned),
            "userClaim" => user_claim = given.optional_text(report, "the name of a claim"),
            _ => roles_claim = given.optional_text(report, "the name of a claim"),
        }
    }
    // What is missing may be missing because it was wrong.
    if report.errors.len() > errors {
        return None;
    }
    if let [(one, ..), (other, ..), ..] = keys[..] {
        return given.fail(report, Problem::Alternatives { one, other });
    }
    let Some((_, key, key_given)) = keys.pop() else {
        return match algorithm {
            JwtAlgorithm::Hs256 => given.missing(report, "secretEnv", SECRET),
            _ => given.missing(report, "publicKeyFile", PUBLIC_KEY),
        };
    };
    let mut options = JwtOptions::new(algorithm, key);
    (options.issuer, options.audience) = (issuer, audience);
    options.user_claim = user_claim.map_or(options.user_claim, str::to_owned);
    options.roles_claim = roles_claim.map_or(options.roles_claim, str::to_owned);
    match Jwt::new(options) {
        Ok(jwt) => Some(jwt),
        Err(error @ (JwtError::SameClaim { .. } | JwtError::Empty { .. })) => given.fail(report, error.into()),
        Err(error) => key_given.fail(report, error.into()),
    }
}

const SECRET: &str = "the name of a variable with the secret, which HS256 needs";
const PUBLIC_KEY: &str = "the name of a file in PEM, which this algorithm needs";
