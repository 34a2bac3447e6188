//! The key `auth`.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::hmac;
use serde_json::json;

use super::*;
use crate::RateLimit;
use crate::auth::{Access, Auth, Session, Tier};

const SECRET: &str = "a secret of more than thirty-two bytes";

fn auth(fixture: &Fixture, auth: &Json) -> Auth {
    fixture.config(&json!({ "auth": auth })).server.auth.expect("auth is on")
}

/// Signs a token with [`SECRET`].
fn signed(claims: &Json) -> String {
    let encode = |json: &Json| URL_SAFE_NO_PAD.encode(json.to_string());
    let text = format!("{}.{}", encode(&json!({"alg": "HS256"})), encode(claims));
    let signature = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, SECRET.as_bytes()), text.as_bytes());
    format!("{text}.{}", URL_SAFE_NO_PAD.encode(signature))
}

#[test]
fn static_tokens_are_accepted_and_hidden_in_debug_output() {
    let auth = auth(
        &Fixture::new(),
        &json!({"tokens": {
            "comment": "of tests only",
            "k1": {"userId": "ann", "roles": ["writer"], "metadata": {"team": {"comment": 1}}, "expiresInMs": 5},
            "k2": {"userId": "bob", "expiresAt": 1_700_000_000_000_u64, "comment": "?"},
            "k3": {"userId": "eve"},
        }}),
    );
    assert!(auth.required);
    assert!(!format!("{auth:?}").contains("k1"));
    let now = 1_600_000_000_000;
    let team = json!({"team": {"comment": 1}}).as_object().unwrap().clone();
    let ann = Session::new("ann", ["writer"]).expires_at(now + 5).metadata(team);
    assert_eq!(session(&auth, "k1", now), Some(ann));
    assert_eq!(session(&auth, "k2", now).unwrap().expires_at, Some(1_700_000_000_000));
    assert_eq!(session(&auth, "k2", 1_700_000_000_000), None);
    assert_eq!(session(&auth, "k3", now), Some(Session::new("eve", [""; 0])));
    for unknown in ["", "comment", "of tests only", "k4"] {
        assert_eq!(session(&auth, unknown, now), None, "{unknown}");
    }
    // Without permissions, only tiers restrict a session.
    let grants = auth.permissions.for_session(&Session::new("eve", [""; 0]));
    assert_eq!(grants.access("store.clear", Some("b")), Access::All);
}

#[test]
fn signed_tokens_must_match_the_settings() {
    let fixture = Fixture::new().variable("SECRET", SECRET);
    let usual =
        json!({"required": false, "jwt": {"secretEnv": "SECRET", "publicKeyFile": "", "issuer": "", "audience": ""}});
    let usual = auth(&fixture, &usual);
    assert!(!usual.required && !format!("{usual:?}").contains(SECRET));
    let claims =
        json!({"sub": "ann", "roles": ["writer"], "iss": "i", "aud": "a", "u": "bob", "r": "reader", "exp": 9});
    let ann = session(&usual, &signed(&claims), 0).expect("signed with the secret");
    assert_eq!((&*ann.user_id, &ann.roles[..], ann.expires_at), ("ann", &["writer".to_owned()][..], Some(9_000)));
    assert_eq!(session(&usual, &signed(&claims), 9_000), None);
    assert_eq!(session(&usual, "x.y.z", 0), None);

    let own = json!({"jwt": {"secret": SECRET, "issuer": "i", "audience": "a", "userClaim": "u", "rolesClaim": "r"}});
    let own = auth(&fixture, &own);
    let bob = session(&own, &signed(&claims), 0).expect("issuer and audience match");
    assert_eq!((&*bob.user_id, &bob.roles[..]), ("bob", &["reader".to_owned()][..]));
    assert_eq!(session(&own, &signed(&json!({"u": "bob", "aud": "a"})), 0), None);
    assert_eq!(session(&own, &signed(&json!({"u": "bob", "iss": "i"})), 0), None);
}

#[test]
fn public_keys_are_read_from_files() {
    let fixture = Fixture::new();
    let fixtures = concat!(env!("CARGO_MANIFEST_DIR"), "/src/auth/jwt/fixtures");
    for (algorithm, name) in [("RS256", "rs256"), ("ES256", "es256"), ("EdDSA", "eddsa")] {
        let given = json!({"jwt": {"algorithm": algorithm, "publicKeyFile": format!("{fixtures}/{name}.pem")}});
        let token = std::fs::read_to_string(format!("{fixtures}/{name}.jwt")).unwrap();
        assert_eq!(
            session(&auth(&fixture, &given), &token, 0).expect("a valid signature").user_id,
            "mara",
            "{algorithm}"
        );
    }
}

#[test]
fn tokens_may_be_given_by_their_sha256() {
    let hash = "sha256:6ab9f1eb8f7d3388f4f9d586f66e99fd54080df2c446f0e58668b09c08a16dd0";
    let auth = auth(&Fixture::new(), &json!({"tokens": {hash: {"userId": "ann"}}}));
    assert_eq!(session(&auth, "k1", 0).unwrap().user_id, "ann");
    assert_eq!(session(&auth, hash, 0), None);
}

#[test]
fn key_sets_are_read_from_files_and_old_tokens_are_rejected() {
    let fixture = Fixture::new();
    let fixtures = concat!(env!("CARGO_MANIFEST_DIR"), "/src/auth/jwt/fixtures");
    let given = auth(&fixture, &json!({"jwt": {"jwksFile": format!("{fixtures}/jwks.json"), "publicKeyFile": ""}}));
    for name in ["rs256", "es256", "eddsa"] {
        let token = std::fs::read_to_string(format!("{fixtures}/{name}.jwt")).unwrap();
        assert_eq!(session(&given, &token, 0).expect("a valid signature").user_id, "mara", "{name}");
    }
    let aged = auth(&fixture, &json!({"jwt": {"secret": SECRET, "maxAgeMs": 1500}}));
    let token = signed(&json!({"sub": "ann", "iat": 10}));
    assert_eq!(session(&aged, &token, 11_499).unwrap().expires_at, Some(11_500));
    assert_eq!(session(&aged, &token, 11_500), None);
    assert_eq!(session(&aged, &signed(&json!({"sub": "ann"})), 0), None);
}

#[test]
fn permissions_of_the_file_apply() {
    let rule = json!({"role": "r", "allow": ["store.*"], "buckets": ["b"], "where": {"owner": "{{ session.userId }}"}});
    let given = json!({"tokens": {"t": {"userId": "u"}}, "permissions": {
        "default": "deny", "rules": [rule, {"role": "s", "allow": "store.get", "topics": ["a.*"]}],
    }});
    let permissions = auth(&Fixture::new(), &given).permissions;
    let grants = permissions.for_session(&Session::new("ann", ["r"]));
    let Access::Rows(filter) = grants.access("store.get", Some("b")) else { panic!("expected a row filter") };
    let own = tidewire_store::Filter::parse(&json!({"owner": "ann"})).unwrap();
    assert_eq!(format!("{filter:?}"), format!("{own:?}"));
    assert_eq!(grants.access("store.get", Some("c")), Access::Denied);
    let grants = permissions.for_session(&Session::new("bob", ["s"]));
    assert_eq!(grants.access("store.get", Some("c")), Access::All);
    assert_eq!(grants.access("store.insert", Some("c")), Access::Denied);
    let no_rule = permissions.for_session(&Session::new("eve", ["t"]));
    assert_eq!(no_rule.access("store.get", Some("c")), Access::Denied);
}

/// Asserts the first error of each `auth` object.
fn assert_errors(fixture: &Fixture, cases: &[(&str, &str)]) {
    for (auth, line) in cases {
        assert_eq!(fixture.errors_of("c.json", format!("{{\"auth\": {auth}}}"))[0], *line, "{auth}");
    }
}

#[test]
fn errors_of_auth_are_reported() {
    let fixture = Fixture::new().variable("SECRET", SECRET);
    let cases = [
        (
            r#"{"tokens": {"t": {"userId": "u"}}, "jwt": {"secretEnv": "SECRET"}}"#,
            "c.json:1:52: `auth`: `tokens` and `jwt` cannot be combined; set only one of them",
        ),
        (
            r#"{"jwt": {"secretEnv": "SECRET"}, "builtIn": true}"#,
            "c.json:1:54: `auth`: `jwt` and `builtIn` cannot be combined; set only one of them",
        ),
        (
            r#"{"builtIn": true, "adminSecret": "s"}"#,
            "c.json:1:22: `auth.builtIn`: this version has no built-in identity; configure `auth.tokens` or `auth.jwt` instead, or remove it",
        ),
        (r#"{"required": true}"#, "c.json:1:23: `auth`: auth requires a source of tokens; add `tokens` or `jwt`"),
        (r#"{"defaultTier": "read"}"#, "c.json:1:26: `auth`: auth requires a source of tokens; add `tokens` or `jwt`"),
        (
            r#"{"tokens": {}, "anonymousTier": "none"}"#,
            "c.json:1:42: expected one of \"read\", \"write\", \"admin\" for `auth.anonymousTier`, got \"none\"",
        ),
        (
            r#"{"permissions": {"default": "deny"}}"#,
            "c.json:1:26: `auth`: auth requires a source of tokens; add `tokens` or `jwt`",
        ),
        (
            r#"{"tokens": {"t": {"userId": "u", "expiresAt": 1, "expiresInMs": 1}}}"#,
            "c.json:1:27: `auth.tokens.*`: `expiresAt` and `expiresInMs` cannot be combined; set only one of them",
        ),
        (r#"{"tokens": {"t": {}}}"#, "c.json:1:27: `auth.tokens.*`: the key `userId` is missing; expected a user id"),
        (r#"{"tokens": {"t": "ann"}}"#, "c.json:1:27: expected an object for `auth.tokens.*`, got a string"),
        (r#"{"tokens": {"": {"userId": "u"}}}"#, "c.json:1:26: expected a token for `auth.tokens.*`, got an empty key"),
        (
            r#"{"tokens": {"t": {"userId": "u"}, "t": {"userId": "v"}}}"#,
            "c.json:1:44: duplicate key `auth.tokens.*`, first defined on line 1",
        ),
        (
            r#"{"tokens": {"sha256:12": {"userId": "u"}}}"#,
            "c.json:1:35: `auth.tokens.*`: invalid SHA-256 for the token of \"u\": expected 64 hexadecimal digits after `sha256:`; create them with `printf %s TOKEN | sha256sum`",
        ),
    ];
    assert_errors(&fixture, &cases);
    let flag =
        "--auth: this version has no built-in identity; configure `auth.tokens` or `auth.jwt` instead, or remove it";
    assert_eq!(fixture.errors(&["--auth", "--admin-secret", "s"]), [flag]);
    // The variable overrides the file.
    let file = fixture.file("c.json", r#"{"auth": {"builtIn": true}}"#);
    assert!(fixture.variable("TIDEWIRE_AUTH", "no").load(&["-c", &file]).is_ok());
}

#[test]
fn errors_of_jwt_are_reported() {
    let fixture = Fixture::new().variable("SECRET", SECRET).variable("SHORT", "s3cret");
    let cases = [
        (r#"{"jwt": {"secret": 17}}"#, "c.json:1:29: expected a string for `auth.jwt.secret`, got a number"),
        (
            r#"{"jwt": {"secret": "s", "secretEnv": "SECRET"}}"#,
            "c.json:1:18: `auth.jwt`: `secret` and `secretEnv` cannot be combined; set only one of them",
        ),
        (
            r#"{"jwt": {"secretEnv": "NO_SECRET"}}"#,
            "c.json:1:32: `auth.jwt.secretEnv`: the environment variable NO_SECRET is unset, empty or not UTF-8",
        ),
        (
            r#"{"jwt": {}}"#,
            "c.json:1:18: `auth.jwt`: the key `secretEnv` is missing; expected the name of the environment variable with the secret, required by HS256",
        ),
        (
            r#"{"jwt": {"algorithm": "RS256", "secretEnv": "SECRET"}}"#,
            "c.json:1:54: `auth.jwt.secretEnv`: RS256 needs a public key in PEM, not a secret",
        ),
        (
            r#"{"jwt": {"algorithm": "EdDSA"}}"#,
            "c.json:1:18: `auth.jwt`: the key `publicKeyFile` is missing; expected the path of a PEM file, required by this algorithm",
        ),
        (
            r#"{"jwt": {"algorithm": "HS512", "secretEnv": "SECRET"}}"#,
            "c.json:1:32: expected one of \"HS256\", \"RS256\", \"ES256\", \"EdDSA\" for `auth.jwt.algorithm`, got \"HS512\"",
        ),
        (
            r#"{"jwt": {"secretEnv": "SHORT"}}"#,
            "c.json:1:32: `auth.jwt.secretEnv`: the secret has 6 bytes, but HS256 needs at least 32; create one with `openssl rand -hex 32`",
        ),
        (
            r#"{"jwt": {"algorithm": "RS256", "publicKeyFile": "/dev/null"}}"#,
            "c.json:1:58: `auth.jwt.publicKeyFile`: no public key found in the PEM; expected a block -----BEGIN PUBLIC KEY-----",
        ),
        (
            r#"{"jwt": {"secretEnv": "SECRET", "userClaim": "roles"}}"#,
            "c.json:1:18: `auth.jwt`: user and roles are read from the same claim \"roles\"; use two claims",
        ),
        (
            r#"{"jwt": {"jwksFile": "/dev/null"}}"#,
            "c.json:1:31: `auth.jwt.jwksFile`: invalid key set: EOF while parsing a value at line 1 column 0; expected an object with a list \"keys\" (JWKS)",
        ),
        (
            r#"{"jwt": {"jwksFile": "no.json"}}"#,
            "c.json:1:31: `auth.jwt.jwksFile`: cannot read the file no.json: No such file or directory (os error 2)",
        ),
        (
            r#"{"jwt": {"jwksFile": "/dev/null", "secretEnv": "SECRET"}}"#,
            "c.json:1:18: `auth.jwt`: `jwksFile` and `secretEnv` cannot be combined; set only one of them",
        ),
        (
            r#"{"jwt": {"jwksFile": "/dev/null", "algorithm": "RS256"}}"#,
            "c.json:1:18: `auth.jwt`: `algorithm` and `jwksFile` cannot be combined; set only one of them",
        ),
        (
            r#"{"jwt": {"secretEnv": "SECRET", "maxAgeMs": 0}}"#,
            "c.json:1:54: expected a number of milliseconds from 1 to 31536000000 for `auth.jwt.maxAgeMs`, got 0",
        ),
        (
            r#"{"jwt": {"algorithm": "RS256", "publicKeyFile": "no.pem"}}"#,
            "c.json:1:58: `auth.jwt.publicKeyFile`: cannot read the file no.pem: No such file or directory (os error 2)",
        ),
    ];
    assert_errors(&fixture, &cases);
}

#[test]
fn limits_of_logins_are_read() {
    let fixture = Fixture::new();
    let ms = Duration::from_millis;
    let given = |limits: Json| {
        let mut given = json!({"tokens": {"t": {"userId": "u"}}});
        given.as_object_mut().unwrap().extend(limits.as_object().unwrap().clone());
        auth(&fixture, &given)
    };
    let all = given(json!({
        "loginTimeoutMs": 1, "loginRateLimit": {"maxAttempts": 2, "windowMs": 3},
        "beforeLogin": {"maxPayloadBytes": 4, "maxRequests": 5, "windowMs": 6, "maxConnectionsPerIp": 7},
    }));
    assert_eq!((all.login_timeout, all.login_rate_limit), (Some(ms(1)), RateLimit::new(2, ms(3))));
    let before = all.before_login;
    assert_eq!((before.max_payload_bytes, before.max_connections_per_ip), (4, 7));
    assert_eq!(before.rate_limit, RateLimit::new(5, ms(6)));
    // A missing key has its default.
    let some =
        given(json!({"loginTimeoutMs": 0, "loginRateLimit": {"maxAttempts": 2}, "beforeLogin": {"windowMs": 6}}));
    let default = given(json!({}));
    assert_eq!((some.login_timeout, some.login_rate_limit.max_requests), (None, 2));
    assert_eq!(some.login_rate_limit.window, default.login_rate_limit.window);
    assert_eq!(some.before_login.rate_limit, RateLimit::new(default.before_login.rate_limit.max_requests, ms(6)));
    for (limits, line) in [
        (
            r#"{"loginRateLimit": {"maxAttempts": 0}}"#,
            "c.json:1:45: expected an integer from 1 to 1000000000 for `auth.loginRateLimit.maxAttempts`, got 0",
        ),
        (
            r#"{"beforeLogin": {"maxPayloadByte": 1}}"#,
            "c.json:1:27: unknown key `auth.beforeLogin.maxPayloadByte`; did you mean `maxPayloadBytes`?",
        ),
        (
            r#"{"loginTimeoutMs": "2m"}"#,
            "c.json:1:29: expected a number of milliseconds from 0 to 31536000000 for `auth.loginTimeoutMs`, got \"2m\"",
        ),
    ] {
        assert_eq!(fixture.errors_of("c.json", format!("{{\"auth\": {limits}}}")), [line], "{limits}");
    }
}

#[test]
fn errors_of_permissions_are_reported() {
    let fixture = Fixture::new();
    for (rule, line) in [
        (
            r#"{"role": "r", "allow": "store.g*"}"#,
            "c.json:1:93: `auth.permissions.rules[0].allow`: invalid pattern \"store.g*\"; expected \"*\", a prefix such as \"store.*\" or a name such as \"store.get\"",
        ),
        (
            r#"{"role": "r", "allow": "*", "topics": ["a", "*.x"]}"#,
            "c.json:1:114: `auth.permissions.rules[0].topics[1]`: invalid pattern \"*.x\"; expected \"*\", a prefix such as \"store.*\" or a name such as \"store.get\"",
        ),
        (
            r#"{"role": "r", "allow": []}"#,
            "c.json:1:93: `auth.permissions.rules[0].allow`: the rule allows no operation; list at least one, or use \"*\"",
        ),
        (
            r#"{"role": "r", "allow": ["store.get", 7, ""]}"#,
            "c.json:1:107: expected an operation or a list of operations, such as \"store.get\", \"store.*\" or \"*\" for `auth.permissions.rules[0].allow[1]`, got 7",
        ),
        (
            r#"{"role": "r"}"#,
            "c.json:1:70: `auth.permissions.rules[0]`: the key `allow` is missing; expected an operation or a list of operations, such as \"store.get\", \"store.*\" or \"*\"",
        ),
        (
            r#"{"role": "r", "allow": "*", "where": {"a": "{{ session.roles }}"}}"#,
            "c.json:1:107: `auth.permissions.rules[0].where`: expected a single value, or $in for a list, for `a`, got {{ session.roles }}",
        ),
        (
            r#"{"role": "r", "allow": "rules.*", "where": {"a": 1}}"#,
            "c.json:1:113: `auth.permissions.rules[0].where`: a row filter applies to records only, not to rules.*; use a separate rule for rules.*",
        ),
    ] {
        let text =
            format!(r#"{{"auth": {{"tokens": {{}}, "permissions": {{"default": "deny", "rules": [{rule}]}}}}}}"#);
        assert_eq!(fixture.errors_of("c.json", text)[0], line, "{rule}");
    }
    // The text of this error is that of the store.
    let rule = r#"{"role": "r", "allow": "*", "where": {"a": {"$like": 1}}}"#;
    let text = format!(r#"{{"auth": {{"tokens": {{}}, "permissions": {{"default": "deny", "rules": [{rule}]}}}}}}"#);
    let errors = fixture.errors_of("c.json", text);
    assert!(errors[0].starts_with("c.json:1:107: `auth.permissions.rules[0].where`: "), "{errors:?}");
}

/// Without a default, operations that no rule names would be allowed on all rows.
#[test]
fn permissions_without_a_default_are_an_error() {
    let fixture = Fixture::new();
    for permissions in [r#"{"rules": []}"#, r#"{"default": null}"#, "{}"] {
        let text = format!(r#"{{"auth": {{"tokens": {{}}, "permissions": {permissions}}}}}"#);
        let line = "c.json:1:40: `auth.permissions`: the key `default` is missing; expected \"deny\" or \"allow\": add \
                    \"default\": \"deny\" to allow only what the rules allow";
        assert_eq!(fixture.errors_of("c.json", text), [line], "{permissions}");
    }
    let text = r#"{"auth": {"tokens": {}, "permissions": []}}"#;
    assert_eq!(
        fixture.errors_of("c.json", text),
        ["c.json:1:40: expected an object for `auth.permissions`, got a list"]
    );
}

#[test]
fn tiers_of_the_file_apply() {
    let usual = auth(&Fixture::new(), &json!({"tokens": {}}));
    assert_eq!((usual.default_tier, usual.anonymous_tier), (Tier::Write, None));
    let given = json!({"required": false, "tokens": {}, "defaultTier": "read", "anonymousTier": "write"});
    let given = auth(&Fixture::new(), &given);
    assert_eq!((given.default_tier, given.anonymous_tier), (Tier::Read, Some(Tier::Write)));
}
