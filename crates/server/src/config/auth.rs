//! Reads `auth` into an [`Auth`].

use std::sync::Arc;

use serde_json::Value as Json;

use super::entry::{Entry, Report, warning};
use super::error::ConfigProblem;
use super::location::Location;
use super::login::LoginLimits;
use super::overrides::Environment;
use super::permissions::permissions;
use super::tree::Value;
use super::unsupported::{IDENTITY_KEYS, check_identity};
use crate::auth::{
    Auth, Jwt, JwtAlgorithm, JwtError, JwtKey, JwtKeys, JwtOptions, Permissions, StaticToken, StaticTokens,
    StaticTokensError, Tier, TokenExpiry, TokenValidator,
};
use crate::auth::{MIN_TOKEN_BITS, digest_of, is_sha256, strength_bits};

pub(super) const KEYS: &[&str] = &[
    "required",
    "tokens",
    "jwt",
    "permissions",
    "defaultTier",
    "anonymousTier",
    "loginTimeoutMs",
    "loginRateLimit",
    "beforeLogin",
    "builtIn",
    "adminSecret",
    "sessionTtl",
    "passwordMinLength",
    "maxSessionsPerUser",
];
pub(super) const TOKEN_KEYS: &[&str] = &["userId", "roles", "metadata", "expiresAt", "expiresInMs"];
pub(super) const JWT_KEYS: &[&str] = &[
    "algorithm",
    "secretEnv",
    "secret",
    "publicKeyFile",
    "jwksFile",
    "issuer",
    "audience",
    "userClaim",
    "rolesClaim",
    "maxAgeMs",
];

/// The keys of `auth` read so far, from all sources.
#[derive(Default)]
pub(super) struct AuthDraft {
    required: Option<(bool, Location)>,
    tokens: Option<(Vec<(String, StaticToken)>, Location)>,
    /// The inner `None` means that `jwt` is invalid and an error has been reported.
    jwt: Option<(Option<Jwt>, Location)>,
    built_in: Option<(bool, Location)>,
    permissions: Option<(Permissions, Location)>,
    login: LoginLimits,
    default_tier: Option<(Tier, Location)>,
    anonymous_tier: Option<(Tier, Location)>,
    /// The keys of the built-in identity that are set.
    identity: Vec<(String, Location)>,
}

impl AuthDraft {
    pub(super) fn read(&mut self, entry: &Entry<'_>, environment: Environment<'_>, report: &mut Report) {
        for (key, entry) in entry.members(report, KEYS) {
            match key {
                "required" => self.required = entry.boolean(report).map(|required| (required, entry.location())),
                "tokens" => {
                    let tokens = entry.named_members(report);
                    let tokens = tokens.iter().filter_map(|(name, entry)| token(name, entry, report)).collect();
                    self.tokens = Some((tokens, entry.location()));
                }
                "jwt" => self.jwt = Some((jwt(&entry, environment, report), entry.location())),
                "permissions" => self.permissions = Some((permissions(&entry, report), entry.location())),
                "loginTimeoutMs" | "loginRateLimit" | "beforeLogin" => self.login.read(key, &entry, report),
                "defaultTier" => self.default_tier = tier(&entry, report),
                "anonymousTier" => self.anonymous_tier = tier(&entry, report),
                "builtIn" => {
                    if let Some(is_on) = entry.boolean(report) {
                        self.built_in = Some((is_on, entry.location()));
                    }
                }
                _ if IDENTITY_KEYS.contains(&key) && check_identity(key, &entry, report) => {
                    self.identity.push((entry.key.clone(), entry.location()));
                }
                _ => {}
            }
        }
    }

    /// Returns the roles of tokens and rules, without duplicates, in file order.
    pub(super) fn roles(&self) -> Vec<String> {
        let of_tokens = self.tokens.iter().flat_map(|(tokens, _)| tokens).flat_map(|(_, token)| &token.roles);
        let of_rules = self.permissions.iter().flat_map(|(permissions, _)| permissions.roles());
        let mut roles: Vec<String> = Vec::new();
        for role in of_tokens.map(String::as_str).chain(of_rules) {
            if !roles.iter().any(|known| known == role) {
                roles.push(role.to_owned());
            }
        }
        roles
    }

    /// Builds the auth options. Returns `None` if auth is off, or after reporting an error.
    pub(super) fn finish(self, report: &mut Report) -> Option<Auth> {
        let key = "auth";
        let built_in = self.built_in.and_then(|(is_on, location)| is_on.then_some(location));
        let sources: Vec<(&'static str, &Location)> = [
            ("tokens", self.tokens.as_ref().map(|(_, location)| location)),
            ("jwt", self.jwt.as_ref().map(|(_, location)| location)),
            ("builtIn", built_in.as_ref()),
        ]
        .into_iter()
        .filter_map(|(name, location)| Some((name, location?)))
        .collect();
        if let [(one, _), (other, location), ..] = sources[..] {
            report.add(location.clone(), key, ConfigProblem::Exclusive { one, other });
        }
        if let Some(location) = built_in {
            return report.fail(location, "auth.builtIn", ConfigProblem::IdentityUnsupported);
        }
        for (key, location) in self.identity {
            let message = "this version does not support the built-in identity; the setting is ignored";
            report.warnings.push(warning(&location, &key, message));
        }
        // These keys require a source of tokens.
        let needs_source = self.required.as_ref().filter(|(required, _)| *required).map(|(_, location)| location);
        let needs_source = needs_source.or(self.permissions.as_ref().map(|(_, location)| location));
        let tier = self.default_tier.as_ref().or(self.anonymous_tier.as_ref());
        let needs_source = needs_source.or(tier.map(|(_, location)| location)).cloned();
        let source = sources.first().map(|(_, location)| (*location).clone());
        let validator: Arc<dyn TokenValidator> = match (self.tokens, self.jwt) {
            (Some((tokens, location)), _) => Arc::new(static_tokens(tokens, &location, report)?),
            (None, Some((jwt, _))) => Arc::new(jwt?),
            (None, None) => return report.fail(needs_source?, key, ConfigProblem::NoTokenSource),
        };
        let mut auth = Auth::new(validator).required(self.required.as_ref().is_none_or(|(required, _)| *required));
        let has_permissions = self.permissions.is_some();
        if let Some((permissions, _)) = self.permissions {
            auth.permissions = permissions;
        }
        if let Some((tier, _)) = self.default_tier {
            auth.default_tier = tier;
        }
        auth.anonymous_tier = self.anonymous_tier.as_ref().map(|(tier, _)| *tier);
        if let Some(location) = source.filter(|_| !has_permissions) {
            let message = "no `permissions` are set; logged-in users are restricted only by the tiers of their roles, and can access all rows";
            report.warnings.push(warning(&location, key, message));
        }
        self.login.apply(&mut auth);
        warn_about_anonymous_access(&auth, self.required, self.anonymous_tier, report);
        Some(auth)
    }
}

/// Warns if clients without a login have more access than logged-in users.
fn warn_about_anonymous_access(
    auth: &Auth,
    required: Option<(bool, Location)>,
    anonymous_tier: Option<(Tier, Location)>,
    report: &mut Report,
) {
    let key = "auth.anonymousTier";
    let warning = match (required.filter(|(required, _)| !required), anonymous_tier) {
        (None, None) => return,
        (None, Some((_, location))) => warning(
            &location,
            key,
            "the setting has no effect because clients must log in; set `auth.required` to false to allow clients without a login",
        ),
        (Some((_, location)), None) => warning(
            &location,
            "auth.required",
            "clients without a login have full access, more than logged-in users; set `auth.anonymousTier` to \"read\" or \"write\" to restrict them",
        ),
        (Some(_), Some(_)) if !auth.permissions.restrict_anything() => return,
        (Some(_), Some((tier, location))) => {
            let message = format!(
                "`permissions` do not apply to clients without a login: they have {} access to all rows",
                tier.name()
            );
            warning(&location, key, &message)
        }
    };
    report.warnings.push(warning);
}

fn tier(entry: &Entry<'_>, report: &mut Report) -> Option<(Tier, Location)> {
    let tier = entry.one_of(report, &Tier::ALL.map(|tier| (tier.name(), tier)));
    tier.map(|tier| (tier, entry.location()))
}

fn static_tokens(tokens: Vec<(String, StaticToken)>, location: &Location, report: &mut Report) -> Option<StaticTokens> {
    let key = "auth.tokens";
    if tokens.is_empty() {
        report.warnings.push(warning(location, key, "the list of tokens is empty, so no client can log in"));
    }
    // Invalid tokens have been reported with their own location.
    if !report.errors.is_empty() {
        return None;
    }
    StaticTokens::new(tokens).map_err(|error| report.add(location.clone(), key, error.into())).ok()
}

fn token(name: &str, entry: &Entry<'_>, report: &mut Report) -> Option<(String, StaticToken)> {
    if name.is_empty() {
        let problem = ConfigProblem::Expected { expected: "a token".to_owned(), found: "an empty key".to_owned() };
        entry.reject(report, problem);
    }
    let is_object = matches!(entry.node.value, Value::Object(_));
    let (mut user_id, mut has_user_id) = (None, false);
    let mut token = StaticToken::new("", [""; 0]);
    let (mut at, mut after) = (None, None);
    for (key, entry) in entry.members(report, TOKEN_KEYS) {
        match key {
            "userId" => (user_id, has_user_id) = (entry.text(report, EXPECTED_USER_ID), true),
            "roles" => token.roles = entry.texts(report, "a list of roles").unwrap_or_default(),
            "metadata" => match entry.node.json() {
                Json::Object(members) => token.metadata = members,
                _ => drop(entry.mismatch::<()>(report, "an object")),
            },
            "expiresAt" => {
                // The maximum is the largest JavaScript date.
                let time = entry.integer(report, "a time in milliseconds since 1970", 0..=8_640_000_000_000_000);
                at = time.map(TokenExpiry::At);
            }
            _ => after = entry.milliseconds(report, 1).map(TokenExpiry::After),
        }
    }
    if at.is_some() && after.is_some() {
        entry.reject(report, ConfigProblem::Exclusive { one: "expiresAt", other: "expiresInMs" });
    }
    if is_object && !has_user_id {
        entry.missing::<()>(report, "userId", EXPECTED_USER_ID);
    }
    user_id?.clone_into(&mut token.user_id);
    token.expiry = at.or(after).unwrap_or_default();
    check_strength(name, &token.user_id, entry, report);
    Some((name.to_owned(), token))
}

/// Warns about a weak token. The strength of a token that is given by its SHA-256 is unknown.
fn check_strength(token: &str, user_id: &str, entry: &Entry<'_>, report: &mut Report) {
    if is_sha256(token) {
        if digest_of(token).is_none() {
            entry.reject(report, StaticTokensError::NotSha256 { user_id: user_id.to_owned() }.into());
        }
        return;
    }
    let bits = strength_bits(token);
    if bits < MIN_TOKEN_BITS {
        let message = format!(
            "the token of {user_id:?} is weak: it has about {bits} bits of strength, expected {MIN_TOKEN_BITS}; \
             create one with `openssl rand -hex 32`"
        );
        report.warnings.push(entry.warning(&message));
    }
}

/// The source of the keys of signed tokens.
enum KeySource {
    Key(JwtKey),
    KeySet(String),
}

fn jwt(entry: &Entry<'_>, environment: Environment<'_>, report: &mut Report) -> Option<Jwt> {
    let mut algorithm = None;
    let mut keys: Vec<(&'static str, KeySource, Entry<'_>)> = Vec::new();
    let (mut issuer, mut audience, mut max_age) = (None, None, None);
    let (mut user_claim, mut roles_claim) = (None, None);
    let errors = report.errors.len();
    for (key, entry) in entry.members(report, JWT_KEYS) {
        match key {
            "algorithm" => {
                let all = JwtAlgorithm::ALL.map(|algorithm| (algorithm.name(), algorithm));
                algorithm = entry.one_of(report, &all);
            }
            "secret" => {
                let secret = entry.optional_secret(report).map(|secret| JwtKey::Secret(secret.into()));
                keys.extend(secret.map(|secret| ("secret", KeySource::Key(secret), entry)));
            }
            "secretEnv" => {
                let Some(name) = entry.optional_text(report, "the name of an environment variable") else { continue };
                let secret = environment(name).and_then(|secret| secret.into_string().ok());
                match secret.filter(|secret| !secret.is_empty()) {
                    Some(secret) => keys.push(("secretEnv", KeySource::Key(JwtKey::Secret(secret.into())), entry)),
                    None => entry.reject(report, ConfigProblem::MissingVariable { name: name.to_owned() }),
                }
            }
            "publicKeyFile" => {
                let Some(file) = entry.optional_text(report, "the path of a PEM file") else { continue };
                match std::fs::read_to_string(file) {
                    Ok(pem) => keys.push(("publicKeyFile", KeySource::Key(JwtKey::PublicKey(pem)), entry)),
                    Err(source) => entry.reject(report, ConfigProblem::Unreadable { file: file.to_owned(), source }),
                }
            }
            "jwksFile" => {
                let Some(file) = entry.optional_text(report, "the path of a JSON file") else { continue };
                match std::fs::read_to_string(file) {
                    Ok(json) => keys.push(("jwksFile", KeySource::KeySet(json), entry)),
                    Err(source) => entry.reject(report, ConfigProblem::Unreadable { file: file.to_owned(), source }),
                }
            }
            "issuer" => issuer = entry.optional_text(report, "a string").map(str::to_owned),
            "audience" => audience = entry.optional_text(report, "a string").map(str::to_owned),
            "maxAgeMs" => max_age = entry.milliseconds(report, 1),
            "userClaim" => user_claim = entry.optional_text(report, "the name of a claim"),
            _ => roles_claim = entry.optional_text(report, "the name of a claim"),
        }
    }
    // A key may be missing because it was invalid and has been reported.
    if report.errors.len() > errors {
        return None;
    }
    if let [(one, ..), (other, ..), ..] = keys[..] {
        return entry.fail(report, ConfigProblem::Exclusive { one, other });
    }
    let Some((_, source, key_entry)) = keys.pop() else {
        return match algorithm {
            None | Some(JwtAlgorithm::Hs256) => entry.missing(report, "secretEnv", EXPECTED_SECRET_ENV),
            Some(_) => entry.missing(report, "publicKeyFile", EXPECTED_PUBLIC_KEY_FILE),
        };
    };
    let keys = match source {
        KeySource::Key(key) => JwtKeys::One(algorithm.unwrap_or(JwtAlgorithm::Hs256), key),
        // The type of each key determines its algorithm.
        KeySource::KeySet(_) if algorithm.is_some() => {
            return entry.fail(report, ConfigProblem::Exclusive { one: "algorithm", other: "jwksFile" });
        }
        KeySource::KeySet(json) => JwtKeys::Set(json),
    };
    let mut options = JwtOptions::new(keys);
    (options.issuer, options.audience, options.max_age) = (issuer, audience, max_age);
    options.user_claim = user_claim.map_or(options.user_claim, str::to_owned);
    options.roles_claim = roles_claim.map_or(options.roles_claim, str::to_owned);
    match Jwt::new(options) {
        Ok(jwt) => Some(jwt),
        Err(error @ (JwtError::SameClaim { .. } | JwtError::Empty { .. })) => entry.fail(report, error.into()),
        Err(error) => key_entry.fail(report, error.into()),
    }
}

const EXPECTED_USER_ID: &str = "a user id";
const EXPECTED_SECRET_ENV: &str = "the name of the environment variable with the secret, required by HS256";
const EXPECTED_PUBLIC_KEY_FILE: &str = "the path of a PEM file, required by this algorithm";
