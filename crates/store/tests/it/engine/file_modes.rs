//! The modes of created files and directories, on the real disk with umask 0.

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::json;
use tidewire_store::engine::{Embedded, EmbeddedOptions};
use tidewire_store::{Store, StoreOptions};
use tidewire_testkit::{Process, is_rerun, rerun, wait_until};

const TEST: &str = "engine::file_modes::created_files_are_private_to_the_user";
const DIR: &str = "TIDEWIRE_STORE_MODES_DIR";

/// Creates all kinds of files and directories: a data directory with parents, segments, snapshots, a backup and a restored copy.
fn create(root: &Path) {
    let options = StoreOptions::default().embedded(
        EmbeddedOptions::default().segment_bytes(64 * 1024).checkpoint_log_bytes(96 * 1024).max_group_bytes(32 * 1024),
    );
    let (store, _) = Store::open(root.join("parent/data"), options).unwrap();
    store.define_bucket("b", json!({"key": "id", "schema": {"id": {"type": "number"}}})).wait().unwrap();
    for id in 0..100 {
        let record = json!({"id": id, "text": "x".repeat(1000)});
        store.insert("b", record).wait().unwrap();
    }
    // The writer may also run a checkpoint.
    wait_until("a checkpoint", Duration::from_secs(30), || store.checkpoint().is_ok());
    store.backup(&root.join("backups/one")).unwrap();
    store.close().unwrap();
    Embedded::restore(&root.join("backups/one"), &root.join("copies/one"), EmbeddedOptions::default()).unwrap();
}

/// Collects the modes of all files and directories below a directory.
fn modes(dir: &Path, found: &mut BTreeSet<(String, u32)>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let mode = path.metadata().unwrap().permissions().mode() & 0o777;
        let name = path.file_name().unwrap().to_str().unwrap();
        let kind = name.split_once('-').map_or(name, |(kind, _)| kind).to_owned();
        found.insert((kind, mode));
        if path.is_dir() {
            modes(&path, found);
        }
    }
}

#[test]
fn created_files_are_private_to_the_user() {
    if is_rerun() {
        return create(Path::new(&std::env::var_os(DIR).unwrap()));
    }
    let root = tempfile::tempdir().unwrap();
    // The umask belongs to the process, so the test runs in a child process.
    let again = rerun(TEST);
    let mut command = Command::new("sh");
    command.args(["-c", "umask 000 && exec \"$0\" \"$@\""]).arg(again.get_program()).args(again.get_args());
    command.envs(again.get_envs().filter_map(|(name, value)| Some((name, value?)))).env(DIR, root.path());
    let mut process = Process::spawn(command);
    assert!(process.wait().success(), "{}", process.output());

    let mut found = BTreeSet::new();
    modes(root.path(), &mut found);
    let found: Vec<(&str, u32)> = found.iter().map(|(kind, mode)| (&**kind, *mode)).collect();
    assert_eq!(
        found,
        [
            ("backups", 0o700),
            ("copies", 0o700),
            ("data", 0o700),
            ("lock", 0o600),
            ("log", 0o600),
            ("one", 0o700),
            ("parent", 0o700),
            ("snapshot", 0o600),
        ]
    );
}

#[test]
fn existing_files_keep_their_mode() {
    let root = tempfile::tempdir().unwrap();
    let (dir, lock) = (root.path().join("data"), root.path().join("data/lock"));
    let set = |path: &Path, mode| std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
    std::fs::create_dir(&dir).unwrap();
    std::fs::write(&lock, "").unwrap();
    set(&dir, 0o755);
    set(&lock, 0o640);
    Store::open(&dir, StoreOptions::default()).unwrap().0.close().unwrap();
    assert_eq!((mode(&dir), mode(&lock)), (0o755, 0o640));
}
