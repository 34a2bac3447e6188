//! The commands `backup` and `restore`.

use serde_json::{Value as Json, json};

use super::{ServerProcess, WorkDir};
use crate::client::notes_config;

/// Writes a bucket with one note.
async fn write_note(server: &ServerProcess, text: &str) {
    let mut client = server.client().await;
    client.call("store.defineBucket", json!({"name": "notes", "config": notes_config()})).await;
    client.call("store.insert", json!({"bucket": "notes", "data": {"text": text}})).await;
}

/// Returns the notes and the epoch of a server.
async fn contents(server: &ServerProcess) -> (Vec<String>, String) {
    let mut client = server.client().await;
    let notes = client.call("store.all", json!({"bucket": "notes"})).await;
    let text = |note: &Json| note["text"].as_str().unwrap().to_owned();
    let opened = server.process.stderr();
    let opened: Json = serde_json::from_str(opened.lines().next().unwrap()).unwrap();
    assert_eq!(opened["message"], "data directory opened");
    let epoch = opened["position"].as_str().unwrap().split('-').next().unwrap().to_owned();
    (notes.as_array().unwrap().iter().map(text).collect(), epoch)
}

#[tokio::test(flavor = "multi_thread")]
async fn backup_of_a_killed_server_is_restored_with_a_new_epoch() {
    let dir = WorkDir::new();
    let mut server = dir.start(&["--data-dir", "live"]);
    write_note(&server, "high tide").await;
    server.process.kill();

    let backup = dir.run(&["backup", "copy", "--data-dir", "live"]);
    assert_eq!((backup.code, &*backup.stderr), (Some(0), ""));
    let lines: Vec<&str> = backup.stdout.lines().collect();
    let [first, bytes, position, last] = lines[..] else { panic!("{}", backup.stdout) };
    assert_eq!(first, "Backed up live to copy");
    assert!(bytes.strip_prefix("  bytes:    ").unwrap().parse::<u64>().unwrap() > 0, "{bytes}");
    // The bucket is the first commit, the note is the second.
    assert!(position.starts_with("  position: ") && position.ends_with("-2"), "{position}");
    assert_eq!(last, "To restore it, run: tidewire restore copy --data-dir DIR");

    // The original server continues, and the backup does not change.
    let server = dir.start(&["--data-dir", "live"]);
    let (_, epoch) = contents(&server).await;
    assert!(position.contains(&epoch), "{position} {epoch}");
    let mut client = server.client().await;
    client.call("store.insert", json!({"bucket": "notes", "data": {"text": "low tide"}})).await;
    drop(client);
    server.stop();

    for target in ["one", "two"] {
        let restore = dir.run(&["restore", "copy", "--data-dir", target]);
        assert_eq!((restore.code, &*restore.stderr), (Some(0), ""));
        let lines: Vec<&str> = restore.stdout.lines().collect();
        let [first, records, _, position, last] = lines[..] else { panic!("{}", restore.stdout) };
        assert_eq!(first, format!("Restored copy to {target}"));
        assert_eq!(records, "  records:  1 in 1 bucket");
        assert_eq!(last, format!("To start the server, run: tidewire --data-dir {target}"));
        let server = dir.start(&["--data-dir", target]);
        let (notes, restored_epoch) = contents(&server).await;
        assert_eq!(notes, ["high tide"]);
        assert_ne!(restored_epoch, epoch);
        assert!(position.contains(&restored_epoch), "{position} {restored_epoch}");
        server.stop();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn data_directory_in_use_is_rejected() {
    let dir = WorkDir::new();
    let server = dir.start(&[]);
    write_note(&server, "high tide").await;

    let backup = dir.run(&["backup", "copy"]);
    assert_eq!((backup.code, &*backup.stdout), (Some(1), ""));
    let message = "tidewire: the data directory ./data is in use by a running server; stop the server, or use the \
                   operation `server.backup` to back it up while it is running";
    assert_eq!(backup.stderr, message);
    assert!(!dir.has("copy"));

    let restore = dir.run(&["restore", "data", "--data-dir", "other"]);
    assert_eq!((restore.code, &*restore.stdout), (Some(1), ""));
    assert!(restore.stderr.contains("data is in use by a running server"), "{}", restore.stderr);

    let restore = dir.run(&["restore", "data"]);
    assert_eq!((restore.code, &*restore.stdout), (Some(1), ""));
    let message =
        "tidewire: the data directory ./data is not empty; move it away, or specify another one with --data-dir";
    assert_eq!(restore.stderr, message);
    assert_eq!(contents(&server).await.0, ["high tide"]);
    server.stop();
}

#[test]
fn invalid_directories_are_rejected() {
    let dir = WorkDir::new();
    dir.start(&[]).stop();
    std::fs::create_dir(dir.0.path().join("full")).unwrap();
    dir.file("full/notes.txt", "not ours");
    for (args, message) in [
        (
            &["backup", "copy", "--data-dir", "no"][..],
            "tidewire: cannot read the data directory no: No such file or directory (os error 2)",
        ),
        (
            &["backup", "copy", "--data-dir", "full"],
            "tidewire: full is not a data directory; set it with --data-dir or --config",
        ),
        (&["backup", "full"], "tidewire: full is not empty; specify a new or empty directory"),
        (
            &["backup", "data/copy"],
            "tidewire: data/copy is inside the data directory ./data; specify another directory",
        ),
        (&["restore", "no"], "tidewire: cannot read the backup no: No such file or directory (os error 2)"),
        (&["restore", "full", "--data-dir", "new"], "tidewire: full is not a backup"),
        (
            &["restore", "data", "--data-dir", "full"],
            "tidewire: the data directory full is not empty; move it away, or specify another one with --data-dir",
        ),
    ] {
        let exit = dir.run(args);
        assert_eq!((exit.code, &*exit.stderr, &*exit.stdout), (Some(1), message, ""), "{args:?}");
    }
    assert!(!dir.has("copy") && !dir.has("new") && !dir.has("data/copy"));
    assert_eq!(std::fs::read_dir(dir.0.path().join("full")).unwrap().count(), 1);
    for args in [&["backup"][..], &["restore"], &["backup", "copy", "--port", "1"]] {
        let exit = dir.run(args);
        assert_eq!((exit.code, &*exit.stdout), (Some(2), ""), "{args:?}");
        assert!(exit.stderr.contains("Usage: tidewire"), "{}", exit.stderr);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn damaged_or_unfinished_backup_is_rejected() {
    let dir = WorkDir::new();
    let server = dir.start(&[]);
    write_note(&server, "high tide").await;
    server.stop();
    assert_eq!(dir.run(&["backup", "copy"]).code, Some(0));

    let mark = dir.0.path().join("copy/backup.unfinished");
    std::fs::write(&mark, "").unwrap();
    let restore = dir.run(&["restore", "copy", "--data-dir", "new"]);
    assert_eq!((restore.code, &*restore.stdout), (Some(1), ""));
    assert!(restore.stderr.starts_with("tidewire: cannot restore copy: "), "{}", restore.stderr);
    assert!(!dir.has("new"));
    std::fs::remove_file(mark).unwrap();

    let files = std::fs::read_dir(dir.0.path().join("copy")).unwrap().map(|entry| entry.unwrap().path());
    let logs: Vec<_> = files.filter(|path| path.file_name().unwrap().to_string_lossy().starts_with("log-")).collect();
    let mut bytes = std::fs::read(&logs[0]).unwrap();
    // Inside the first frame, which follows the header page. Later frames were written after it was durable.
    bytes[4096 + 40] ^= 0xff;
    std::fs::write(&logs[0], bytes).unwrap();
    let restore = dir.run(&["restore", "copy", "--data-dir", "new"]);
    assert_eq!((restore.code, &*restore.stdout), (Some(1), ""));
    assert!(restore.stderr.starts_with("tidewire: cannot restore copy: "), "{}", restore.stderr);
    assert!(!dir.has("new"), "the backup is checked before anything is copied");
}
