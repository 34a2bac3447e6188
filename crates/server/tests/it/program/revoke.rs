//! The command `revoke` against a server process.

use serde_json::json;
use tidewire_testkit::{Certificates, Process};

use super::{Exit, ServerProcess, WorkDir, log};
use crate::client::Client;

const ADMIN: &str = "admin-0123456789abcdefghijklmnopqrstuvwxyz";

/// Creates a directory with a configuration of three users.
fn work_dir() -> WorkDir {
    let dir = WorkDir::new();
    let tokens = json!({
        ADMIN: {"userId": "adm", "roles": ["admin"]},
        "ann-0123456789abcdefghijklmnopqrstuvwxyz": {"userId": "ann", "roles": ["writer"]},
        "bob-0123456789abcdefghijklmnopqrstuvwxyz": {"userId": "bob", "roles": ["writer"]},
    });
    dir.file("c.json", json!({"auth": {"tokens": tokens}}).to_string());
    dir
}

/// Runs the command with this token.
async fn revoke(dir: &WorkDir, token: &str, args: &[&str]) -> Exit {
    let mut command = dir.command(&[&["revoke"], args].concat());
    command.env("TIDEWIRE_TOKEN", token);
    let mut process = Process::spawn(command);
    tokio::task::spawn_blocking(move || {
        let code = process.wait().code();
        Exit { code, stdout: process.stdout(), stderr: process.stderr() }
    })
    .await
    .unwrap()
}

async fn log_in(url: &str, user: &str) -> Result<Client, String> {
    let mut client = Client::connect_to(url).await;
    let token = format!("{user}-0123456789abcdefghijklmnopqrstuvwxyz");
    let id = client.send("auth.login", json!({"token": token})).await;
    let reply = client.reply(id).await;
    if reply["type"] == "result" { Ok(client) } else { Err(reply["code"].as_str().unwrap().to_owned()) }
}

#[tokio::test(flavor = "multi_thread")]
async fn revocation_survives_a_kill_and_a_restart() {
    let dir = work_dir();
    let mut server = dir.start(&["--config", "c.json"]);
    let (mut ann, mut bob) = (log_in(&server.url, "ann").await.unwrap(), log_in(&server.url, "bob").await.unwrap());
    let done = revoke(&dir, ADMIN, &["ann", "--url", &server.url, "--reason", "left the harbour"]).await;
    assert_eq!((done.code, &*done.stderr), (Some(0), ""));
    let lines: Vec<&str> = done.stdout.lines().collect();
    let [first, closed, rejected] = lines[..] else { panic!("{}", done.stdout) };
    assert_eq!((first, closed), ("Revoked \"ann\"", "  connections closed: 1"));
    let seconds = rejected.strip_prefix("  logins rejected for: ").and_then(|rest| rest.strip_suffix(" s")).unwrap();
    assert!((3590..=3700).contains(&seconds.parse::<u64>().unwrap()), "{rejected}");
    assert_eq!(ann.push().await["event"], "session_revoked");
    assert_eq!(ann.closed().await.0, 4002);
    bob.call("store.buckets", json!({})).await;
    let log = log(&server.process);
    let line = log.iter().find(|line| line["message"] == "user revoked").expect("no log line");
    assert_eq!(
        (&line["user"], &line["by"], &line["reason"]),
        (&json!("ann"), &json!("adm"), &json!("left the harbour"))
    );
    server.process.kill();

    for _ in 0..2 {
        let server = dir.start(&["--config", "c.json"]);
        assert_eq!(log_in(&server.url, "ann").await.err().unwrap(), "SESSION_REVOKED");
        log_in(&server.url, "bob").await.unwrap();
        server.stop();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_engine_reports_that_revocations_are_not_durable() {
    let dir = work_dir();
    let server = dir.start(&["--config", "c.json", "--engine", "memory"]);
    let done = revoke(&dir, ADMIN, &["eve", "--url", &server.url]).await;
    assert_eq!((done.code, &*done.stderr), (Some(0), ""));
    assert!(done.stdout.starts_with("Revoked \"eve\"\n  connections closed: 0\n"), "{}", done.stdout);
    assert!(
        done.stdout
            .ends_with("The revocation is not persistent: after a restart of the server, the user can log in again."),
        "{}",
        done.stdout
    );
    server.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn failures_have_distinct_messages_and_exit_codes() {
    let dir = work_dir();
    let server = dir.start(&["--config", "c.json", "--engine", "memory"]);
    let url = &*server.url;
    for (token, args, code, message) in [
        ("wrong", &["ann", "--url", url][..], 1, "tidewire: cannot log in: UNAUTHORIZED: Invalid or expired token"),
        (
            "bob-0123456789abcdefghijklmnopqrstuvwxyz",
            &["ann", "--url", url],
            1,
            "tidewire: cannot revoke \"ann\": FORBIDDEN: this operation requires a role with admin access",
        ),
        (
            ADMIN,
            &["ann", "--url", "ws://127.0.0.1:1/"],
            1,
            "tidewire: cannot connect to ws://127.0.0.1:1/: Connection refused",
        ),
        (
            ADMIN,
            &["ann", "--url", "http://127.0.0.1/"],
            2,
            "--url: expected a URL such as \"ws://127.0.0.1:8080/\", got \"http://127.0.0.1/\"",
        ),
        (
            "",
            &["ann", "--url", url],
            2,
            "TIDEWIRE_TOKEN: expected the token of a user with the tier admin, got nothing",
        ),
        (ADMIN, &[], 2, "error: the following required arguments were not provided"),
    ] {
        let failed = revoke(&dir, token, args).await;
        assert_eq!((failed.code, &*failed.stdout), (Some(code), ""), "{args:?}: {}", failed.stderr);
        assert!(failed.stderr.starts_with(message), "{args:?}: {}", failed.stderr);
        assert!(token.is_empty() || !failed.stderr.contains(token), "{}", failed.stderr);
    }
    // Without the flag, the variable names the server.
    let mut command = dir.command(&["revoke", "ann"]);
    command.env("TIDEWIRE_TOKEN", ADMIN).env("TIDEWIRE_URL", url);
    let mut process = Process::spawn(command);
    assert_eq!(process.wait().code(), Some(0), "{}", process.output());
    server.stop();
}

#[test]
fn tls_server_must_have_a_trusted_certificate() {
    let dir = work_dir();
    let Certificates { authority, server, server_key, .. } = Certificates::generate(dir.0.path());
    let (cert, key) = (server.to_str().unwrap(), server_key.to_str().unwrap());
    let flags = ["--port", "0", "--engine", "memory", "--config", "c.json", "--tls-cert", cert, "--tls-key", key];
    let process = Process::spawn(dir.command(&flags));
    let url = format!("wss://{}", process.wait_for_line("wss://"));
    let revoke = |trusted: &std::path::Path| {
        let mut command = dir.command(&["revoke", "ann", "--url", &url]);
        command.env("TIDEWIRE_TOKEN", ADMIN).env("SSL_CERT_FILE", trusted).env_remove("SSL_CERT_DIR");
        let mut process = Process::spawn(command);
        (process.wait().code(), process.output())
    };
    let (code, output) = revoke(&authority);
    assert!(code == Some(0) && output.starts_with("Revoked \"ann\""), "{output}");
    // Another authority with the same name.
    let other = tempfile::tempdir().unwrap();
    let (code, output) = revoke(&Certificates::generate(other.path()).authority);
    assert!(code == Some(1) && output.starts_with("tidewire: cannot connect to wss://127.0.0.1:"), "{output}");
    assert!(output.contains("certificate"), "{output}");
    ServerProcess { process, url }.stop();
}
