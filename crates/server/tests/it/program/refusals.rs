//! What it refuses to start with.

use std::net::TcpListener;
use std::path::Path;

use tidewire_testkit::Certificates;

use super::Place;

/// It ends with 2 and says just this on the standard error; nothing was started.
fn refuses(place: &Place, args: &[&str], line: &str) {
    let ended = place.run(args);
    assert_eq!((ended.code, &*ended.stderr, &*ended.stdout), (Some(2), line, ""), "{args:?}");
    assert!(!place.has("data"));
}

#[test]
fn a_check_says_whether_the_file_is_good_and_starts_nothing() {
    let place = Place::new();
    place.file("good.toml", "port = 0\n[buckets.b]\nkey = 'id'\nschema.id.type = 'string'\n");
    let good = place.run(&["--config", "good.toml", "--check"]);
    assert_eq!((good.code, &*good.stdout, &*good.stderr), (Some(0), "the configuration is good", ""));
    assert!(!place.has("data"));
    place.file("bad.json", "{\n  \"port\": 0,\n  \"hots\": \"localhost\"\n}");
    let line = "bad.json:3:3: hots: there is no such key; the nearest one is \"host\"";
    refuses(&place, &["--config", "bad.json", "--check"], line);
    refuses(&place, &["serve", "--config", "bad.json"], line);
}

#[test]
fn what_is_wrong_is_told_with_its_place() {
    let place = Place::new();
    for (text, line) in [
        ("{\"port\": 70000}", "c.json:1:10: port: expected a whole number from 0 to 65535, found 70000"),
        ("{\"port\": 1,\n \"name\": }", "c.json:2:10: this is not valid JSON: expected a value, found '}'"),
        (
            "{\"engine\": \"redis://:secret@localhost\"}",
            "c.json:1:12: engine: this version has no redis engine: use \"embedded\", which keeps the data in a directory, or \"memory\"",
        ),
        (
            "{\"auth\": {\"builtIn\": true, \"adminSecret\": \"s\"}}",
            "c.json:1:22: auth.builtIn: this version has no built-in identity: give \"tokens\" or \"jwt\" in \"auth\", or leave it out",
        ),
        (
            "{\"buckets\": {\n\"b\": {\"key\": \"id\", \"schema\": {}}}}",
            "c.json:2:6: buckets.b: key names the field id, which is not in the schema",
        ),
        (
            "{\"auth\":\n {\"jwt\": {\"algorithm\": \"HS256\",\n  \"secret\": \"short\"}}}",
            "c.json:3:13: auth.jwt.secret: the secret has 5 bytes, and HS256 needs at least 32 random ones: make one by `openssl rand -hex 32`",
        ),
    ] {
        place.file("c.json", text);
        refuses(&place, &["--config", "c.json"], line);
        refuses(&place, &["--config", "c.json", "--check"], line);
    }
    refuses(&place, &["--port", "http"], "--port: expected a whole number from 0 to 65535, found \"http\"");
    let line = "--engine: this version has no redis engine: use \"embedded\", which keeps the data in a directory, or \"memory\"";
    refuses(&place, &["--engine", "redis://localhost"], line);
    let ended = place.run(&["--prot", "1"]);
    assert_eq!((ended.code, &*ended.stdout), (Some(2), ""));
    assert!(
        ended.stderr.contains("unexpected argument '--prot'") && ended.stderr.contains("--port"),
        "{}",
        ended.stderr
    );
}

#[test]
fn two_cannot_have_the_same_data() {
    let place = Place::new();
    let first = place.start(&["--data-dir", "tide"]);
    let second = place.run(&["--port", "0", "--data-dir", "tide"]);
    assert_eq!((second.code, &*second.stdout), (Some(1), ""));
    assert!(second.stderr.starts_with("tidewire: cannot open the data in tide: tide is in use: "), "{}", second.stderr);
    first.stop();
    place.start(&["--data-dir", "tide"]).stop();
}

#[test]
fn two_cannot_have_the_same_port() {
    let place = Place::new();
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = other.local_addr().unwrap().port().to_string();
    let refused = place.run(&["--port", &port, "--engine", "memory"]);
    assert_eq!((refused.code, &*refused.stdout), (Some(1), ""));
    let line = format!("tidewire: cannot listen on 127.0.0.1:{port}: Address already in use (os error 98)");
    assert_eq!(refused.stderr, line);
}

#[test]
fn a_certificate_that_is_of_no_use_is_told() {
    let place = Place::new();
    let certificates = Certificates::generate(place.0.path());
    let name = |path: &Path| path.file_name().unwrap().to_str().unwrap().to_owned();
    let (cert, key) = (name(&certificates.server), name(&certificates.client_key));
    let line = "--tls-cert: the certificate or its key cannot be used: the certificates and keys do not fit together: \
                keys may not be consistent: KeyMismatch";
    refuses(&place, &["--tls-cert", &cert, "--tls-key", &key], line);
    place.file("x.pem", "nothing");
    let line = "--tls-cert: the certificate or its key cannot be used: there is no certificate in the chain";
    refuses(&place, &["--tls-cert", "x.pem", "--tls-key", &key], line);
    refuses(
        &place,
        &["--tls-cert", &cert, "--tls-key", "."],
        "--tls-key: the file . cannot be read: Is a directory (os error 21)",
    );
}
