//! What it makes of its settings.

use futures_util::StreamExt as _;
use serde_json::{Value as Json, json};
use tidewire_conn::{Authorities, Connect as _, TcpConnector, TlsClientOptions, TlsConnector};
use tidewire_testkit::{Certificates, Process};

use super::{Place, Running, warnings};

#[tokio::test(flavor = "multi_thread")]
async fn the_environment_says_what_flags_can() {
    let place = Place::new();
    let mut command = place.command(&["--path", "/flag"]);
    command.env("TIDEWIRE_PORT", "0").env("TIDEWIRE_PATH", "/variable").env("TIDEWIRE_DATA_DIR", "kept");
    command.env("TIDEWIRE_NO_ERROR_DETAILS", "1");
    let server = Running::of(command);
    assert!(server.url.ends_with("/flag"), "{}", server.url);
    server.process.wait_for_line("The data is in kept ");
    server.client().await;
    server.stop();
    assert!(place.has("kept") && !place.has("data"));

    let mut command = place.command(&[]);
    command.env("TIDEWIRE_PORT", "http");
    let mut process = Process::spawn(command);
    assert_eq!(process.wait().code(), Some(2));
    assert_eq!(process.stderr(), "TIDEWIRE_PORT: expected a whole number from 0 to 65535, found \"http\"");
}

#[tokio::test(flavor = "multi_thread")]
async fn with_a_certificate_it_speaks_tls() {
    let place = Place::new();
    let certificates = Certificates::generate(place.0.path());
    let (cert, key) = (certificates.server.to_str().unwrap(), certificates.server_key.to_str().unwrap());
    let process = Process::spawn(place.command(&["--port", "0", "--tls-cert", cert, "--tls-key", key]));
    let rest = process.wait_for_line("wss://");
    let address = rest.trim_end_matches('/').to_owned();
    let mut options = TlsClientOptions::default();
    options.authorities = Some(Authorities::from_pem(&std::fs::read(&certificates.authority).unwrap()).unwrap());
    let connector = TlsConnector::new(TcpConnector::new(address), "localhost", options).unwrap();
    let socket = connector.connect().await.unwrap().socket;
    let (mut socket, _) = tokio_tungstenite::client_async("wss://localhost/", socket).await.unwrap();
    let welcome: Json = serde_json::from_str(socket.next().await.unwrap().unwrap().to_text().unwrap()).unwrap();
    assert_eq!(welcome["type"], "welcome");
    drop(socket);
    Running { process, url: String::new() }.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_and_permissions_of_the_file_hold() {
    let place = Place::new();
    let bucket = json!({"key": "id", "schema": {"id": {"type": "number"}, "owner": {"type": "string"}}});
    place.file(
        "c.json",
        json!({
            "engine": "memory", "buckets": {"own": bucket, "other": bucket},
            "auth": {
                "tokens": {"t-ann": {"userId": "ann", "roles": ["member"]}},
                "permissions": {"default": "deny", "rules": [{
                    "role": "member", "allow": "store.*", "buckets": ["own"],
                    "where": {"owner": "{{ session.userId }}"},
                }]},
            },
        })
        .to_string(),
    );
    let server = place.start(&["--config", "c.json"]);
    server.process.wait_for_line("store.insert");
    let introduction = server.process.stdout();
    assert!(!introduction.contains("Auth is off") && introduction.contains("\"auth.login\""), "{introduction}");
    let mut client = server.client().await;
    assert_eq!(client.welcome["requiresAuth"], true);
    assert_eq!(client.fail("store.all", json!({"bucket": "own"})).await.0, "UNAUTHORIZED");
    assert_eq!(client.fail("auth.login", json!({"token": "t-eve"})).await.0, "UNAUTHORIZED");
    let session = client.ask("auth.login", json!({"token": "t-ann"})).await;
    assert_eq!(session, json!({"userId": "ann", "roles": ["member"], "expiresAt": null}));
    let record = client.ask("store.insert", json!({"bucket": "own", "data": {"id": 1, "owner": "ann"}})).await;
    assert_eq!(client.ask("store.all", json!({"bucket": "own"})).await, json!([record]));
    let eve = json!({"id": 2, "owner": "eve"});
    assert_eq!(client.fail("store.insert", json!({"bucket": "own", "data": eve})).await.0, "FORBIDDEN");
    assert_eq!(client.fail("store.all", json!({"bucket": "other"})).await.0, "FORBIDDEN");
    drop(client);
    server.stop();
}

#[test]
fn keys_of_later_versions_warn_once_each() {
    let place = Place::new();
    place.file(
        "c.toml",
        "engine = 'memory'\nrules = true\nrulesPreload = [{ id = 'r' }]\nprocedures = { p = {} }\naudit = {}\nauth.sessionTtl = 5\n",
    );
    let expected = [
        "c.toml:6:19: auth.sessionTtl: it belongs to the built-in identity, which this version does not have; it is ignored",
        "c.toml:5:9: audit: this version keeps no audit log; the key is ignored",
        "c.toml:2:9: rules: this version has no rules; the key is ignored",
        "c.toml:3:16: rulesPreload: this version has no rules, and loads none; the key is ignored",
        "c.toml:4:14: procedures: this version has no procedures; the key is ignored",
    ];
    let checked = place.run(&["--config", "c.toml", "--check"]);
    assert_eq!(checked.code, Some(0));
    assert_eq!(checked.stderr, expected.map(|line| format!("warning: {line}")).join("\n"));
    assert_eq!(warnings(&place.start(&["--config", "c.toml"]).stop()), expected);
}
