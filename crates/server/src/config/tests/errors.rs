//! Errors and their locations.

use std::os::unix::ffi::OsStringExt;

use super::*;
use crate::config::{auth, permissions, settings};

#[test]
fn invalid_value_is_reported_with_location_key_and_expectation() {
    for (text, line) in [
        (r#"{"port": "80"}"#, "c.json:1:10: expected a port number from 0 to 65535 for `port`, got \"80\""),
        (r#"{"port": 65536}"#, "c.json:1:10: expected a port number from 0 to 65535 for `port`, got 65536"),
        (r#"{"port": -1}"#, "c.json:1:10: expected a port number from 0 to 65535 for `port`, got -1"),
        (r#"{"port": 80.5}"#, "c.json:1:10: expected a port number from 0 to 65535 for `port`, got 80.5"),
        (r#"{"port": [1]}"#, "c.json:1:10: expected a port number from 0 to 65535 for `port`, got a list"),
        ("{\n  \"name\": \"\"}", "c.json:2:11: expected a non-empty string for `name`, got \"\""),
        (
            r#"{"host": "a:80"}"#,
            "c.json:1:10: expected an address without a port, such as \"127.0.0.1\" for `host`, got \"a:80\"",
        ),
        (
            r#"{"path": "ws"}"#,
            "c.json:1:10: expected a path that starts with \"/\", without \"?\", \"#\" and spaces for `path`, got \"ws\"",
        ),
        (r#"{"engine": "sqlite"}"#, "c.json:1:12: expected \"memory\" or \"embedded\" for `engine`, got \"sqlite\""),
        (
            r#"{"engine": "redis://:pw@host"}"#,
            "c.json:1:12: `engine`: this version has no Redis engine; use \"embedded\", which stores the data in a directory, or \"memory\"",
        ),
        (
            r#"{"durability": "interval:0"}"#,
            "c.json:1:16: expected \"always\", \"none\" or \"interval:MS\" with 1 to 31536000000 milliseconds for `durability`, got \"interval:0\"",
        ),
        (r#"{"exposeErrorDetails": 1}"#, "c.json:1:24: expected true or false for `exposeErrorDetails`, got 1"),
        (
            r#"{"allowedOrigins": ["https://a.example", "https://b.example/"]}"#,
            "c.json:1:42: expected an origin as browsers send it, such as \"https://example.com\" or \"http://localhost:3000\" for `allowedOrigins[1]`, got \"https://b.example/\"",
        ),
        (
            r#"{"allowedHosts": ["a.example", "b.example:80"]}"#,
            "c.json:1:32: expected a host name without a port, such as \"tide.example\" for `allowedHosts[1]`, got \"b.example:80\"",
        ),
        (
            r#"{"trustedProxies": ["10.0.0.0/8", "nginx"]}"#,
            "c.json:1:35: expected an IP address or a network such as \"10.0.0.0/8\" for `trustedProxies[1]`, got \"nginx\"",
        ),
        (
            r#"{"trustedProxies": ["10.0.0.1/8"]}"#,
            "c.json:1:21: expected a network without bits after the prefix, such as \"10.0.0.0/8\", for `trustedProxies[0]`, got \"10.0.0.1/8\"",
        ),
        (
            r#"{"proxyProtocol": true}"#,
            "c.json:1:19: `proxyProtocol`: the PROXY protocol requires `trustedProxies`: the addresses of the proxies that send the header",
        ),
        (
            r#"{"adminListen": "9090"}"#,
            "c.json:1:17: expected an IP address and a port, such as \"127.0.0.1:9090\" for `adminListen`, got \"9090\"",
        ),
        (
            r#"{"tls": {"cert": "no.pem"}}"#,
            "c.json:1:18: `tls`: cannot read the file no.pem: No such file or directory (os error 2)",
        ),
        (
            r#"{"rateLimit": {"maxRequests": 1}}"#,
            "c.json:1:15: `rateLimit`: the key `windowMs` is missing; expected a number of milliseconds",
        ),
        (
            r#"{"backpressure": {"highWaterMark": 80}}"#,
            "c.json:1:36: expected a number above 0 and at most 1 for `backpressure.highWaterMark`, got 80",
        ),
        (r#"{"buckets": {"b": 1}}"#, "c.json:1:19: expected an object for `buckets.b`, got 1"),
        (
            r#"{"slowRequestMs": "fast"}"#,
            "c.json:1:19: expected a number of milliseconds from 0 to 31536000000 for `slowRequestMs`, got \"fast\"",
        ),
        (
            r#"{"maxRecordBytes": 268435457}"#,
            "c.json:1:20: expected a number of bytes from 1 to 268435456 for `maxRecordBytes`, got 268435457",
        ),
        (r#"{"backupDir": ""}"#, "c.json:1:15: expected the path of a directory for `backupDir`, got \"\""),
        (r#"{"queries": []}"#, "c.json:1:13: expected an object for `queries`, got a list"),
        (
            r#"{"audit": {"tiers": ["all"]}}"#,
            "c.json:1:22: expected one of \"read\", \"write\", \"admin\" for `audit.tiers[0]`, got \"all\"",
        ),
        (r#"{"rulesPreload": [{}, 1]}"#, "c.json:1:23: expected an object for `rulesPreload[1]`, got 1"),
        (r#"{"procedures": {"p": []}}"#, "c.json:1:22: expected an object for `procedures.p`, got a list"),
        ("[]", "c.json:1:1: expected an object, got a list"),
    ] {
        assert_eq!(Fixture::new().errors_of("c.json", text)[0], line, "{text}");
    }
    // The texts of these errors are those of the store.
    for (text, start) in [
        (r#"{"buckets": {"b": {"key": "id", "schema": {}}}}"#, "c.json:1:19: `buckets.b`: "),
        (r#"{"queries": {"q": {"bucket": "anywhere", "filter": {"a": {"$like": 1}}}}}"#, "c.json:1:19: `queries.q`: "),
    ] {
        let errors = Fixture::new().errors_of("c.json", text);
        assert!(errors[0].starts_with(start) && errors[0].len() > start.len(), "{errors:?}");
    }
}

#[test]
fn unknown_key_suggests_a_similar_key() {
    for (text, line) in [
        (r#"{"prot": 1}"#, "c.json:1:2: unknown key `prot`; did you mean `port`?"),
        (r#"{"zzz": 1}"#, "c.json:1:2: unknown key `zzz`"),
        (r#"{"data_dir": null}"#, "c.json:1:2: unknown key `data_dir`; did you mean `dataDir`?"),
        (
            r#"{"heartbeat": {"interval": 1}}"#,
            "c.json:1:16: unknown key `heartbeat.interval`; did you mean `intervalMs`?",
        ),
    ] {
        assert_eq!(Fixture::new().errors_of("c.json", text), [line], "{text}");
    }
    let toml =
        "name = 'x'\n[auth.jwt]\nalgorithm = 'HS256'\nsecret = '0123456789abcdef0123456789abcdef'\nissuers = 'x'\n";
    let line = "c.toml:5:1: unknown key `auth.jwt.issuers`; did you mean `issuer`?";
    assert_eq!(Fixture::new().errors_of("c.toml", toml), [line]);
}

#[test]
fn all_errors_are_reported_at_once() {
    let fixture = Fixture::new().variable("TIDEWIRE_GRACE", "soon").variable("TIDEWIRE_AUDIT", "perhaps");
    let file = fixture.file("c.toml", "port = 'x'\nhots = 'y'\n[heartbeat]\ntimeoutMs = 0\n");
    let expected = [
        "c.toml:1:8: expected a port number from 0 to 65535 for `port`, got \"x\"",
        "c.toml:2:1: unknown key `hots`; did you mean `host`?",
        "c.toml:4:13: expected a number of milliseconds from 1 to 31536000000 for `heartbeat.timeoutMs`, got 0",
        "TIDEWIRE_AUDIT: expected true or false (1 or 0), got \"perhaps\"",
        "TIDEWIRE_GRACE: expected a number of milliseconds from 0 to 31536000000, got \"soon\"",
        "--port: expected a port number from 0 to 65535, got -5",
    ];
    // An invalid value is reported even if another source overrides it.
    assert_eq!(fixture.errors(&["--config", &file, "--check", "--port", "-5"]), expected);
}

#[test]
fn syntax_errors_are_reported() {
    for (name, text, line) in [
        ("c.json", &b"{\"a\": 1,\n \"b\": }"[..], "c.json:2:7: invalid JSON: expected value"),
        ("c.json", b"{\"name\": \"\xc3\xa9\xff\"}", "c.json:1:12: invalid UTF-8"),
        ("c.toml", b"port = \n", "c.toml:1:8: invalid TOML: "),
        ("c.toml", b"port = 1\nport = 2\n", "c.toml:2:1: invalid TOML: duplicate key"),
        (
            "c.yaml",
            b"port: 1",
            "--config: unknown format of the file \"c.yaml\"; expected the extension .json or .toml",
        ),
    ] {
        let lines = Fixture::new().errors_of(name, text);
        assert!(lines[0].starts_with(line), "{lines:?}");
        assert_eq!(lines.len(), 1, "{lines:?}");
    }
    let missing = Fixture::new().errors(&["--config", "no.json"]);
    assert_eq!(missing, ["--config: cannot read the file no.json: No such file or directory (os error 2)"]);
    let missing = Fixture::new().variable("TIDEWIRE_CONFIG", "no.json").errors(&[]);
    assert_eq!(missing, ["TIDEWIRE_CONFIG: cannot read the file no.json: No such file or directory (os error 2)"]);
    let binary = Fixture::new().variable("TIDEWIRE_NAME", OsString::from_vec(vec![0xff])).errors(&[]);
    assert_eq!(binary, ["TIDEWIRE_NAME: invalid UTF-8"]);
    let marked = Fixture::new();
    let file = marked.file("c.json", "\u{feff}{\"port\": 7}");
    assert_eq!(marked.load(&["-c", &file]).unwrap().server.port, 7);
}

#[test]
fn file_above_the_size_limit_is_rejected() {
    let fixture = Fixture::new();
    let file = fixture.file("c.json", "");
    std::fs::OpenOptions::new().write(true).open(&file).unwrap().set_len(1 << 40).unwrap();
    let line = "--config: the file c.json is larger than the limit of 16777216 bytes";
    assert_eq!(fixture.errors(&["-c", &file]), [line]);
}

#[test]
fn duplicate_keys_are_reported_at_any_depth() {
    let text =
        "{\"port\": 1,\n\"procedures\": {\"p\": {\"steps\": [{\"x\": 1,\n \"x\": 2}]}},\n\"port\": 2,\n\"port\": 3}";
    let expected = [
        "c.json:3:2: duplicate key `procedures.p.steps[0].x`, first defined on line 2",
        "c.json:4:1: duplicate key `port`, first defined on line 1",
        "c.json:5:1: duplicate key `port`, first defined on line 4",
    ];
    assert_eq!(Fixture::new().errors_of("c.json", text), expected);
}

#[test]
fn invalid_arguments_are_usage_errors() {
    let fixture = Fixture::new();
    for (args, text) in [
        (&["--prot", "1"][..], "unexpected argument '--prot'"),
        (&["--port"], "a value is required for '--port"),
        (&["serve", "x"], "unexpected argument 'x'"),
        (&["backup"], "required arguments were not provided"),
        (&["restore", "a", "b"], "unexpected argument 'b'"),
        (&["backup", "a", "--port", "1"], "unexpected argument '--port'"),
    ] {
        let errors = fixture.command(args).unwrap_err();
        assert_eq!(errors.exit_code(), 2);
        assert!(errors.to_string().contains(text), "{errors}");
    }
    assert_eq!(
        fixture.errors(&["--tls-cert", "/dev/null"]),
        ["--tls-cert: the key `key` is missing; expected the PEM file of the private key"]
    );
}

/// A known key without a check would be ignored silently.
#[test]
fn every_key_is_checked() {
    let levels: [(&str, &[&str], &str); 12] = [
        ("", settings::KEYS, ""),
        ("{\"tls\": ", settings::TLS_KEYS, "}"),
        ("{\"rateLimit\": ", settings::RATE_LIMIT_KEYS, "}"),
        ("{\"heartbeat\": ", settings::HEARTBEAT_KEYS, "}"),
        ("{\"backpressure\": ", settings::BACKPRESSURE_KEYS, "}"),
        ("{\"memory\": ", settings::MEMORY_KEYS, "}"),
        ("{\"connectionLimits\": ", settings::CONNECTION_LIMIT_KEYS, "}"),
        ("{\"auth\": ", auth::KEYS, "}"),
        ("{\"auth\": {\"tokens\": {\"t\": ", auth::TOKEN_KEYS, "}}}"),
        ("{\"auth\": {\"jwt\": ", auth::JWT_KEYS, "}}"),
        ("{\"auth\": {\"permissions\": ", permissions::KEYS, "}}"),
        ("{\"auth\": {\"permissions\": {\"rules\": [", permissions::RULE_KEYS, "]}}}"),
    ];
    for (before, keys, after) in levels {
        for key in keys {
            let lines = Fixture::new().errors_of("c.json", format!("{before}{{\n\"{key}\": [null]}}{after}"));
            // At the location of the value, or inside it.
            let is_reported = lines.iter().any(|line| line.starts_with("c.json:2:") && line.contains(key));
            assert!(is_reported, "{before} {key}: {lines:?}");
            assert!(lines.iter().all(|line| !line.contains("unknown key")), "{lines:?}");
        }
    }
}
