//! Who wins, and what the defaults are.

use std::time::Duration;

use serde_json::json;
use tidewire_store::Durability;

use super::*;
use crate::config::Engine;
use crate::{RateLimit, ServerOptions};

#[test]
fn without_anything_there_are_defaults() {
    let config = World::new().load(&[]).unwrap();
    assert_eq!(format!("{:?}", config.server), format!("{:?}", ServerOptions::default()));
    assert_eq!(config.engine, Engine::Embedded { dir: "./data".into(), durability: Durability::Always });
    assert_eq!(config.shutdown_grace, Duration::from_secs(5));
    assert_eq!((config.buckets, config.queries), (vec![], vec![]));
    assert_eq!((config.warnings, config.check), (vec![], false));
}

#[test]
fn null_means_the_default_and_comments_mean_nothing() {
    let world = World::new();
    let nothing = world.load(&[]).unwrap();
    let mut root: serde_json::Map<String, Json> =
        crate::config::settings::KEYS.iter().map(|key| ((*key).to_owned(), Json::Null)).collect();
    root.insert("comment".to_owned(), json!("all of it"));
    root.insert("heartbeat".to_owned(), json!({"intervalMs": null, "comment": {"any": "thing"}}));
    root.insert("auth".to_owned(), json!({"tokens": null, "jwt": null, "required": null, "comment": 1}));
    root.insert("buckets".to_owned(), json!({"comment": "there are none", "gone": null}));
    assert_eq!(format!("{:?}", world.config(&Json::Object(root))), format!("{nothing:?}"));
}

#[test]
fn flags_win_over_the_environment_and_that_over_the_file() {
    let world = World::new()
        .variable("TIDEWIRE_PORT", "2")
        .variable("TIDEWIRE_NAME", "environment")
        .variable("TIDEWIRE_NO_ERROR_DETAILS", "off")
        .variable("TIDEWIRE_PATH", "");
    let text = r#"{"port": 1, "name": "file", "host": "::1", "exposeErrorDetails": false, "path": "/file"}"#;
    let file = world.file("c.json", text);
    let config = world.load(&["-c", &file, "-p", "3"]).unwrap();
    let server = &config.server;
    assert_eq!((server.port, &*server.name, &*server.host), (3, "environment", "::1"));
    assert!(server.expose_error_details);
    assert_eq!(server.path, "/file", "an empty variable says nothing");
    assert!(!world.load(&["-c", &file, "--no-error-details"]).unwrap().server.expose_error_details);
}

#[test]
fn the_file_of_the_flag_wins_over_that_of_the_environment() {
    let world = World::new();
    let (one, two) = (world.file("one.json", r#"{"port": 1}"#), world.file("two.json", r#"{"port": 2}"#));
    let world = world.variable("TIDEWIRE_CONFIG", one);
    assert_eq!(world.load(&[]).unwrap().server.port, 1);
    assert_eq!(world.load(&["-c", &two]).unwrap().server.port, 2);
}

#[test]
fn serving_is_what_is_done_without_a_command() {
    let world = World::new();
    for args in [&["--port", "1"][..], &["serve", "--port", "1"], &["-p1"], &["serve", "-p=1"]] {
        assert_eq!(world.load(args).unwrap().server.port, 1, "{args:?}");
    }
}

#[test]
fn every_flag_has_a_variable() {
    let flags = |world: &World, args: &[&str]| format!("{:?}", world.load(args).unwrap());
    let dir = World::new();
    let pem = tidewire_testkit::Certificates::generate(dir.dir.path());
    for (flag, variable, value) in [
        ("--name", "TIDEWIRE_NAME", "n"),
        ("--grace", "TIDEWIRE_GRACE", "0"),
        ("--port", "TIDEWIRE_PORT", "0"),
        ("--host", "TIDEWIRE_HOST", "localhost"),
        ("--path", "TIDEWIRE_PATH", "/ws"),
        ("--engine", "TIDEWIRE_ENGINE", "memory"),
        ("--data-dir", "TIDEWIRE_DATA_DIR", "/var/x"),
        ("--durability", "TIDEWIRE_DURABILITY", "interval:20"),
        ("--allowed-origins", "TIDEWIRE_ALLOWED_ORIGINS", "https://a.example, null"),
        ("--max-connections-per-ip", "TIDEWIRE_MAX_CONNECTIONS_PER_IP", "7"),
    ] {
        let plain = World::new();
        let by_flag = flags(&plain, &[flag, value]);
        assert_ne!(by_flag, flags(&plain, &[]), "{flag}");
        assert_eq!(by_flag, flags(&World::new().variable(variable, value), &[]), "{flag}");
    }
    for (flag, variable) in [("--no-error-details", "TIDEWIRE_NO_ERROR_DETAILS"), ("--check", "TIDEWIRE_CHECK")] {
        let by_flag = flags(&World::new(), &[flag]);
        assert_ne!(by_flag, flags(&World::new(), &[]), "{flag}");
        assert_eq!(by_flag, flags(&World::new().variable(variable, "Yes"), &[]), "{flag}");
        assert_eq!(flags(&World::new(), &[]), flags(&World::new().variable(variable, "0"), &[]), "{flag}");
    }
    // These show where they came from.
    for (flag, variable) in [("--audit", "TIDEWIRE_AUDIT"), ("--admin-secret=s", "TIDEWIRE_ADMIN_SECRET")] {
        let name = flag.split('=').next().unwrap();
        let by_flag = World::new().load(&[flag]).unwrap().warnings;
        let by_variable = World::new().variable(variable, "1").load(&[]).unwrap().warnings;
        assert_eq!(by_flag.len(), 1, "{flag}");
        assert_eq!(by_flag[0].replace(name, variable), by_variable[0]);
    }
    let tls = World::new().variable("TIDEWIRE_TLS_CERT", &pem.server);
    let tls = tls.load(&["--tls-key", pem.server_key.to_str().unwrap()]).unwrap();
    assert!(tls.server.tls.is_some());
    let world = World::new();
    let file = world.file("c.toml", "rules = true\nport = 5");
    let config = world.variable("TIDEWIRE_CONFIG", file).variable("TIDEWIRE_NO_RULES", "1").load(&[]).unwrap();
    assert_eq!((config.server.port, config.warnings), (5, vec![]));
}

#[test]
fn all_keys_of_the_file_arrive() {
    let world = World::new();
    let pem = tidewire_testkit::Certificates::generate(world.dir.path());
    let bucket = json!({"key": "id", "schema": {"id": {"type": "string"}}});
    let config = world.config(&json!({
        "port": 1, "host": "[::1]", "name": "n", "path": "/p", "engine": "embedded", "dataDir": "d",
        "durability": "none", "exposeErrorDetails": false, "allowedOrigins": ["http://localhost:3000"],
        "maxConnectionsPerIp": 2, "tls": {"cert": pem.server, "key": pem.server_key}, "shutdownGraceMs": 3, "maxPayloadBytes": 4,
        "rateLimit": {"maxRequests": 5, "windowMs": 6}, "heartbeat": {"intervalMs": 7, "timeoutMs": 8.0},
        "backpressure": {"maxBufferedBytes": 9, "highWaterMark": 1},
        "connectionLimits": {"maxSubscriptionsPerConnection": 10, "maxTotalSubscriptions": 11}, "maxConnections": 12,
        "maxResultBytes": 13, "handshakeTimeoutMs": 14, "requestTimeoutMs": 15, "revocationTtlMs": 16,
        "buckets": {"b": bucket, "comment": bucket}, "queries": {"q": {"bucket": "b", "comment": "all"}},
        "rules": false, "audit": false, "rulesPreload": [], "procedures": {},
    }));
    let ms = Duration::from_millis;
    let server = &config.server;
    assert_eq!((server.port, &*server.host, &*server.name, &*server.path), (1, "::1", "n", "/p"));
    assert_eq!(config.engine, Engine::Embedded { dir: "d".into(), durability: Durability::None });
    assert!(!server.expose_error_details);
    assert_eq!(server.allowed_origins.as_deref(), Some(&["http://localhost:3000".to_owned()][..]));
    assert_eq!((server.max_connections_per_ip, server.max_payload_bytes), (Some(2), 4));
    assert_eq!(server.tls.as_ref().map(|tls| (&tls.certificate, &tls.key)), Some((&pem.server, &pem.server_key)));
    assert_eq!((config.shutdown_grace, server.rate_limit), (ms(3), Some(RateLimit::new(5, ms(6)))));
    assert_eq!((server.heartbeat.interval, server.heartbeat.timeout), (ms(7), ms(8)));
    assert_eq!(format!("{:?}", server.backpressure), "Backpressure { max_buffered_bytes: 9, high_water_mark: 1.0 }");
    assert_eq!(server.connection_limits.max_subscriptions_per_connection, 10);
    assert_eq!(server.connection_limits.max_total_subscriptions, 11);
    assert_eq!((server.max_connections, server.max_result_bytes), (12, 13));
    assert_eq!((server.handshake_timeout, server.request_timeout, server.revocation_ttl), (ms(14), ms(15), ms(16)));
    let named = |definitions: &[crate::config::Definition]| -> Vec<String> {
        definitions.iter().map(|definition| format!("{} {}", definition.name, definition.config)).collect()
    };
    assert_eq!(named(&config.buckets), [format!("b {bucket}"), format!("comment {bucket}")]);
    assert_eq!(named(&config.queries), ["q {\"bucket\":\"b\"}"]);
    assert_eq!(config.warnings, Vec::<String>::new());
}

#[test]
fn help_says_what_there_is() {
    let world = World::new();
    for args in [&["--help"][..], &["serve", "--help"], &["-h"]] {
        let asked = world.load(args).unwrap_err();
        assert_eq!(asked.exit_code(), 0);
        let help = asked.to_string();
        for text in
            ["Listening:", "Data:", "Access:", "[default: 8080]", "[default: ./data]", "Examples:", "TIDEWIRE_DATA_DIR"]
        {
            assert!(help.contains(text), "{text} is not in\n{help}");
        }
    }
    let version = world.load(&["--version"]).unwrap_err();
    assert_eq!((version.to_string(), version.exit_code()), (format!("tidewire {}", env!("CARGO_PKG_VERSION")), 0));
}
