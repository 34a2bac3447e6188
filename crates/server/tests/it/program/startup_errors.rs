//! Settings and conditions that prevent a start.

use std::net::TcpListener;
use std::path::Path;

use tidewire_testkit::Certificates;

use super::WorkDir;

/// Checks that the program exits with code 2, prints this line to the standard error, and starts nothing.
fn assert_startup_error(dir: &WorkDir, args: &[&str], line: &str) {
    let exit = dir.run(args);
    assert_eq!((exit.code, &*exit.stderr, &*exit.stdout), (Some(2), line, ""), "{args:?}");
    assert!(!dir.has("data"));
}

#[test]
fn check_validates_the_file_and_starts_nothing() {
    let dir = WorkDir::new();
    dir.file("good.toml", "port = 0\n[buckets.b]\nkey = 'id'\nschema.id.type = 'string'\n");
    let good = dir.run(&["--config", "good.toml", "--check"]);
    let open = "the configuration is valid\n\nAuth is off: every client may do everything.";
    assert_eq!((good.code, &*good.stdout, &*good.stderr), (Some(0), open, ""));
    assert!(!dir.has("data"));
    dir.file("bad.json", "{\n  \"port\": 0,\n  \"hots\": \"localhost\"\n}");
    let line = "bad.json:3:3: unknown key `hots`; did you mean `host`?";
    assert_startup_error(&dir, &["--config", "bad.json", "--check"], line);
    assert_startup_error(&dir, &["serve", "--config", "bad.json"], line);
}

#[test]
fn errors_are_printed_with_their_location() {
    let dir = WorkDir::new();
    for (text, line) in [
        ("{\"port\": 70000}", "c.json:1:10: expected a port number from 0 to 65535 for `port`, got 70000"),
        ("{\"port\": 1,\n \"name\": }", "c.json:2:10: invalid JSON: expected value"),
        (
            "{\"engine\": \"redis://:secret@localhost\"}",
            "c.json:1:12: `engine`: this version has no Redis engine; use \"embedded\", which stores the data in a directory, or \"memory\"",
        ),
        (
            "{\"auth\": {\"builtIn\": true, \"adminSecret\": \"s\"}}",
            "c.json:1:22: `auth.builtIn`: this version has no built-in identity; configure `auth.tokens` or `auth.jwt` instead, or remove it",
        ),
        (
            "{\n\"slowRequestMs\": \"fast\"}",
            "c.json:2:18: expected a number of milliseconds from 0 to 31536000000 for `slowRequestMs`, got \"fast\"",
        ),
        (
            "{\"auth\":\n {\"jwt\": {\"algorithm\": \"HS256\",\n  \"secret\": \"short\"}}}",
            "c.json:3:13: `auth.jwt.secret`: the secret has 5 bytes, but HS256 needs at least 32; create one with `openssl rand -hex 32`",
        ),
    ] {
        dir.file("c.json", text);
        assert_startup_error(&dir, &["--config", "c.json"], line);
        assert_startup_error(&dir, &["--config", "c.json", "--check"], line);
    }
    assert_startup_error(&dir, &["--port", "http"], "--port: expected a port number from 0 to 65535, got \"http\"");
    let line = "--engine: this version has no Redis engine; use \"embedded\", which stores the data in a directory, or \"memory\"";
    assert_startup_error(&dir, &["--engine", "redis://localhost"], line);
    let exit = dir.run(&["--prot", "1"]);
    assert_eq!((exit.code, &*exit.stdout), (Some(2), ""));
    assert!(exit.stderr.contains("unexpected argument '--prot'") && exit.stderr.contains("--port"), "{}", exit.stderr);
}

#[test]
fn two_servers_cannot_share_a_data_directory() {
    let dir = WorkDir::new();
    let first = dir.start(&["--data-dir", "tide"]);
    let second = dir.run(&["--port", "0", "--data-dir", "tide"]);
    assert_eq!((second.code, &*second.stdout), (Some(1), ""));
    assert!(second.stderr.starts_with("tidewire: cannot open the data directory tide: "), "{}", second.stderr);
    first.stop();
    dir.start(&["--data-dir", "tide"]).stop();
}

#[test]
fn two_servers_cannot_share_a_port() {
    let dir = WorkDir::new();
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = other.local_addr().unwrap().port().to_string();
    let second = dir.run(&["--port", &port, "--engine", "memory"]);
    assert_eq!((second.code, &*second.stdout), (Some(1), ""));
    let stderr = &second.stderr;
    assert!(stderr.starts_with("tidewire: ") && stderr.contains(&format!("127.0.0.1:{port}")), "{stderr}");
    assert!(stderr.contains("Address already in use"), "{stderr}");
}

#[test]
fn unusable_certificate_is_rejected() {
    let dir = WorkDir::new();
    let certificates = Certificates::generate(dir.0.path());
    let name = |path: &Path| path.file_name().unwrap().to_str().unwrap().to_owned();
    let (cert, key) = (name(&certificates.server), name(&certificates.client_key));
    dir.file("x.pem", "nothing");
    for (cert, reason) in [(&*cert, "KeyMismatch"), ("x.pem", "no certificate")] {
        let exit = dir.run(&["--tls-cert", cert, "--tls-key", &key]);
        assert_eq!((exit.code, &*exit.stdout), (Some(2), ""));
        assert!(exit.stderr.starts_with("--tls-cert: ") && exit.stderr.contains(reason), "{}", exit.stderr);
    }
    assert_startup_error(
        &dir,
        &["--tls-cert", &cert, "--tls-key", "."],
        "--tls-key: cannot read the file .: Is a directory (os error 21)",
    );
}
