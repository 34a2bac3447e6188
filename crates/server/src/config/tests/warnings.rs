//! What is allowed, and perhaps not meant.

use serde_json::json;

use super::*;

fn warnings(json: &Json, args: &[&str]) -> Vec<String> {
    let world = World::new();
    let file = world.file("c.json", json.to_string());
    let mut all = vec!["--config", &*file];
    all.extend(args);
    let config = world.load(&all).unwrap_or_else(|errors| panic!("{json}: {errors}"));
    let dir = format!("{}/", world.dir.path().display());
    config.warnings.iter().map(|warning| warning.replace(&dir, "")).collect()
}

#[test]
fn features_of_later_versions_are_told() {
    for (json, args, expected) in [
        (json!({"rules": true}), &[][..], &["c.json:1:10: rules: this version has no rules; the key is ignored"][..]),
        (json!({"rules": true}), &["--no-rules"], &[]),
        (json!({"audit": {}}), &[], &["c.json:1:10: audit: this version keeps no audit log; the key is ignored"]),
        (json!({"audit": true}), &["--audit"], &["--audit: this version keeps no audit log; it is ignored"]),
        (
            json!({"rulesPreload": [{"id": "r"}]}),
            &[],
            &["c.json:1:17: rulesPreload: this version has no rules, and loads none; the key is ignored"],
        ),
        (
            json!({"procedures": {"p": {"steps": []}}}),
            &[],
            &["c.json:1:15: procedures: this version has no procedures; the key is ignored"],
        ),
        (
            json!({"auth": {"builtIn": false, "adminSecret": "", "sessionTtl": 5, "loginRateLimit": {"maxAttempts": 5}}}),
            &[],
            &[
                "c.json:1:56: auth.sessionTtl: it belongs to the built-in identity, which this version does not have; it is ignored",
                "c.json:1:75: auth.loginRateLimit: it belongs to the built-in identity, which this version does not have; it is ignored",
            ],
        ),
        (
            json!({"auth": {"tokens": {}, "permissions": {"rules": [{"role": "r", "allow": ["store.*", "store.gett", "stroe.*", "*"]}]}}}),
            &[],
            &[
                "c.json:1:77: auth.permissions.rules[0].allow[1]: \"store.gett\" is no operation of this version; the nearest one is \"store.get\"",
                "c.json:1:90: auth.permissions.rules[0].allow[2]: no operation of this version begins with \"stroe.\"",
                "c.json:1:19: auth.tokens: there are none, so nobody can log in",
            ],
        ),
    ] {
        let told = warnings(&json, args);
        assert_eq!(told, expected, "{json} {args:?}");
    }
}

#[test]
fn a_server_that_strangers_reach_should_be_closed() {
    let auth = "auth is off, or not required, and 0.0.0.0 is no loopback address: whoever reaches it may do everything";
    let rate = "rate limiting is off, and 0.0.0.0 is no loopback address: whoever reaches it may ask without end";
    let tokens = |required: bool| json!({"required": required, "tokens": {"t": {"userId": "u"}}});
    let limit = json!({"maxRequests": 1, "windowMs": 1});
    for (json, expected) in [
        (json!({"host": "0.0.0.0"}), &[auth, rate][..]),
        (json!({"host": "0.0.0.0", "auth": tokens(true)}), &[rate]),
        (json!({"host": "0.0.0.0", "auth": tokens(false), "rateLimit": limit}), &[auth]),
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
