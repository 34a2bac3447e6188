//! Checks that docs/reference/configuration.md and docs/reference/limits.md agree with the program.

use clap::CommandFactory;
use serde_json::json;
use tidewire_store::{Store, StoreOptions};

use super::*;
use crate::config::cli::CommandLine;
use crate::config::{apply, auth, login, permissions, settings};

fn manual() -> String {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference");
    ["configuration.md", "limits.md"].map(|page| std::fs::read_to_string(folder.join(page)).unwrap()).concat()
}

fn blocks(manual: &str, language: &str) -> Vec<String> {
    let begin = format!("```{language}\n");
    let blocks = manual.split(&begin).skip(1);
    blocks.map(|block| block.split("```").next().unwrap().to_owned()).collect()
}

#[test]
fn example_files_are_valid_and_equivalent() {
    let fixture = Fixture::new().variable("BOOK_SECRET", "a secret of more than thirty-two bytes");
    let manual = manual();
    let (jsons, tomls) = (blocks(&manual, "json"), blocks(&manual, "toml"));
    assert_eq!((jsons.len(), tomls.len()), (2, 1));
    let load = |name: &str, text: &str| {
        let file = fixture.file(name, text);
        fixture.load(&["--config", &file]).unwrap_or_else(|errors| panic!("{errors}"))
    };
    let (mut json, mut toml) = (load("c.json", &jsons[0]), load("c.toml", &tomls[0]));
    assert!(load("d.json", &jsons[1]).server.auth.is_some());
    for config in [&mut json, &mut toml] {
        assert_eq!(config.warnings, Vec::<String>::new());
        let auth = config.server.auth.as_ref().unwrap();
        // The second token is given by its SHA-256.
        let tokens =
            ["3f1d9a64c07be25881e6a7f04b9c2d53", "b5fe4939c63c5d3b6448d43de6ec08b4689d89155fb35a6910fcd5f831362b87"];
        let users = tokens.map(|token| session(auth, token, 0).unwrap().user_id);
        assert_eq!(users, ["ann", "bob"]);
        let store = Store::memory(StoreOptions::default());
        assert_eq!(apply(&store, &config.buckets, &config.queries).unwrap().len(), 2);
        for definition in config.buckets.iter_mut().chain(&mut config.queries) {
            assert!(definition.location.take().is_some());
        }
    }
    // The order of keys matters only in a sort.
    let first = |config: &Config| config.queries[0].config["sort"].to_string();
    assert_eq!(first(&json), first(&toml));
    assert_eq!((&json.buckets, &json.queries), (&toml.buckets, &toml.queries));
    let rest = |config: Config| format!("{:?} {:?}", config.server, config.engine);
    assert_eq!(rest(json), rest(toml));
}

#[test]
fn every_key_and_flag_is_documented() {
    let manual = manual();
    let keys =
        [settings::KEYS, auth::KEYS, auth::TOKEN_KEYS, auth::JWT_KEYS, permissions::KEYS, permissions::RULE_KEYS]
            .concat();
    for key in keys {
        // A section is documented if one of its keys is: `tls.cert`.
        let is_documented = ["`", "\"", "`auth."].iter().any(|before| manual.contains(&format!("{before}{key}")));
        assert!(is_documented, "{key}");
    }
    let nested = [
        ("tls", settings::TLS_KEYS),
        ("rateLimit", settings::RATE_LIMIT_KEYS),
        ("heartbeat", settings::HEARTBEAT_KEYS),
        ("backpressure", settings::BACKPRESSURE_KEYS),
        ("memory", settings::MEMORY_KEYS),
        ("connectionLimits", settings::CONNECTION_LIMIT_KEYS),
        ("auth.loginRateLimit", login::RATE_LIMIT_KEYS),
        ("auth.beforeLogin", login::BEFORE_LOGIN_KEYS),
    ];
    for (section, keys) in nested {
        for key in keys {
            assert!(manual.contains(&format!("`{section}.{key}`")), "{section}.{key}");
        }
    }
    for flag in CommandLine::command().get_arguments().filter_map(clap::Arg::get_long) {
        assert!(matches!(flag, "help" | "version") || manual.contains(&format!("`--{flag}`")), "--{flag}");
    }
}

#[test]
fn documented_defaults_are_the_defaults() {
    let fixture = Fixture::new();
    let defaults = format!("{:?}", fixture.load(&[]).unwrap());
    // Without a token auth is off, and its settings have no effect.
    let with_token = |mut file: Json| {
        file["auth"]["tokens"] = json!({"0f1e2d3c4b5a69788796a5b4c3d2e1f0": {"userId": "u"}});
        // Avoids warnings, whose columns would differ.
        file["auth"]["permissions"] = json!({"default": "deny"});
        format!("{:?}", fixture.config(&file))
    };
    let defaults_of_auth = with_token(json!({}));
    let manual = manual();
    let mut count = 0;
    for row in manual.lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        // The tables of nested objects have fewer columns.
        if cells.len() != 6 {
            continue;
        }
        let (key, default) = (cells[1].trim_matches('`'), cells[3]);
        let Some(default) = default.strip_prefix('`').and_then(|default| default.strip_suffix('`')) else { continue };
        let default: Json = serde_json::from_str(default).unwrap();
        let file = key.rsplit('.').fold(default, |value, key| json!({ key: value }));
        if key.starts_with("auth.") {
            assert_eq!(with_token(file), defaults_of_auth, "{row}");
        } else {
            assert_eq!(format!("{:?}", fixture.config(&file)), defaults, "{row}");
        }
        count += 1;
    }
    assert!(count >= 20, "only {count} documented defaults were checked");
}
