//! Effects of settings on the running server.

use std::process::Command;

use futures_util::StreamExt as _;
use serde_json::{Value as Json, json};
use tidewire_conn::client::{Connect as _, TcpConnector};
use tidewire_conn::tls::{Authorities, TlsClientOptions, TlsConnector};
use tidewire_testkit::{Certificates, PATIENCE, Process, wait_until_async};

use super::{ServerProcess, WorkDir, log, warnings};
use crate::client::notes_config;

#[tokio::test(flavor = "multi_thread")]
async fn environment_variables_set_flags() {
    let dir = WorkDir::new();
    let mut command = dir.command(&["--path", "/flag"]);
    command.env("TIDEWIRE_PORT", "0").env("TIDEWIRE_PATH", "/variable").env("TIDEWIRE_DATA_DIR", "kept");
    command.env("TIDEWIRE_NO_ERROR_DETAILS", "1");
    let server = ServerProcess::spawn(command);
    assert!(server.url.ends_with("/flag"), "{}", server.url);
    server.process.wait_for_line("Data directory: kept ");
    server.client().await;
    server.stop();
    assert!(dir.has("kept") && !dir.has("data"));

    let mut command = dir.command(&[]);
    command.env("TIDEWIRE_PORT", "http");
    let mut process = Process::spawn(command);
    assert_eq!(process.wait().code(), Some(2));
    assert_eq!(process.stderr(), "TIDEWIRE_PORT: expected a port number from 0 to 65535, got \"http\"");
}

#[tokio::test(flavor = "multi_thread")]
async fn certificate_enables_tls() {
    let dir = WorkDir::new();
    let certificates = Certificates::generate(dir.0.path());
    let (cert, key) = (certificates.server.to_str().unwrap(), certificates.server_key.to_str().unwrap());
    let process = Process::spawn(dir.command(&["--port", "0", "--tls-cert", cert, "--tls-key", key]));
    let rest = process.wait_for_line("wss://");
    let address = rest.trim_end_matches('/').to_owned();
    let authorities = Authorities::from_pem(&std::fs::read(&certificates.authority).unwrap()).unwrap();
    let options = TlsClientOptions::default().authorities(authorities);
    let connector = TlsConnector::new(TcpConnector::new(address), "localhost", options).unwrap();
    let socket = connector.connect().await.unwrap().socket;
    let (mut socket, _) = tokio_tungstenite::client_async("wss://localhost/", socket).await.unwrap();
    let welcome: Json = serde_json::from_str(socket.next().await.unwrap().unwrap().to_text().unwrap()).unwrap();
    assert_eq!(welcome["type"], "welcome");
    drop(socket);
    ServerProcess { process, url: String::new() }.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_and_permissions_in_the_file_apply() {
    let dir = WorkDir::new();
    let bucket = json!({"key": "id", "schema": {"id": {"type": "number"}, "owner": {"type": "string"}}});
    dir.file(
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
    let server = dir.start(&["--config", "c.json"]);
    server.process.wait_for_line("store.insert");
    let greeting = server.process.stdout();
    assert!(!greeting.contains("Auth is off") && greeting.contains("\"auth.login\""), "{greeting}");
    let mut client = server.client().await;
    assert_eq!(client.welcome["requiresAuth"], true);
    assert_eq!(client.call_err("store.all", json!({"bucket": "own"})).await.0, "UNAUTHORIZED");
    assert_eq!(client.call_err("auth.login", json!({"token": "t-eve"})).await.0, "UNAUTHORIZED");
    let session = client.call("auth.login", json!({"token": "t-ann"})).await;
    assert_eq!(session, json!({"userId": "ann", "roles": ["member"], "expiresAt": null}));
    let record = client.call("store.insert", json!({"bucket": "own", "data": {"id": 1, "owner": "ann"}})).await;
    assert_eq!(client.call("store.all", json!({"bucket": "own"})).await, json!([record]));
    let eve = json!({"id": 2, "owner": "eve"});
    assert_eq!(client.call_err("store.insert", json!({"bucket": "own", "data": eve})).await.0, "FORBIDDEN");
    assert_eq!(client.call_err("store.all", json!({"bucket": "other"})).await.0, "FORBIDDEN");
    drop(client);
    server.stop();
}

/// Returns a command that runs the program with these limits on open files.
fn with_open_files(dir: &WorkDir, soft: u32, hard: u32, args: &[&str]) -> Command {
    let program = dir.command(args);
    let mut command = Command::new("sh");
    let script = format!("ulimit -S -n {soft} && ulimit -H -n {hard} && exec \"$0\" \"$@\"");
    command.arg("-c").arg(script).arg(program.get_program()).args(program.get_args()).current_dir(dir.0.path());
    command
}

#[tokio::test(flavor = "multi_thread")]
async fn open_file_limit_limits_connections() {
    let dir = WorkDir::new();
    let args = ["--port", "0", "--engine", "memory"];
    let warning = "`maxConnections` is 100000, but the open file limit (160, of which 64 are reserved) allows only 96 \
                   connections; raise the limit, for example with `ulimit -Hn` or LimitNOFILE, or lower `maxConnections`";
    let server = ServerProcess::spawn(with_open_files(&dir, 100, 160, &args));
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", server.process.pid())).unwrap();
    let open_files = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    assert_eq!(open_files.split_whitespace().skip(3).take(2).collect::<Vec<_>>(), ["160", "160"]);
    let mut clients = Vec::new();
    for _ in 0..96 {
        clients.push(server.client().await);
    }
    for _ in 0..3 {
        let error = tokio_tungstenite::connect_async(&server.url).await.unwrap_err();
        assert!(error.to_string().contains("503"), "{error}");
    }
    for client in &mut clients {
        client.call("store.buckets", json!({})).await;
    }
    drop(clients);
    assert_eq!(warnings(&server.stop()), [warning]);

    let mut check = Process::spawn(with_open_files(&dir, 100, 160, &["--check"]));
    assert_eq!(check.wait().code(), Some(0));
    assert_eq!(check.stderr(), format!("warning: {warning}"));
    // A limit that suffices causes no warning.
    dir.file("c.json", json!({"maxConnections": 96}).to_string());
    let mut check = Process::spawn(with_open_files(&dir, 100, 160, &["--check", "--config", "c.json"]));
    assert_eq!((check.wait().code(), check.stderr()), (Some(0), String::new()));
}

#[test]
fn each_unsupported_key_causes_one_warning() {
    let dir = WorkDir::new();
    dir.file(
        "c.toml",
        "engine = 'memory'\nrules = true\nrulesPreload = [{ id = 'r' }]\nprocedures = { p = {} }\naudit = {}\nauth.sessionTtl = 5\n",
    );
    let expected = [
        "c.toml:6:19: `auth.sessionTtl`: this version does not support the built-in identity; the setting is ignored",
        "c.toml:5:9: `audit`: this version does not support the audit log; the setting is ignored",
        "c.toml:2:9: `rules`: this version does not support rules; the setting is ignored",
        "c.toml:3:16: `rulesPreload`: this version does not support rules; the setting is ignored",
        "c.toml:4:14: `procedures`: this version does not support procedures; the setting is ignored",
    ];
    let checked = dir.run(&["--config", "c.toml", "--check"]);
    assert_eq!(checked.code, Some(0));
    assert_eq!(checked.stderr, expected.map(|line| format!("warning: {line}")).join("\n"));
    assert_eq!(warnings(&dir.start(&["--config", "c.toml"]).stop()), expected);
}

/// Regression: a raised message limit left the record limit at 1 MiB, so the store rejected records that a client could send.
#[tokio::test(flavor = "multi_thread")]
async fn raised_message_limit_raises_the_record_limit() {
    let dir = WorkDir::new();
    dir.file("c.json", json!({"maxPayloadBytes": 4 << 20}).to_string());
    let server = dir.start(&["--config", "c.json"]);
    let mut client = server.client().await;
    client.call("store.defineBucket", json!({"name": "notes", "config": notes_config()})).await;
    let data = json!({"text": "x".repeat(2 << 20)});
    let note = client.call("store.insert", json!({"bucket": "notes", "data": data})).await;
    drop(client);
    server.stop();

    let server = dir.start(&["--config", "c.json"]);
    let mut client = server.client().await;
    assert!(client.call("store.get", json!({"bucket": "notes", "key": note["id"]})).await == note);
    drop(client);
    server.stop();
}

/// A commit is written to one segment of the log, so segments must grow with the limit, also in an existing log.
#[tokio::test(flavor = "multi_thread")]
async fn record_larger_than_the_segments_of_an_existing_log_is_stored() {
    let dir = WorkDir::new();
    dir.start(&[]).stop();
    dir.file("c.json", json!({"maxPayloadBytes": 32 << 20, "maxResultBytes": 32 << 20}).to_string());
    let server = dir.start(&["--config", "c.json"]);
    let mut client = server.client().await;
    client.call("store.defineBucket", json!({"name": "notes", "config": notes_config()})).await;
    // The reply with the record exceeds the limit of this client, so another one waits for the commit.
    client.send("store.insert", json!({"bucket": "notes", "data": {"text": "x".repeat(20 << 20)}})).await;
    let mut observer = server.client().await;
    let count = json!({"bucket": "notes"});
    let is_stored = async || observer.call("store.count", count.clone()).await == json!(1);
    wait_until_async("the record is stored", PATIENCE, is_stored).await;
    drop((client, observer));
    server.stop();

    let server = dir.start(&["--config", "c.json"]);
    assert_eq!(server.client().await.call("store.count", count).await, json!(1));
    server.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn max_record_bytes_limits_records() {
    let dir = WorkDir::new();
    let server = dir.start(&["--engine", "memory", "--max-record-bytes", "1000"]);
    let mut client = server.client().await;
    client.call("store.defineBucket", json!({"name": "notes", "config": notes_config()})).await;
    let insert = |len: usize| json!({"bucket": "notes", "data": {"text": "x".repeat(len)}});
    client.call("store.insert", insert(500)).await;
    assert_eq!(client.call_err("store.insert", insert(1001)).await.0, "VALIDATION_ERROR");
    drop(client);
    server.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_request_ms_sets_the_log_threshold() {
    let dir = WorkDir::new();
    let slow = |process: &Process| log(process).iter().filter(|line| line["operation"] == "store.buckets").count();
    for (threshold, expected) in [("0", 1), ("31536000000", 0)] {
        let server = dir.start(&["--engine", "memory", "--slow-request-ms", threshold]);
        let mut client = server.client().await;
        client.call("store.buckets", json!({})).await;
        drop(client);
        assert_eq!(slow(&server.stop()), expected, "{threshold}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn full_store_rejects_writes_that_grow() {
    let dir = WorkDir::new();
    let server = ServerProcess::spawn(dir.command(&["--port", "0", "--memory-max-store-bytes", "100000"]));
    let mut client = server.client().await;
    client.call("store.defineBucket", json!({"name": "notes", "config": notes_config()})).await;
    let note = |id: &str, len: usize| json!({"bucket": "notes", "data": {"id": id, "text": "x".repeat(len)}});
    client.call("store.insert", note("first", 60_000)).await;
    let (code, error) = client.call_err("store.insert", note("second", 60_000)).await;
    assert_eq!(code, "TOO_LARGE", "{error}");
    assert_eq!(client.call("store.count", json!({"bucket": "notes"})).await, 1);
    client.call("store.upsert", note("first", 50_000)).await;
    client.call("store.delete", json!({"bucket": "notes", "key": "first"})).await;
    client.call("store.insert", note("second", 60_000)).await;
    server.stop();
}

/// A token strong enough to cause no warning.
const TOKEN: &str = "0f3c9a5be1d24876b0c1d2e3f4a59687";

#[tokio::test(flavor = "multi_thread")]
async fn before_login_limits_apply_and_throttled_addresses_are_logged() {
    let dir = WorkDir::new();
    let auth = json!({
        "tokens": {TOKEN: {"userId": "ann", "roles": ["writer"]}},
        "permissions": {"default": "deny"},
        "loginRateLimit": {"maxAttempts": 2},
        "beforeLogin": {"maxPayloadBytes": 1000},
    });
    dir.file("c.json", json!({"engine": "memory", "auth": auth}).to_string());
    let server = dir.start(&["--config", "c.json"]);
    let mut ann = server.client().await;
    ann.call("auth.login", json!({"token": TOKEN})).await;
    let mut eve = server.client().await;
    for code in ["UNAUTHORIZED", "UNAUTHORIZED", "RATE_LIMITED", "RATE_LIMITED"] {
        assert_eq!(eve.call_err("auth.login", json!({"token": "t-guess"})).await.0, code);
    }
    for (client, is_closed) in [(&mut ann, false), (&mut eve, true)] {
        client.send_text("x".repeat(1001)).await;
        if is_closed {
            assert_eq!(client.closed().await.0, 1009);
        } else {
            assert_eq!(client.receive().await["code"], "PARSE_ERROR");
        }
    }
    drop((ann, eve));
    let process = server.stop();
    assert_eq!(warnings(&process), ["logins throttled"]);
    let line = log(&process).into_iter().find(|line| line["message"] == "logins throttled").unwrap();
    assert_eq!((&line["address"], &line["failures"]), (&json!("127.0.0.1"), &json!(2)));
    assert!(!process.output().contains("t-guess"));
}
