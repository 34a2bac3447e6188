//! Access of clients, as `--check` lists it and `check-access` explains it.

use serde_json::{Value as Json, json};

use super::{WorkDir, warnings};

fn file(dir: &WorkDir, auth: &Json) {
    dir.file("c.json", json!({"engine": "memory", "auth": auth}).to_string());
}

fn boats() -> Json {
    json!({
        "tokens": {
            "77ab03d9c1e2485f9a0b1c2d3e4f5061": {"userId": "ann", "roles": ["member"]},
            "1f0c8a5277ab03d9c1e2485f9a0b1c2d": {"userId": "ada", "roles": ["admin"]},
        },
        "permissions": {"default": "deny", "rules": [
            {"role": "member", "allow": "store.*", "buckets": ["boats"], "where": {"owner": "{{ session.userId }}"}},
            {"role": "member", "allow": ["store.get", "store.query"], "buckets": ["ports"]},
            {"role": "admin", "allow": "*"},
        ]},
    })
}

#[test]
fn check_lists_the_access_of_clients() {
    let dir = WorkDir::new();
    file(&dir, &boats());
    let check = dir.run(&["--config", "c.json", "--check"]);
    assert_eq!((check.code, &*check.stderr), (Some(0), ""));
    let own = r#"boats where {"owner":"{{ session.userId }}"}"#;
    let expected = format!(
        "the configuration is valid\n\n\
         Access of clients (`tidewire check-access` explains each decision):\n\n\
         clients without a login (not logged in)\n  \
           read   nothing\n  \
           write  nothing\n  \
           admin  nothing\n\n\
         a session without roles (tier write, auth.defaultTier)\n  \
           read   nothing\n  \
           write  nothing\n  \
           admin  nothing\n\n\
         role \"member\" (tier write, auth.defaultTier)\n  \
           read   store.get, store.query: {own}; ports\n  \
           read   all operations except store.get, store.query, store.buckets, store.stats: {own}\n  \
           write  all operations: {own}\n  \
           admin  store.getBucketSchema, store.defineQuery: {own}\n\n\
         role \"admin\" (tier admin, role admin)\n  \
           read   everything\n  \
           write  everything\n  \
           admin  everything"
    );
    assert_eq!(check.stdout, expected);
}

#[test]
fn start_and_check_warn_of_open_access() {
    let dir = WorkDir::new();
    file(&dir, &json!({"required": false, "tokens": {"77ab03d9c1e2485f9a0b1c2d3e4f5061": {"userId": "ann"}}}));
    let check = dir.run(&["--config", "c.json", "--check"]);
    assert_eq!(check.code, Some(0));
    let expected: Vec<String> =
        check.stderr.lines().map(|line| line.strip_prefix("warning: ").unwrap().to_owned()).collect();
    assert!(expected.iter().any(|line| line.contains("no `permissions` are set")), "{expected:?}");
    assert!(expected.iter().any(|line| line.contains("set `auth.anonymousTier`")), "{expected:?}");
    assert_eq!(warnings(&dir.start(&["--config", "c.json"]).stop()), expected);
    assert!(check.stdout.contains("clients without a login (auth.anonymousTier is not set)"), "{}", check.stdout);
}

#[test]
fn permissions_without_a_default_are_rejected() {
    let dir = WorkDir::new();
    file(&dir, &json!({"tokens": {}, "permissions": {"rules": []}}));
    let exit = dir.run(&["--config", "c.json"]);
    assert_eq!(exit.code, Some(2));
    assert!(exit.stderr.contains("`auth.permissions`: the key `default` is missing"), "{}", exit.stderr);
}

#[test]
fn check_access_explains_the_decision_and_sets_the_exit_code() {
    let dir = WorkDir::new();
    file(&dir, &boats());
    let check = |args: &[&str]| dir.run(&[&["check-access", "--config", "c.json"], args].concat());
    let own = check(&["--role", "member", "--user", "ann", "store.insert", "boats"]);
    assert_eq!((own.code, &*own.stderr), (Some(0), ""));
    let rule = r#"{"role":"member","allow":["store.*"],"buckets":["boats"],"where":{"owner":"{{ session.userId }}"}}"#;
    let expected = format!(
        "store.insert on \"boats\": allowed\n  \
           reason:  rule 0 (role \"member\") allows it, on the rows that match the row filter\n  \
           tier:    write required, has write (auth.defaultTier)\n  \
           rule 0   {rule}\n  \
           rows:    {{\"owner\":\"ann\"}}"
    );
    assert_eq!(own.stdout, expected);
    let other = check(&["--role", "member", "store.insert", "ports"]);
    assert_eq!((other.code, &*other.stderr), (Some(1), ""));
    assert!(other.stdout.starts_with("store.insert on \"ports\": not allowed\n"), "{}", other.stdout);
    assert!(other.stdout.contains("its rules name the buckets boats"), "{}", other.stdout);
    for (args, code, text) in [
        // An anonymous client, a session without roles, and one with several.
        (&["store.get", "boats"][..], 1, "a login is required"),
        (&["--user", "eve", "store.get", "boats"], 1, "no rule of the session's roles covers store.get on \"boats\""),
        (
            &["--role", "member", "--role", "admin", "store.dropBucket", "boats"],
            0,
            "the rules 0 (role \"member\"), 2 (role",
        ),
        (&["--role", "admin", "server.stats"], 0, "rule 2 (role \"admin\") allows it"),
        (
            &["--role", "member", "--metadata", "{\"a\":1}", "store.get", "ports"],
            0,
            "rule 1 (role \"member\") allows it, on all",
        ),
    ] {
        let exit = check(args);
        assert_eq!((exit.code, &*exit.stderr), (Some(code), ""), "{args:?}");
        assert!(exit.stdout.contains(text), "{args:?}: {}", exit.stdout);
    }
    for (args, text) in [
        (&["store.gett"][..], "error: unknown operation \"store.gett\"; did you mean \"store.get\"?"),
        (&["--metadata", "7", "store.get"], "expected a JSON object"),
        (&[], "required arguments were not provided"),
        (&["--config", "none.json", "store.get"], "cannot be used multiple times"),
    ] {
        let exit = check(args);
        assert_eq!((exit.code, &*exit.stdout), (Some(2), ""), "{args:?}");
        assert!(exit.stderr.contains(text), "{args:?}: {}", exit.stderr);
    }
    dir.file("bad.json", "{\"port\": -1}");
    assert_eq!(dir.run(&["check-access", "--config", "bad.json", "store.get"]).code, Some(2));
    assert_eq!(dir.run(&["check-access", "store.get", "b"]).code, Some(0), "auth is off");
}
