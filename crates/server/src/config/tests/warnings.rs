//! Warnings about settings that are valid but probably unintended.

use serde_json::json;

use super::*;

/// 128 bits, in hexadecimal digits.
const STRONG: &str = "0f1e2d3c4b5a69788796a5b4c3d2e1f0";

fn warnings(json: &Json, args: &[&str]) -> Vec<String> {
    let fixture = Fixture::new();
    let file = fixture.file("c.json", json.to_string());
    let mut all = vec!["--config", &*file];
    all.extend(args);
    let config = fixture.load(&all).unwrap_or_else(|errors| panic!("{json}: {errors}"));
    let dir = format!("{}/", fixture.dir.path().display());
    config.warnings.iter().map(|warning| warning.replace(&dir, "")).collect()
}

#[test]
fn unsupported_features_cause_a_warning() {
    for (json, args, expected) in [
        (
            json!({"rules": true}),
            &[][..],
            &["c.json:1:10: `rules`: this version does not support rules; the setting is ignored"][..],
        ),
        (json!({"rules": true}), &["--no-rules"], &[]),
        (
            json!({"audit": {}}),
            &[],
            &["c.json:1:10: `audit`: this version does not support the audit log; the setting is ignored"],
        ),
        (
            json!({"audit": true}),
            &["--audit"],
            &["--audit: this version does not support the audit log; the setting is ignored"],
        ),
        (
            json!({"rulesPreload": [{"id": "r"}]}),
            &[],
            &["c.json:1:17: `rulesPreload`: this version does not support rules; the setting is ignored"],
        ),
        (
            json!({"procedures": {"p": {"steps": []}}}),
            &[],
            &["c.json:1:15: `procedures`: this version does not support procedures; the setting is ignored"],
        ),
        (
            json!({"auth": {"builtIn": false, "adminSecret": "", "sessionTtl": 5, "maxSessionsPerUser": 5}}),
            &[],
            &[
                "c.json:1:56: `auth.sessionTtl`: this version does not support the built-in identity; the setting is ignored",
                "c.json:1:79: `auth.maxSessionsPerUser`: this version does not support the built-in identity; the setting is ignored",
            ],
        ),
        (
            json!({"auth": {"tokens": {}, "permissions": {"default": "deny", "rules": [{"role": "r", "allow": ["store.*", "store.gett", "stroe.*", "*"]}]}}}),
            &[],
            &[
                "c.json:1:94: `auth.permissions.rules[0].allow[1]`: unknown operation \"store.gett\"; did you mean \"store.get\"?",
                "c.json:1:107: `auth.permissions.rules[0].allow[2]`: no operation starts with \"stroe.\"",
                "c.json:1:19: `auth.tokens`: the list of tokens is empty, so no client can log in",
            ],
        ),
    ] {
        let actual = warnings(&json, args);
        assert_eq!(actual, expected, "{json} {args:?}");
    }
}

#[test]
fn reachable_server_without_auth_or_rate_limit_causes_a_warning() {
    let auth = "auth is off or not required on 0.0.0.0, which is not a loopback address: every client has full access";
    let rate =
        "the rate limit is off on 0.0.0.0, which is not a loopback address: clients can send any number of requests";
    let permissions = json!({"default": "deny"});
    let tokens =
        |required: bool| json!({"required": required, "tokens": {STRONG: {"userId": "u"}}, "permissions": permissions});
    let anonymous = "c.json:1:21: `auth.required`: clients without a login have full access, more than logged-in users; set `auth.anonymousTier` to \"read\" or \"write\" to restrict them";
    let bounded = "c.json:1:137: `auth.anonymousTier`: `permissions` do not apply to clients without a login: they have read access to all rows";
    let mut reading = tokens(false);
    reading["anonymousTier"] = json!("read");
    let limit = json!({"maxRequests": 1, "windowMs": 1});
    for (json, expected) in [
        (json!({"host": "0.0.0.0"}), &[auth, rate][..]),
        (json!({"host": "0.0.0.0", "auth": tokens(true)}), &[rate]),
        (json!({"auth": tokens(false), "host": "0.0.0.0", "rateLimit": limit}), &[anonymous, auth]),
        (json!({"auth": reading, "host": "0.0.0.0", "rateLimit": limit}), &[bounded]),
        (json!({"host": "0.0.0.0", "auth": tokens(true), "rateLimit": limit}), &[]),
        (json!({"host": "127.8.8.8"}), &[]),
        (json!({"host": "::1"}), &[]),
        (json!({"host": "localhost"}), &[]),
    ] {
        assert_eq!(warnings(&json, &[]), expected, "{json}");
    }
    assert_eq!(warnings(&json!({"host": "::1"}), &["-H", "0.0.0.0"]), [auth, rate]);
    assert_eq!(warnings(&json!({}), &["-H", "example.com"]).len(), 2);
}

#[test]
fn contradictory_limits_cause_a_warning() {
    let payload = "c.json:1:19: `maxRecordBytes`: the limit of 2000000 bytes is above `maxPayloadBytes` (1048576), so clients cannot \
                   send records of this size";
    assert_eq!(warnings(&json!({"maxRecordBytes": 2_000_000}), &[]), [payload]);
    let flag = payload.replace("c.json:1:19: `maxRecordBytes`", "--max-record-bytes");
    assert_eq!(warnings(&json!({}), &["--max-record-bytes", "2000000"]), [flag]);
    assert_eq!(warnings(&json!({"maxRecordBytes": 2_000_000, "maxPayloadBytes": 2_000_000}), &[]), [""; 0]);
    let result = "the record limit of 1048576 bytes is above `maxResultBytes` (1000), so clients cannot read records of this size";
    assert_eq!(warnings(&json!({"maxResultBytes": 1000}), &[]), [result]);
    let origins = "c.json:1:59: `allowedHosts`: the setting has no effect because `allowedOrigins` is set";
    let hosts = json!({"allowedOrigins": ["https://tide.example"], "allowedHosts": ["tide.example"]});
    assert_eq!(warnings(&hosts, &[]), [origins]);
    let login =
        "--allowed-hosts: the setting has no effect because clients must log in, so pages of any origin may connect";
    let auth = json!({"auth": {"tokens": {"t": {"userId": "u"}}}});
    assert!(warnings(&auth, &["--allowed-hosts", "tide.example"]).contains(&login.to_owned()));
    assert_eq!(warnings(&json!({"allowedHosts": ["tide.example"]}), &[]), [""; 0]);
    let memory = "c.json:1:14: `backupDir`: the memory engine cannot be backed up";
    assert_eq!(warnings(&json!({"backupDir": "b", "engine": "memory"}), &[]), [memory]);
}

#[test]
fn weak_token_causes_a_warning() {
    let of = |token: &str| {
        let auth = json!({"tokens": {token: {"userId": "ann"}}, "permissions": {"default": "deny"}});
        warnings(&json!({ "auth": auth }), &[])
    };
    let text = "`auth.tokens.*`: the token of \"ann\" is weak: it has about 0 bits of strength, expected 128; create one \
                with `openssl rand -hex 32`";
    assert_eq!(of("x"), [format!("c.json:1:24: {text}")]);
    for weak in ["7", "letmein", "0123456789abcdef", &STRONG[1..], &"ab".repeat(30)] {
        let warnings = of(weak);
        assert!(warnings.len() == 1 && warnings[0].contains("\"ann\"") && !warnings[0].contains(weak), "{warnings:?}");
    }
    for strong in [STRONG, &STRONG.to_uppercase(), &format!("sha256:{STRONG}{STRONG}"), "gXr1_0sVq8mNw-5yPzKt3A"] {
        assert_eq!(of(strong), [""; 0], "{strong}");
    }
}

#[test]
fn data_directory_accessible_to_other_users_causes_a_warning() {
    use std::os::unix::fs::PermissionsExt as _;
    let fixture = Fixture::new();
    let dir = fixture.dir.path().join("data");
    let name = dir.to_str().unwrap();
    let warnings = |engine: &str| fixture.load(&["--data-dir", name, "--engine", engine]).unwrap().warnings;
    assert_eq!(warnings("embedded"), [""; 0], "the server will create it");
    std::fs::create_dir(&dir).unwrap();
    for (mode, is_open) in [(0o755, true), (0o710, true), (0o701, true), (0o770, true), (0o700, false), (0o500, false)]
    {
        std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(mode)).unwrap();
        let text = format!(
            "the data directory {name} has mode {mode:04o}, so other users have access to it; run `chmod 700 {name}`"
        );
        assert_eq!(warnings("embedded"), if is_open { vec![text] } else { vec![] });
        assert_eq!(warnings("memory"), [""; 0]);
    }
}

#[test]
fn permissive_auth_causes_a_warning() {
    let tiers_only = "c.json:1:19: `auth`: no `permissions` are set; logged-in users are restricted only by the tiers of their roles, \
                      and can access all rows";
    let useless = "c.json:1:26: `auth.anonymousTier`: the setting has no effect because clients must log in; set `auth.required` to \
                   false to allow clients without a login";
    let open = "c.json:1:116: `auth.required`: clients without a login have full access, more than logged-in users; set \
                `auth.anonymousTier` to \"read\" or \"write\" to restrict them";
    let tokens = json!({STRONG: {"userId": "u"}});
    let allow = json!({"default": "allow"});
    for (auth, expected) in [
        (json!({"tokens": tokens}), &[tiers_only][..]),
        (json!({"tokens": tokens, "permissions": allow}), &[]),
        (json!({"anonymousTier": "read", "tokens": tokens, "permissions": allow}), &[useless]),
        (json!({"tokens": tokens, "permissions": allow, "required": false}), &[open]),
        (json!({"anonymousTier": "read", "tokens": tokens, "permissions": allow, "required": false}), &[]),
    ] {
        let text = auth.to_string();
        assert_eq!(warnings(&json!({ "auth": auth }), &[]), expected, "{text}");
    }
}
