//! Who is let in.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::hmac;
use serde_json::json;

use super::*;
use crate::{Access, Auth, Session};

const SECRET: &str = "a secret of more than thirty-two bytes";

fn auth(world: &World, auth: &Json) -> Auth {
    world.config(&json!({ "auth": auth })).server.auth.expect("there is auth")
}

/// A token that whoever has the secret can make.
fn signed(claims: &Json) -> String {
    let encode = |json: &Json| URL_SAFE_NO_PAD.encode(json.to_string());
    let text = format!("{}.{}", encode(&json!({"alg": "HS256"})), encode(claims));
    let signature = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, SECRET.as_bytes()), text.as_bytes());
    format!("{text}.{}", URL_SAFE_NO_PAD.encode(signature))
}

#[test]
fn tokens_of_the_file_are_good_and_not_shown() {
    let auth = auth(
        &World::new(),
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
    let mut ann = Session::new("ann", ["writer"]);
    ann.expires_at = Some(now + 5);
    ann.metadata.insert("team".to_owned(), json!({"comment": 1}));
    assert_eq!(session(&auth, "k1", now), Some(ann));
    assert_eq!(session(&auth, "k2", now).unwrap().expires_at, Some(1_700_000_000_000));
    assert_eq!(session(&auth, "k2", 1_700_000_000_000), None);
    assert_eq!(session(&auth, "k3", now), Some(Session::new("eve", [""; 0])));
    for unknown in ["", "comment", "of tests only", "k4"] {
        assert_eq!(session(&auth, unknown, now), None, "{unknown}");
    }
    // Without permissions, roles are all there is.
    let granted = auth.permissions.for_session(&Session::new("eve", [""; 0]));
    assert_eq!(granted.access("store.clear", Some("b")), Access::All);
}

#[test]
fn signed_tokens_are_good_if_they_say_what_the_file_does() {
    let world = World::new().variable("SECRET", SECRET);
    let usual =
        json!({"required": false, "jwt": {"secretEnv": "SECRET", "publicKeyFile": "", "issuer": "", "audience": ""}});
    let usual = auth(&world, &usual);
    assert!(!usual.required && !format!("{usual:?}").contains(SECRET));
    let claims =
        json!({"sub": "ann", "roles": ["writer"], "iss": "i", "aud": "a", "u": "bob", "r": "reader", "exp": 9});
    let ann = session(&usual, &signed(&claims), 0).expect("it is signed with the secret");
    assert_eq!((&*ann.user_id, &ann.roles[..], ann.expires_at), ("ann", &["writer".to_owned()][..], Some(9_000)));
    assert_eq!(session(&usual, &signed(&claims), 9_000), None);
    assert_eq!(session(&usual, "x.y.z", 0), None);

    let own = json!({"jwt": {"secret": SECRET, "issuer": "i", "audience": "a", "userClaim": "u", "rolesClaim": "r"}});
    let own = auth(&world, &own);
    let bob = session(&own, &signed(&claims), 0).expect("it is from the issuer and for us");
    assert_eq!((&*bob.user_id, &bob.roles[..]), ("bob", &["reader".to_owned()][..]));
    assert_eq!(session(&own, &signed(&json!({"u": "bob", "aud": "a"})), 0), None);
    assert_eq!(session(&own, &signed(&json!({"u": "bob", "iss": "i"})), 0), None);
}

#[test]
fn public_keys_come_from_files() {
    let world = World::new();
    let fixtures = concat!(env!("CARGO_MANIFEST_DIR"), "/src/auth/jwt/fixtures");
    for (algorithm, name) in [("RS256", "rs256"), ("ES256", "es256"), ("EdDSA", "eddsa")] {
        let given = json!({"jwt": {"algorithm": algorithm, "publicKeyFile": format!("{fixtures}/{name}.pem")}});
        let token = std::fs::read_to_string(format!("{fixtures}/{name}.jwt")).unwrap();
        assert_eq!(session(&auth(&world, &given), &token, 0).expect("it is signed").user_id, "mara", "{algorithm}");
    }
}

#[test]
fn permissions_of_the_file_are_granted() {
    let rule = json!({"role": "r", "allow": ["store.*"], "buckets": ["b"], "where": {"owner": "{{ session.userId }}"}});
    let given = json!({"tokens": {"t": {"userId": "u"}}, "permissions": {
        "default": "deny", "rules": [rule, {"role": "s", "allow": "store.get", "topics": ["a.*"]}],
    }});
    let permissions = auth(&World::new(), &given).permissions;
    let granted = permissions.for_session(&Session::new("ann", ["r"]));
    let Access::Rows(rows) = granted.access("store.get", Some("b")) else { panic!("some rows may be seen") };
    let own = tidewire_store::Filter::parse(&json!({"owner": "ann"}), &serde_json::Map::new()).unwrap();
    assert_eq!(format!("{rows:?}"), format!("{own:?}"));
    assert_eq!(granted.access("store.get", Some("c")), Access::Denied);
    let granted = permissions.for_session(&Session::new("bob", ["s"]));
    assert_eq!(granted.access("store.get", Some("c")), Access::All);
    assert_eq!(granted.access("store.insert", Some("c")), Access::Denied);
    let nobody = permissions.for_session(&Session::new("eve", ["t"]));
    assert_eq!(nobody.access("store.get", Some("c")), Access::Denied);
}

#[test]
fn what_is_wrong_with_auth_is_told() {
    let world = World::new().variable("SECRET", SECRET).variable("SHORT", "s3cret");
    for (auth, line) in [
        (
            r#"{"tokens": {"t": {"userId": "u"}}, "jwt": {"secretEnv": "SECRET"}}"#,
            "c.json:1:52: auth: tokens and jwt are alternatives: only one of them may be given",
        ),
        (
            r#"{"jwt": {"secretEnv": "SECRET"}, "builtIn": true}"#,
            "c.json:1:54: auth: jwt and builtIn are alternatives: only one of them may be given",
        ),
        (
            r#"{"builtIn": true, "adminSecret": "s"}"#,
            "c.json:1:22: auth.builtIn: this version has no built-in identity: give \"tokens\" or \"jwt\" in \"auth\", or leave it out",
        ),
        (r#"{"required": true}"#, "c.json:1:23: auth: nobody could log in: give \"tokens\" or \"jwt\" as well"),
        (r#"{"permissions": {}}"#, "c.json:1:26: auth: nobody could log in: give \"tokens\" or \"jwt\" as well"),
        (
            r#"{"tokens": {"t": {"userId": "u", "expiresAt": 1, "expiresInMs": 1}}}"#,
            "c.json:1:27: auth.tokens.*: expiresAt and expiresInMs are alternatives: only one of them may be given",
        ),
        (
            r#"{"tokens": {"t": {}}}"#,
            "c.json:1:27: auth.tokens.*: the key \"userId\" is missing: expected the name of a user",
        ),
        (r#"{"tokens": {"t": "ann"}}"#, "c.json:1:27: auth.tokens.*: expected an object, found a string"),
        (r#"{"tokens": {"": {"userId": "u"}}}"#, "c.json:1:26: auth.tokens.*: expected a token, found an empty key"),
        (
            r#"{"tokens": {"t": {"userId": "u"}, "t": {"userId": "v"}}}"#,
            "c.json:1:44: auth.tokens.*: the key is there twice, first in line 1",
        ),
        (r#"{"jwt": {"secret": 17}}"#, "c.json:1:29: auth.jwt.secret: expected a string, found a number"),
        (
            r#"{"jwt": {"secret": "s", "secretEnv": "SECRET"}}"#,
            "c.json:1:18: auth.jwt: secret and secretEnv are alternatives: only one of them may be given",
        ),
        (
            r#"{"jwt": {"secretEnv": "NO_SECRET"}}"#,
            "c.json:1:32: auth.jwt.secretEnv: the environment has no variable NO_SECRET, or it is empty or not UTF-8",
        ),
        (
            r#"{"jwt": {}}"#,
            "c.json:1:18: auth.jwt: the key \"secretEnv\" is missing: expected the name of a variable with the secret, which HS256 needs",
        ),
        (
            r#"{"jwt": {"algorithm": "RS256", "secretEnv": "SECRET"}}"#,
            "c.json:1:54: auth.jwt.secretEnv: RS256 takes a public key in PEM, and not a secret",
        ),
        (
            r#"{"jwt": {"algorithm": "EdDSA"}}"#,
            "c.json:1:18: auth.jwt: the key \"publicKeyFile\" is missing: expected the name of a file in PEM, which this algorithm needs",
        ),
        (
            r#"{"jwt": {"algorithm": "HS512", "secretEnv": "SECRET"}}"#,
            "c.json:1:32: auth.jwt.algorithm: expected one of \"HS256\", \"RS256\", \"ES256\", \"EdDSA\", found \"HS512\"",
        ),
        (
            r#"{"jwt": {"secretEnv": "SHORT"}}"#,
            "c.json:1:32: auth.jwt.secretEnv: the secret has 6 bytes, and HS256 needs at least 32 random ones: make one by `openssl rand -hex 32`",
        ),
        (
            r#"{"jwt": {"algorithm": "RS256", "publicKeyFile": "/dev/null"}}"#,
            "c.json:1:58: auth.jwt.publicKeyFile: there is no public key in the PEM: it begins with -----BEGIN PUBLIC KEY-----",
        ),
        (
            r#"{"jwt": {"secretEnv": "SECRET", "userClaim": "roles"}}"#,
            "c.json:1:18: auth.jwt: the user and the roles are both the claim \"roles\": each needs its own",
        ),
        (
            r#"{"jwt": {"algorithm": "RS256", "publicKeyFile": "no.pem"}}"#,
            "c.json:1:58: auth.jwt.publicKeyFile: the file no.pem cannot be read: No such file or directory (os error 2)",
        ),
    ] {
        assert_eq!(world.wrong("c.json", format!("{{\"auth\": {auth}}}"))[0], line, "{auth}");
    }
    let flag = "--auth: this version has no built-in identity: give \"tokens\" or \"jwt\" in \"auth\", or leave it out";
    assert_eq!(world.lines(&["--auth", "--admin-secret", "s"]), [flag]);
    // Whoever wins says that there is none.
    let file = world.file("c.json", r#"{"auth": {"builtIn": true}}"#);
    assert!(world.variable("TIDEWIRE_AUTH", "no").load(&["-c", &file]).is_ok());
}

#[test]
fn what_is_wrong_with_permissions_is_told() {
    let world = World::new();
    for (rule, line) in [
        (
            r#"{"role": "r", "allow": "store.g*"}"#,
            "c.json:1:74: auth.permissions.rules[0].allow: \"store.g*\" is no pattern: write *, or a prefix as in store.*, or a whole name as in store.get",
        ),
        (
            r#"{"role": "r", "allow": "*", "topics": ["a", "*.x"]}"#,
            "c.json:1:95: auth.permissions.rules[0].topics[1]: \"*.x\" is no pattern: write *, or a prefix as in store.*, or a whole name as in store.get",
        ),
        (
            r#"{"role": "r", "allow": []}"#,
            "c.json:1:74: auth.permissions.rules[0].allow: the rule allows nothing: name an operation, or *",
        ),
        (
            r#"{"role": "r", "allow": ["store.get", 7, ""]}"#,
            "c.json:1:88: auth.permissions.rules[0].allow[1]: expected an operation, or a list of them, each such as \"store.get\", \"store.*\" or \"*\", found 7",
        ),
        (
            r#"{"role": "r"}"#,
            "c.json:1:51: auth.permissions.rules[0]: the key \"allow\" is missing: expected an operation, or a list of them, each such as \"store.get\", \"store.*\" or \"*\"",
        ),
        (
            r#"{"role": "r", "allow": "*", "where": {"a": {"$like": 1}}}"#,
            "c.json:1:88: auth.permissions.rules[0].where: unknown operator $like in a",
        ),
        (
            r#"{"role": "r", "allow": "*", "where": {"a": "{{ session.roles }}"}}"#,
            "c.json:1:88: auth.permissions.rules[0].where: a is compared with {{ session.roles }}, where it takes one value, and this is a list: use $in",
        ),
        (
            r#"{"role": "r", "allow": "rules.*", "where": {"a": 1}}"#,
            "c.json:1:94: auth.permissions.rules[0].where: a rule with a filter of rows is about records, and rules.* is not: make it a rule of its own",
        ),
    ] {
        let text = format!(r#"{{"auth": {{"tokens": {{}}, "permissions": {{"rules": [{rule}]}}}}}}"#);
        assert_eq!(world.wrong("c.json", text)[0], line, "{rule}");
    }
}
