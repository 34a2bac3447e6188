//! `server.backup`: backups of the data that can be restored.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Value as Json, json};
use tempfile::TempDir;
use tidewire::auth::Auth;
use tidewire::{Server, ServerOptions};
use tidewire_store::engine::{Embedded, EmbeddedOptions};
use tidewire_store::{Store, StoreOptions};
use tidewire_testkit::{PATIENCE, wait_until_async};

use crate::client::{Client, RoleTokens, RpcClient, notes_config, options, serve, serve_store};
use crate::faulty_disk::FaultyDisk;
use crate::metrics_page::MetricsPage;

/// A server over a store on disk, with a backup directory.
struct BackupServer {
    server: Server,
    disk: FaultyDisk,
    dir: TempDir,
}

impl BackupServer {
    async fn start() -> Self {
        Self::start_with(options()).await
    }

    async fn start_with(options: ServerOptions) -> Self {
        let (disk, dir) = (FaultyDisk::default(), tempfile::tempdir().unwrap());
        let data = dir.path().join("data");
        let (store, _) = Store::open_on(Arc::new(disk.clone()), &data, StoreOptions::default()).unwrap();
        store.define_bucket("notes", notes_config()).wait().unwrap();
        let options = options.backup_dir(dir.path().join("backups"));
        Self { server: serve_store(store, options).await, disk, dir }
    }

    fn backups(&self) -> PathBuf {
        self.dir.path().join("backups")
    }

    /// Returns the names in the backup directory.
    fn backup_names(&self) -> Vec<String> {
        let Ok(entries) = std::fs::read_dir(self.backups()) else { return Vec::new() };
        let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// Restores a backup. Returns the texts of its notes and the position of its last commit.
    fn restore(&self, name: &str) -> (Vec<String>, u64) {
        let to = self.dir.path().join(format!("restored-{name}"));
        let recovery = Embedded::restore(&self.backups().join(name), &to, EmbeddedOptions::default()).unwrap();
        (texts(&to), recovery.position.sequence)
    }
}

/// Returns the texts of the notes in a data directory.
fn texts(dir: &Path) -> Vec<String> {
    let (store, _) = Store::open(dir, StoreOptions::default()).unwrap();
    let snapshot = store.snapshot();
    let rows = snapshot.state.bucket("notes").unwrap().rows();
    rows.map(|row| row.to_record()["text"].as_str().unwrap().to_owned()).collect()
}

async fn insert(client: &mut impl RpcClient, text: &str) {
    client.call("store.insert", json!({"bucket": "notes", "data": {"text": text}})).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn backup_has_all_records_and_can_be_restored() {
    let backup_server = BackupServer::start().await;
    let mut client = Client::connect(&backup_server.server).await;
    let expected: Vec<String> = (0..200).map(|number| format!("note {number}")).collect();
    for text in &expected {
        insert(&mut client, text).await;
    }
    let backup = client.call("server.backup", json!({"name": "before-ebb_1.0"})).await;
    let keys: Vec<&str> = backup.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!((keys, &backup["name"]), (vec!["name", "position"], &json!("before-ebb_1.0")));
    insert(&mut client, "later").await;
    let (restored, sequence) = backup_server.restore("before-ebb_1.0");
    assert_eq!(restored, expected);
    let position = backup["position"].as_str().unwrap();
    assert!(position.ends_with(&sequence.to_string()), "{position} does not end with commit {sequence}");
    // Without a name it is named after the time.
    let backup = client.call("server.backup", json!({})).await;
    let name = backup["name"].as_str().unwrap();
    let time = name.strip_prefix("backup-").expect("a name with the time");
    assert!(time.parse::<u64>().unwrap() > 1_600_000_000_000, "{name}");
    assert_eq!(backup_server.restore(name).0.len(), 201);
    assert_eq!(backup_server.backup_names(), [name, "before-ebb_1.0"]);
    let page = MetricsPage::read(&backup_server.server).await;
    assert_eq!((page.get("backups_total"), page.get("backups_failed_total")), (2, 0));
    assert_eq!(page.requests("server.backup", "ok"), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn backup_names_must_be_plain_directory_names() {
    let backup_server = BackupServer::start().await;
    let mut client = Client::connect(&backup_server.server).await;
    let long = "x".repeat(65);
    for name in
        ["../x", "x/y", "/x", "x\\y", ".", "..", ".x", "", "x y", "x\0", "x\n", "é", "$x", "*", "C:x", long.as_str()]
    {
        let (code, error) = client.call_err("server.backup", json!({"name": name})).await;
        assert_eq!(code, "VALIDATION_ERROR", "{name:?}: {error}");
        assert!(error["message"].as_str().unwrap().contains("\"name\""), "{error}");
    }
    for name in [json!(7), json!(["x"]), json!({}), json!(true)] {
        assert_eq!(client.call_err("server.backup", json!({"name": name})).await.0, "VALIDATION_ERROR", "{name}");
    }
    assert_eq!(backup_server.backup_names(), [""; 0], "nothing was created");
    let mut beside: Vec<_> =
        std::fs::read_dir(backup_server.dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    beside.retain(|name| name != "data");
    assert!(beside.is_empty(), "{beside:?}");
    let longest = &long[1..];
    assert_eq!(client.call("server.backup", json!({"name": longest})).await["name"], longest);
    assert_eq!(MetricsPage::read(&backup_server.server).await.get("backups_failed_total"), 0, "no backup was started");
}

#[tokio::test(flavor = "multi_thread")]
async fn existing_backup_name_is_rejected_and_its_backup_unchanged() {
    let backup_server = BackupServer::start().await;
    let mut client = Client::connect(&backup_server.server).await;
    insert(&mut client, "first").await;
    client.call("server.backup", json!({"name": "x"})).await;
    insert(&mut client, "second").await;
    std::fs::write(backup_server.backups().join("file"), "not a backup").unwrap();
    for name in ["x", "file"] {
        let (code, error) = client.call_err("server.backup", json!({"name": name})).await;
        assert_eq!(code, "ALREADY_EXISTS", "{error}");
    }
    assert_eq!(backup_server.restore("x").0, ["first"]);
    let page = MetricsPage::read(&backup_server.server).await;
    assert_eq!((page.get("backups_total"), page.get("backups_failed_total")), (1, 2));
    client.call("server.backup", json!({"name": "y"})).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_backup_runs_at_a_time_and_does_not_block_writes() {
    let backup_server = BackupServer::start().await;
    let (mut first, mut second) =
        (Client::connect(&backup_server.server).await, Client::connect(&backup_server.server).await);
    insert(&mut first, "before").await;
    backup_server.disk.hold(&backup_server.backups());
    let held = first.send("server.backup", json!({"name": "held"})).await;
    wait_until_async("the backup has begun", PATIENCE, async || backup_server.backups().join("held").is_dir()).await;
    let (code, error) = second.call_err("server.backup", json!({"name": "other"})).await;
    assert_eq!(code, "CONFLICT", "{error}");
    for _ in 0..10 {
        insert(&mut second, "during").await;
    }
    assert_eq!(second.call("store.count", json!({"bucket": "notes"})).await, 11);
    backup_server.disk.release();
    assert_eq!(first.reply(held).await["data"]["name"], "held");
    assert_eq!(backup_server.restore("held").0, ["before"], "the backup has the state at its start");
    second.call("server.backup", json!({"name": "other"})).await;
    assert_eq!(backup_server.restore("other").0.len(), 11);
    assert_eq!(MetricsPage::read(&backup_server.server).await.get("backups_total"), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_backup_is_counted_and_the_next_one_succeeds() {
    let backup_server = BackupServer::start().await;
    let mut client = Client::connect(&backup_server.server).await;
    backup_server.disk.set_full(true);
    let (code, error) = client.call_err("server.backup", json!({"name": "full"})).await;
    assert_eq!((code.as_str(), &error["message"]), ("INTERNAL_ERROR", &json!("Internal server error")));
    backup_server.disk.set_full(false);
    client.call("server.backup", json!({"name": "next"})).await;
    backup_server.disk.panic_once();
    assert_eq!(client.call_err("server.backup", json!({"name": "panic"})).await.0, "INTERNAL_ERROR");
    client.call("server.backup", json!({"name": "last"})).await;
    let page = MetricsPage::read(&backup_server.server).await;
    assert_eq!((page.get("backups_total"), page.get("backups_failed_total")), (2, 2));
}

#[tokio::test(flavor = "multi_thread")]
async fn backup_continues_after_its_client_disconnects() {
    let backup_server = BackupServer::start().await;
    let client = backup_server.server.client(None);
    client.insert::<Json>("notes", json!({"text": "kept"})).await.unwrap();
    backup_server.disk.hold(&backup_server.backups());
    let request = tokio::spawn(async move { client.request::<Json>("server.backup", json!({"name": "left"})).await });
    wait_until_async("the backup has begun", PATIENCE, async || backup_server.backups().join("left").is_dir()).await;
    request.abort();
    assert!(request.await.unwrap_err().is_cancelled());
    let mut other = backup_server.server.client(None);
    assert_eq!(other.call_err("server.backup", json!({})).await.0, "CONFLICT");
    backup_server.disk.release();
    let server = &backup_server.server;
    wait_until_async("the backup is complete", PATIENCE, async || {
        MetricsPage::read(server).await.get("backups_total") == 1
    })
    .await;
    assert_eq!(MetricsPage::read(server).await.requests("server.backup", "abandoned"), 1);
    assert_eq!(backup_server.restore("left").0, ["kept"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn backups_need_a_backup_directory_and_a_durable_store() {
    let server = serve(options()).await;
    let mut client = Client::connect(&server).await;
    let (code, error) = client.call_err("server.backup", json!({"name": "x"})).await;
    assert_eq!(code, "UNKNOWN_OPERATION");
    assert!(error["message"].as_str().unwrap().contains("backupDir"), "{error}");
    // An in-memory store has no files to copy.
    let dir = tempfile::tempdir().unwrap();
    let options = options().backup_dir(dir.path().join("backups"));
    let server = serve(options).await;
    let mut client = Client::connect(&server).await;
    assert_eq!(client.call_err("server.backup", json!({"name": "x"})).await.0, "VALIDATION_ERROR");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing was created");
    assert_eq!(MetricsPage::read(&server).await.get("backups_failed_total"), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn backup_requires_the_admin_tier() {
    let backup_server = BackupServer::start_with(options().auth(Auth::new(RoleTokens))).await;
    let mut client = Client::connect(&backup_server.server).await;
    assert_eq!(client.call_err("server.backup", json!({"name": "x"})).await.0, "UNAUTHORIZED");
    for token in ["rea:reader", "will:writer"] {
        client.call("auth.login", json!({"token": token})).await;
        assert_eq!(client.call_err("server.backup", json!({"name": "x"})).await.0, "FORBIDDEN", "{token}");
        assert_eq!(client.call_err("server.backup", json!({"name": "../x"})).await.0, "FORBIDDEN", "{token}");
    }
    assert_eq!(backup_server.backup_names(), [""; 0]);
    client.call("auth.login", json!({"token": "mara:admin"})).await;
    client.call("server.backup", json!({"name": "x"})).await;
    let mut local = backup_server.server.client(tidewire::auth::Session::new("mara", ["admin"]));
    assert_eq!(local.call("server.backup", json!({"name": "local"})).await["name"], "local");
    let mut reader = backup_server.server.client(tidewire::auth::Session::new("rea", ["reader"]));
    assert_eq!(reader.call_err("server.backup", json!({"name": "y"})).await.0, "FORBIDDEN");
    assert_eq!(backup_server.backup_names(), ["local", "x"]);
}
