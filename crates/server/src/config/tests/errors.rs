//! What is wrong is said, all of it, with its place.

use std::os::unix::ffi::OsStringExt;

use super::*;
use crate::config::{auth, permissions, settings};

#[test]
fn values_are_told_with_their_place_their_key_and_what_was_expected() {
    for (text, line) in [
        (r#"{"port": "80"}"#, "c.json:1:10: port: expected a whole number from 0 to 65535, found \"80\""),
        (r#"{"port": 65536}"#, "c.json:1:10: port: expected a whole number from 0 to 65535, found 65536"),
        (r#"{"port": -1}"#, "c.json:1:10: port: expected a whole number from 0 to 65535, found -1"),
        (r#"{"port": 80.5}"#, "c.json:1:10: port: expected a whole number from 0 to 65535, found 80.5"),
        (r#"{"port": [1]}"#, "c.json:1:10: port: expected a whole number from 0 to 65535, found a list"),
        ("{\n  \"name\": \"\"}", "c.json:2:11: name: expected a name, found \"\""),
        (
            r#"{"host": "a:80"}"#,
            "c.json:1:10: host: expected an address, such as \"127.0.0.1\" or \"0.0.0.0\", without a port, found \"a:80\"",
        ),
        (
            r#"{"path": "ws"}"#,
            "c.json:1:10: path: expected a path that begins with \"/\" and has no \"?\", \"#\" or space in it, found \"ws\"",
        ),
        (r#"{"engine": "sqlite"}"#, "c.json:1:12: engine: expected \"memory\" or \"embedded\", found \"sqlite\""),
        (
            r#"{"engine": "redis://:pw@host"}"#,
            "c.json:1:12: engine: this version has no redis engine: use \"embedded\", which keeps the data in a directory, or \"memory\"",
        ),
        (
            r#"{"durability": "interval:0"}"#,
            "c.json:1:16: durability: expected \"always\", \"none\" or \"interval:MS\" with 1 to 31536000000 milliseconds, found \"interval:0\"",
        ),
        (r#"{"exposeErrorDetails": 1}"#, "c.json:1:24: exposeErrorDetails: expected true or false, found 1"),
        (
            r#"{"allowedOrigins": ["https://a.example", "https://b.example/"]}"#,
            "c.json:1:42: allowedOrigins[1]: expected an origin as browsers send it, such as \"https://example.com\" or \"http://localhost:3000\", found \"https://b.example/\"",
        ),
        (
            r#"{"tls": {"cert": "no.pem"}}"#,
            "c.json:1:18: tls: the file no.pem cannot be read: No such file or directory (os error 2)",
        ),
        (
            r#"{"rateLimit": {"maxRequests": 1}}"#,
            "c.json:1:15: rateLimit: the key \"windowMs\" is missing: expected in which time, in milliseconds",
        ),
        (
            r#"{"backpressure": {"highWaterMark": 80}}"#,
            "c.json:1:36: backpressure.highWaterMark: expected a number above 0 and not above 1, found 80",
        ),
        (r#"{"buckets": {"b": 1}}"#, "c.json:1:19: buckets.b: expected an object, found 1"),
        (
            r#"{"buckets": {"b": {"key": "id", "schema": {}}}}"#,
            "c.json:1:19: buckets.b: key names the field id, which is not in the schema",
        ),
        (
            r#"{"queries": {"q": {"bucket": "anywhere", "filter": {"a": {"$like": 1}}}}}"#,
            "c.json:1:19: queries.q: unknown operator $like in a",
        ),
        (r#"{"queries": []}"#, "c.json:1:13: queries: expected an object, found a list"),
        (
            r#"{"audit": {"tiers": ["all"]}}"#,
            "c.json:1:22: audit.tiers[0]: expected one of \"read\", \"write\", \"admin\", found \"all\"",
        ),
        (r#"{"rulesPreload": [{}, 1]}"#, "c.json:1:23: rulesPreload[1]: expected an object, found 1"),
        (r#"{"procedures": {"p": []}}"#, "c.json:1:22: procedures.p: expected an object, found a list"),
        ("[]", "c.json:1:1: expected an object, found a list"),
    ] {
        assert_eq!(World::new().wrong("c.json", text)[0], line, "{text}");
    }
}

#[test]
fn an_unknown_key_names_the_nearest_one() {
    for (text, line) in [
        (r#"{"prot": 1}"#, "c.json:1:2: prot: there is no such key; the nearest one is \"port\""),
        (r#"{"data_dir": null}"#, "c.json:1:2: data_dir: there is no such key; the nearest one is \"dataDir\""),
        (
            r#"{"heartbeat": {"interval": 1}}"#,
            "c.json:1:16: heartbeat.interval: there is no such key; the nearest one is \"intervalMs\"",
        ),
    ] {
        assert_eq!(World::new().wrong("c.json", text), [line], "{text}");
    }
    let toml =
        "name = 'x'\n[auth.jwt]\nalgorithm = 'HS256'\nsecret = '0123456789abcdef0123456789abcdef'\nissuers = 'x'\n";
    let line = "c.toml:5:1: auth.jwt.issuers: there is no such key; the nearest one is \"issuer\"";
    assert_eq!(World::new().wrong("c.toml", toml), [line]);
}

#[test]
fn all_errors_are_said_at_once() {
    let world = World::new().variable("TIDEWIRE_GRACE", "soon").variable("TIDEWIRE_AUDIT", "perhaps");
    let file = world.file("c.toml", "port = 'x'\nhots = 'y'\n[heartbeat]\ntimeoutMs = 0\n");
    let expected = [
        "c.toml:1:8: port: expected a whole number from 0 to 65535, found \"x\"",
        "c.toml:2:1: hots: there is no such key; the nearest one is \"host\"",
        "c.toml:4:13: heartbeat.timeoutMs: expected a whole number from 1 to 31536000000, found 0",
        "TIDEWIRE_AUDIT: expected true or false (1 or 0), found \"perhaps\"",
        "TIDEWIRE_GRACE: expected a whole number from 0 to 31536000000, found \"soon\"",
        "--port: expected a whole number from 0 to 65535, found -5",
    ];
    // A wrong value is said also if another one wins.
    assert_eq!(world.lines(&["--config", &file, "--check", "--port", "-5"]), expected);
}

#[test]
fn texts_that_cannot_be_read_are_told() {
    for (name, text, line) in [
        ("c.json", &b"{\"a\": 1,\n \"b\": }"[..], "c.json:2:7: this is not valid JSON: expected a value, found '}'"),
        ("c.json", b"{\"name\": \"\xc3\xa9\xff\"}", "c.json:1:12: the text is not UTF-8"),
        ("c.toml", b"port = \n", "c.toml:1:8: this is not valid TOML: "),
        ("c.toml", b"port = 1\nport = 2\n", "c.toml:2:1: this is not valid TOML: duplicate key"),
        (
            "c.yaml",
            b"port: 1",
            "--config: the file \"c.yaml\" must be called .json or .toml, which says how it is read",
        ),
    ] {
        let lines = World::new().wrong(name, text);
        assert!(lines[0].starts_with(line), "{lines:?}");
        assert_eq!(lines.len(), 1, "{lines:?}");
    }
    let missing = World::new().lines(&["--config", "no.json"]);
    assert_eq!(missing, ["--config: the file no.json cannot be read: No such file or directory (os error 2)"]);
    let missing = World::new().variable("TIDEWIRE_CONFIG", "no.json").lines(&[]);
    assert_eq!(missing, ["TIDEWIRE_CONFIG: the file no.json cannot be read: No such file or directory (os error 2)"]);
    let binary = World::new().variable("TIDEWIRE_NAME", OsString::from_vec(vec![0xff])).lines(&[]);
    assert_eq!(binary, ["TIDEWIRE_NAME: the text is not UTF-8"]);
    let marked = World::new();
    let file = marked.file("c.json", "\u{feff}{\"port\": 7}");
    assert_eq!(marked.load(&["-c", &file]).unwrap().server.port, 7);
}

#[test]
fn a_file_that_is_too_large_is_not_read() {
    let world = World::new();
    let file = world.file("c.json", "");
    std::fs::OpenOptions::new().write(true).open(&file).unwrap().set_len(1 << 40).unwrap();
    let line = "--config: the file c.json has more than 16777216 bytes, which is too large for a configuration";
    assert_eq!(world.lines(&["-c", &file]), [line]);
}

#[test]
fn keys_that_are_there_twice_are_told_at_any_depth() {
    let text =
        "{\"port\": 1,\n\"procedures\": {\"p\": {\"steps\": [{\"x\": 1,\n \"x\": 2}]}},\n\"port\": 2,\n\"port\": 3}";
    let expected = [
        "c.json:3:2: procedures.p.steps[0].x: the key is there twice, first in line 2",
        "c.json:4:1: port: the key is there twice, first in line 1",
        "c.json:5:1: port: the key is there twice, first in line 4",
    ];
    assert_eq!(World::new().wrong("c.json", text), expected);
}

#[test]
fn wrong_flags_are_told() {
    let world = World::new();
    for (args, text) in [
        (&["--prot", "1"][..], "unexpected argument '--prot'"),
        (&["--port"], "a value is required for '--port"),
        (&["serve", "x"], "unexpected argument 'x'"),
    ] {
        let errors = world.load(args).unwrap_err();
        assert_eq!(errors.exit_code(), 2);
        assert!(errors.to_string().contains(text), "{errors}");
    }
    assert_eq!(
        world.lines(&["--tls-cert", "/dev/null"]),
        ["--tls-cert: the key \"key\" is missing: expected the file of the certificate's private key, in PEM"]
    );
}

/// A key that is known and not read would be ignored in silence.
#[test]
fn every_key_is_looked_at() {
    let levels: [(&str, &[&str], &str); 11] = [
        ("", settings::KEYS, ""),
        ("{\"tls\": ", settings::TLS_KEYS, "}"),
        ("{\"rateLimit\": ", settings::RATE_LIMIT_KEYS, "}"),
        ("{\"heartbeat\": ", settings::HEARTBEAT_KEYS, "}"),
        ("{\"backpressure\": ", settings::BACKPRESSURE_KEYS, "}"),
        ("{\"connectionLimits\": ", settings::LIMIT_KEYS, "}"),
        ("{\"auth\": ", auth::KEYS, "}"),
        ("{\"auth\": {\"tokens\": {\"t\": ", auth::TOKEN_KEYS, "}}}"),
        ("{\"auth\": {\"jwt\": ", auth::JWT_KEYS, "}}"),
        ("{\"auth\": {\"permissions\": ", permissions::KEYS, "}}"),
        ("{\"auth\": {\"permissions\": {\"rules\": [", permissions::RULE_KEYS, "]}}}"),
    ];
    for (before, keys, after) in levels {
        for key in keys {
            let lines = World::new().wrong("c.json", format!("{before}{{\n\"{key}\": [null]}}{after}"));
            // At the place of the value, or inside of it.
            let is_told = lines.iter().any(|line| line.starts_with("c.json:2:") && line.contains(key));
            assert!(is_told, "{before} {key}: {lines:?}");
            assert!(lines.iter().all(|line| !line.contains("no such key")), "{lines:?}");
        }
    }
}
