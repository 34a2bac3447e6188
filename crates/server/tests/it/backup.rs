//! `server.backup`: copies of the data that can be restored.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Value as Json, json};
use tempfile::TempDir;
use tidewire::auth::Auth;
use tidewire::{Server, ServerOptions};
use tidewire_store::engine::{Embedded, EmbeddedOptions};
use tidewire_store::{Store, StoreOptions};
use tidewire_testkit::{PATIENCE, wait_until_async};

use crate::client::{Ask, Client, Tokens, notes, options, serve, serve_store};
use crate::faulty_disk::FaultyDisk;
use crate::page::Page;

/// A server over a store in a directory, with a backup directory beside it.
struct Site {
    server: Server,
    disk: FaultyDisk,
    dir: TempDir,
}

impl Site {
    async fn open() -> Self {
        Self::open_with(options()).await
    }

    async fn open_with(options: ServerOptions) -> Self {
        let (disk, dir) = (FaultyDisk::default(), tempfile::tempdir().unwrap());
        let data = dir.path().join("data");
        let (store, _) = Store::open_on(Arc::new(disk.clone()), &data, StoreOptions::default()).unwrap();
        store.define_bucket("notes", notes()).wait().unwrap();
        let options = options.backup_dir(dir.path().join("backups"));
        Self { server: serve_store(store, options).await, disk, dir }
    }

    fn backups(&self) -> PathBuf {
        self.dir.path().join("backups")
    }

    /// The names in the backup directory.
    fn names(&self) -> Vec<String> {
        let Ok(entries) = std::fs::read_dir(self.backups()) else { return Vec::new() };
        let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// Restores a backup, and returns the texts of its notes and the position of its last commit.
    fn restored(&self, name: &str) -> (Vec<String>, u64) {
        let to = self.dir.path().join(format!("restored-{name}"));
        let recovery = Embedded::restore(&self.backups().join(name), &to, EmbeddedOptions::default()).unwrap();
        (texts(&to), recovery.position.sequence)
    }
}

/// The texts of the notes in a data directory.
fn texts(dir: &Path) -> Vec<String> {
    let (store, _) = Store::open(dir, StoreOptions::default()).unwrap();
    let snapshot = store.snapshot();
    let rows = snapshot.state.bucket("notes").unwrap().rows();
    rows.map(|row| row.to_record()["text"].as_str().unwrap().to_owned()).collect()
}

async fn insert(client: &mut impl Ask, text: &str) {
    client.ask("store.insert", json!({"bucket": "notes", "data": {"text": text}})).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backup_has_all_records_and_can_be_restored() {
    let site = Site::open().await;
    let mut client = Client::connect(&site.server).await;
    let expected: Vec<String> = (0..200).map(|number| format!("note {number}")).collect();
    for text in &expected {
        insert(&mut client, text).await;
    }
    let made = client.ask("server.backup", json!({"name": "before-ebb_1.0"})).await;
    let keys: Vec<&str> = made.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!((keys, &made["name"]), (vec!["name", "position"], &json!("before-ebb_1.0")));
    insert(&mut client, "later").await;
    let (restored, sequence) = site.restored("before-ebb_1.0");
    assert_eq!(restored, expected);
    let position = made["position"].as_str().unwrap();
    assert!(position.ends_with(&sequence.to_string()), "{position} names commit {sequence}");
    // Without a name it is called after the time.
    let made = client.ask("server.backup", json!({})).await;
    let name = made["name"].as_str().unwrap();
    let time = name.strip_prefix("backup-").expect("a name with the time");
    assert!(time.parse::<u64>().unwrap() > 1_600_000_000_000, "{name}");
    assert_eq!(site.restored(name).0.len(), 201);
    assert_eq!(site.names(), [name, "before-ebb_1.0"]);
    let page = Page::of(&site.server).await;
    assert_eq!((page.get("backups_total"), page.get("backups_failed_total")), (2, 0));
    assert_eq!(page.requests("server.backup", "ok"), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn names_that_are_no_plain_directory_names_are_refused() {
    let site = Site::open().await;
    let mut client = Client::connect(&site.server).await;
    let long = "x".repeat(65);
    for name in
        ["../x", "x/y", "/x", "x\\y", ".", "..", ".x", "", "x y", "x\0", "x\n", "é", "$x", "*", "C:x", long.as_str()]
    {
        let (code, error) = client.fail("server.backup", json!({"name": name})).await;
        assert_eq!(code, "VALIDATION_ERROR", "{name:?}: {error}");
        assert!(error["message"].as_str().unwrap().contains("\"name\""), "{error}");
    }
    for name in [json!(7), json!(["x"]), json!({}), json!(true)] {
        assert_eq!(client.fail("server.backup", json!({"name": name})).await.0, "VALIDATION_ERROR", "{name}");
    }
    assert_eq!(site.names(), [""; 0], "nothing was created");
    let mut beside: Vec<_> =
        std::fs::read_dir(site.dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    beside.retain(|name| name != "data");
    assert!(beside.is_empty(), "{beside:?}");
    let longest = &long[1..];
    assert_eq!(client.ask("server.backup", json!({"name": longest})).await["name"], longest);
    assert_eq!(Page::of(&site.server).await.get("backups_failed_total"), 0, "no backup began");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_that_is_taken_is_refused_and_its_backup_stays_as_it_is() {
    let site = Site::open().await;
    let mut client = Client::connect(&site.server).await;
    insert(&mut client, "first").await;
    client.ask("server.backup", json!({"name": "x"})).await;
    insert(&mut client, "second").await;
    std::fs::write(site.backups().join("file"), "not a backup").unwrap();
    for name in ["x", "file"] {
        let (code, error) = client.fail("server.backup", json!({"name": name})).await;
        assert_eq!(code, "ALREADY_EXISTS", "{error}");
    }
    assert_eq!(site.restored("x").0, ["first"]);
    let page = Page::of(&site.server).await;
    assert_eq!((page.get("backups_total"), page.get("backups_failed_total")), (1, 2));
    client.ask("server.backup", json!({"name": "y"})).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_backup_runs_at_a_time_and_writes_go_on() {
    let site = Site::open().await;
    let (mut first, mut second) = (Client::connect(&site.server).await, Client::connect(&site.server).await);
    insert(&mut first, "before").await;
    site.disk.hold(&site.backups());
    let held = first.send("server.backup", json!({"name": "held"})).await;
    wait_until_async("the backup has begun", PATIENCE, async || site.backups().join("held").is_dir()).await;
    let (code, error) = second.fail("server.backup", json!({"name": "other"})).await;
    assert_eq!(code, "CONFLICT", "{error}");
    for _ in 0..10 {
        insert(&mut second, "during").await;
    }
    assert_eq!(second.ask("store.count", json!({"bucket": "notes"})).await, 11);
    site.disk.release();
    assert_eq!(first.reply(held).await["data"]["name"], "held");
    assert_eq!(site.restored("held").0, ["before"], "it has what there was when it began");
    second.ask("server.backup", json!({"name": "other"})).await;
    assert_eq!(site.restored("other").0.len(), 11);
    assert_eq!(Page::of(&site.server).await.get("backups_total"), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backup_that_fails_is_counted_and_another_can_be_made() {
    let site = Site::open().await;
    let mut client = Client::connect(&site.server).await;
    site.disk.set_full(true);
    let (code, error) = client.fail("server.backup", json!({"name": "full"})).await;
    assert_eq!((code.as_str(), &error["message"]), ("INTERNAL_ERROR", &json!("Internal server error")));
    site.disk.set_full(false);
    client.ask("server.backup", json!({"name": "next"})).await;
    site.disk.panic_once();
    assert_eq!(client.fail("server.backup", json!({"name": "panic"})).await.0, "INTERNAL_ERROR");
    client.ask("server.backup", json!({"name": "last"})).await;
    let page = Page::of(&site.server).await;
    assert_eq!((page.get("backups_total"), page.get("backups_failed_total")), (2, 2));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backup_goes_on_when_its_client_has_left() {
    let site = Site::open().await;
    let client = site.server.client(None);
    client.insert::<Json>("notes", json!({"text": "kept"})).await.unwrap();
    site.disk.hold(&site.backups());
    let request = tokio::spawn(async move { client.request::<Json>("server.backup", json!({"name": "left"})).await });
    wait_until_async("the backup has begun", PATIENCE, async || site.backups().join("left").is_dir()).await;
    request.abort();
    assert!(request.await.unwrap_err().is_cancelled());
    let mut other = site.server.client(None);
    assert_eq!(other.fail("server.backup", json!({})).await.0, "CONFLICT");
    site.disk.release();
    let server = &site.server;
    wait_until_async("it is made", PATIENCE, async || Page::of(server).await.get("backups_total") == 1).await;
    assert_eq!(Page::of(server).await.requests("server.backup", "abandoned"), 1);
    assert_eq!(site.restored("left").0, ["kept"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn only_a_server_with_a_directory_and_a_durable_store_makes_backups() {
    let server = serve(options()).await;
    let mut client = Client::connect(&server).await;
    let (code, error) = client.fail("server.backup", json!({"name": "x"})).await;
    assert_eq!(code, "UNKNOWN_OPERATION");
    assert!(error["message"].as_str().unwrap().contains("backupDir"), "{error}");
    // A store in memory keeps nothing that could be copied.
    let dir = tempfile::tempdir().unwrap();
    let options = options().backup_dir(dir.path().join("backups"));
    let server = serve(options).await;
    let mut client = Client::connect(&server).await;
    assert_eq!(client.fail("server.backup", json!({"name": "x"})).await.0, "VALIDATION_ERROR");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing was created");
    assert_eq!(Page::of(&server).await.get("backups_failed_total"), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backup_needs_the_admin_tier() {
    let site = Site::open_with(options().auth(Auth::new(Tokens))).await;
    let mut client = Client::connect(&site.server).await;
    assert_eq!(client.fail("server.backup", json!({"name": "x"})).await.0, "UNAUTHORIZED");
    for token in ["rea:reader", "will:writer"] {
        client.ask("auth.login", json!({"token": token})).await;
        assert_eq!(client.fail("server.backup", json!({"name": "x"})).await.0, "FORBIDDEN", "{token}");
        assert_eq!(client.fail("server.backup", json!({"name": "../x"})).await.0, "FORBIDDEN", "{token}");
    }
    assert_eq!(site.names(), [""; 0]);
    client.ask("auth.login", json!({"token": "mara:admin"})).await;
    client.ask("server.backup", json!({"name": "x"})).await;
    let mut local = site.server.client(tidewire::auth::Session::new("mara", ["admin"]));
    assert_eq!(local.ask("server.backup", json!({"name": "local"})).await["name"], "local");
    let mut reader = site.server.client(tidewire::auth::Session::new("rea", ["reader"]));
    assert_eq!(reader.fail("server.backup", json!({"name": "y"})).await.0, "FORBIDDEN");
    assert_eq!(site.names(), ["local", "x"]);
}
