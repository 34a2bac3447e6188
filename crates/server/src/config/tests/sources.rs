//! Precedence of the sources, and default values.

use std::path::Path;
use std::time::Duration;

use serde_json::json;
use tidewire_store::engine::Durability;

use super::*;
use crate::config::Engine;
use crate::{RateLimit, ServerOptions};

#[test]
fn without_settings_the_defaults_apply() {
    let config = Fixture::new().load(&[]).unwrap();
    assert_eq!(format!("{:?}", config.server), format!("{:?}", ServerOptions::default()));
    assert_eq!(config.engine, Engine::Embedded { dir: "./data".into(), durability: Durability::Always });
    assert_eq!((config.shutdown_grace, config.max_record_bytes), (Duration::from_secs(5), 1 << 20));
    assert_eq!((config.buckets, config.queries), (vec![], vec![]));
    assert_eq!(config.warnings, Vec::<String>::new());
    assert!(matches!(Fixture::new().command(&[]), Ok(Command::Serve(_))));
    assert!(matches!(Fixture::new().command(&["--check"]), Ok(Command::Check(_))));
}

#[test]
fn null_means_the_default_and_comments_are_ignored() {
    let fixture = Fixture::new();
    let nothing = fixture.load(&[]).unwrap();
    let mut root: serde_json::Map<String, Json> =
        crate::config::settings::KEYS.iter().map(|key| ((*key).to_owned(), Json::Null)).collect();
    root.insert("comment".to_owned(), json!("all of it"));
    root.insert("heartbeat".to_owned(), json!({"intervalMs": null, "comment": {"any": "thing"}}));
    root.insert("auth".to_owned(), json!({"tokens": null, "jwt": null, "required": null, "comment": 1}));
    root.insert("buckets".to_owned(), json!({"comment": "no buckets", "gone": null}));
    assert_eq!(format!("{:?}", fixture.config(&Json::Object(root))), format!("{nothing:?}"));
}

#[test]
fn flags_override_environment_and_environment_overrides_file() {
    let fixture = Fixture::new()
        .variable("TIDEWIRE_PORT", "2")
        .variable("TIDEWIRE_NAME", "environment")
        .variable("TIDEWIRE_NO_ERROR_DETAILS", "off")
        .variable("TIDEWIRE_PATH", "");
    let text = r#"{"port": 1, "name": "file", "host": "::1", "exposeErrorDetails": false, "path": "/file"}"#;
    let file = fixture.file("c.json", text);
    let config = fixture.load(&["-c", &file, "-p", "3"]).unwrap();
    let server = &config.server;
    assert_eq!((server.port, &*server.name, &*server.host), (3, "environment", "::1"));
    assert!(server.expose_error_details);
    assert_eq!(server.path, "/file", "an empty variable is treated as unset");
    assert!(!fixture.load(&["-c", &file, "--no-error-details"]).unwrap().server.expose_error_details);
}

#[test]
fn config_flag_overrides_config_variable() {
    let fixture = Fixture::new();
    let (one, two) = (fixture.file("one.json", r#"{"port": 1}"#), fixture.file("two.json", r#"{"port": 2}"#));
    let fixture = fixture.variable("TIDEWIRE_CONFIG", one);
    assert_eq!(fixture.load(&[]).unwrap().server.port, 1);
    assert_eq!(fixture.load(&["-c", &two]).unwrap().server.port, 2);
}

#[test]
fn serve_is_the_default_command() {
    let fixture = Fixture::new();
    for args in [&["--port", "1"][..], &["serve", "--port", "1"], &["-p1"], &["serve", "-p=1"]] {
        assert_eq!(fixture.load(args).unwrap().server.port, 1, "{args:?}");
    }
}

#[test]
fn every_flag_has_a_variable() {
    let flags = |fixture: &Fixture, args: &[&str]| format!("{:?}", fixture.command(args).unwrap());
    let dir = Fixture::new();
    let pem = tidewire_testkit::Certificates::generate(dir.dir.path());
    for (flag, variable, value) in [
        ("--name", "TIDEWIRE_NAME", "n"),
        ("--grace", "TIDEWIRE_GRACE", "0"),
        ("--slow-request-ms", "TIDEWIRE_SLOW_REQUEST_MS", "20"),
        ("--port", "TIDEWIRE_PORT", "0"),
        ("--host", "TIDEWIRE_HOST", "localhost"),
        ("--path", "TIDEWIRE_PATH", "/ws"),
        ("--engine", "TIDEWIRE_ENGINE", "memory"),
        ("--data-dir", "TIDEWIRE_DATA_DIR", "/var/x"),
        ("--backup-dir", "TIDEWIRE_BACKUP_DIR", "/var/b"),
        ("--durability", "TIDEWIRE_DURABILITY", "interval:20"),
        ("--max-payload-bytes", "TIDEWIRE_MAX_PAYLOAD_BYTES", "2000000"),
        ("--max-record-bytes", "TIDEWIRE_MAX_RECORD_BYTES", "1000"),
        ("--memory-max-bytes", "TIDEWIRE_MEMORY_MAX_BYTES", "5000000000"),
        ("--memory-max-store-bytes", "TIDEWIRE_MEMORY_MAX_STORE_BYTES", "6000000000"),
        ("--allowed-origins", "TIDEWIRE_ALLOWED_ORIGINS", "https://a.example, null"),
        ("--allowed-hosts", "TIDEWIRE_ALLOWED_HOSTS", "tide.example, ebb.example"),
        ("--trusted-proxies", "TIDEWIRE_TRUSTED_PROXIES", "10.0.0.0/8, ::1"),
        ("--admin-listen", "TIDEWIRE_ADMIN_LISTEN", "[::1]:9090"),
        ("--max-connections", "TIDEWIRE_MAX_CONNECTIONS", "6"),
        ("--max-connections-per-ip", "TIDEWIRE_MAX_CONNECTIONS_PER_IP", "7"),
    ] {
        let plain = Fixture::new();
        let by_flag = flags(&plain, &[flag, value]);
        assert_ne!(by_flag, flags(&plain, &[]), "{flag}");
        assert_eq!(by_flag, flags(&Fixture::new().variable(variable, value), &[]), "{flag}");
    }
    for (flag, variable) in [("--no-error-details", "TIDEWIRE_NO_ERROR_DETAILS"), ("--check", "TIDEWIRE_CHECK")] {
        let by_flag = flags(&Fixture::new(), &[flag]);
        assert_ne!(by_flag, flags(&Fixture::new(), &[]), "{flag}");
        assert_eq!(by_flag, flags(&Fixture::new().variable(variable, "Yes"), &[]), "{flag}");
        assert_eq!(flags(&Fixture::new(), &[]), flags(&Fixture::new().variable(variable, "0"), &[]), "{flag}");
    }
    // Their warnings include the source.
    for (flag, variable) in [("--audit", "TIDEWIRE_AUDIT"), ("--admin-secret=s", "TIDEWIRE_ADMIN_SECRET")] {
        let name = flag.split('=').next().unwrap();
        let by_flag = Fixture::new().load(&[flag]).unwrap().warnings;
        let by_variable = Fixture::new().variable(variable, "1").load(&[]).unwrap().warnings;
        assert_eq!(by_flag.len(), 1, "{flag}");
        assert_eq!(by_flag[0].replace(name, variable), by_variable[0]);
    }
    let tls = Fixture::new().variable("TIDEWIRE_TLS_CERT", &pem.server);
    let tls = tls.load(&["--tls-key", pem.server_key.to_str().unwrap()]).unwrap();
    assert!(tls.server.tls.is_some());
    let fixture = Fixture::new();
    let file = fixture.file("c.toml", "rules = true\nport = 5");
    let config = fixture.variable("TIDEWIRE_CONFIG", file).variable("TIDEWIRE_NO_RULES", "1").load(&[]).unwrap();
    assert_eq!((config.server.port, config.warnings), (5, vec![]));
}

#[test]
fn all_keys_of_the_file_are_read() {
    let fixture = Fixture::new();
    let pem = tidewire_testkit::Certificates::generate(fixture.dir.path());
    let bucket = json!({"key": "id", "schema": {"id": {"type": "string"}}});
    let config = fixture.config(&json!({
        "port": 1, "host": "[::1]", "name": "n", "path": "/p", "engine": "embedded", "dataDir": "d",
        "durability": "none", "exposeErrorDetails": false, "allowedOrigins": ["http://localhost:3000"],
        "trustedProxies": ["10.0.0.0/8", "192.0.2.1"], "proxyProtocol": true, "adminListen": "127.0.0.1:9090",
        "maxConnectionsPerIp": 2, "tls": {"cert": pem.server, "key": pem.server_key}, "shutdownGraceMs": 3, "maxPayloadBytes": 4, "maxRecordBytes": 3,
        "rateLimit": {"maxRequests": 5, "windowMs": 6}, "heartbeat": {"intervalMs": 7, "timeoutMs": 8.0},
        "backpressure": {"maxBufferedBytes": 9, "highWaterMark": 1},
        "connectionLimits": {"maxSubscriptionsPerConnection": 10, "maxTotalSubscriptions": 11}, "maxConnections": 12, "memory": {"maxBytes": 18, "maxStoreBytes": 20},
        "maxResultBytes": 13, "maxFilterConditions": 19, "slowRequestMs": 17, "backupDir": "b", "handshakeTimeoutMs": 14, "requestTimeoutMs": 15, "revocationTtlMs": 16,
        "buckets": {"b": bucket, "comment": bucket}, "queries": {"q": {"bucket": "b", "comment": "all"}},
        "rules": false, "audit": false, "rulesPreload": [], "procedures": {},
    }));
    let ms = Duration::from_millis;
    let server = &config.server;
    assert_eq!((server.port, &*server.host, &*server.name, &*server.path), (1, "::1", "n", "/p"));
    assert_eq!(config.engine, Engine::Embedded { dir: "d".into(), durability: Durability::None });
    assert!(!server.expose_error_details);
    assert_eq!(server.allowed_origins.as_deref(), Some(&["http://localhost:3000".to_owned()][..]));
    let trusted: Vec<String> = server.trusted_proxies.iter().map(ToString::to_string).collect();
    assert_eq!((trusted, server.proxy_protocol), (vec!["10.0.0.0/8".to_owned(), "192.0.2.1/32".to_owned()], true));
    assert_eq!(server.admin_listen, Some(([127, 0, 0, 1], 9090).into()));
    let hosts = fixture.config(&json!({"allowedHosts": ["tide.example"]})).server.allowed_hosts;
    assert_eq!(hosts, ["tide.example"]);
    assert_eq!((server.max_connections_per_ip, server.max_payload_bytes, config.max_record_bytes), (Some(2), 4, 3));
    assert_eq!((server.slow_request, server.backup_dir.as_deref()), (ms(17), Some(Path::new("b"))));
    assert_eq!(server.tls.as_ref().map(|tls| (&tls.certificate, &tls.key)), Some((&pem.server, &pem.server_key)));
    assert_eq!((config.shutdown_grace, server.rate_limit), (ms(3), Some(RateLimit::new(5, ms(6)))));
    assert_eq!((server.heartbeat.interval, server.heartbeat.timeout), (ms(7), ms(8)));
    assert_eq!(format!("{:?}", server.backpressure), "Backpressure { max_buffered_bytes: 9, high_water_mark: 1.0 }");
    assert_eq!(server.connection_limits.max_subscriptions_per_connection, 10);
    assert_eq!(server.connection_limits.max_total_subscriptions, 11);
    assert_eq!((server.max_connections, server.max_result_bytes, server.memory.max_bytes), (12, 13, 18));
    assert_eq!((server.max_filter_conditions, config.max_store_bytes), (19, 20));
    assert_eq!((server.handshake_timeout, server.request_timeout, server.revocation_ttl), (ms(14), ms(15), ms(16)));
    let named = |definitions: &[crate::config::Definition]| -> Vec<String> {
        definitions.iter().map(|definition| format!("{} {}", definition.name, definition.config)).collect()
    };
    assert_eq!(named(&config.buckets), [format!("b {bucket}"), format!("comment {bucket}")]);
    assert_eq!(named(&config.queries), ["q {\"bucket\":\"b\"}"]);
    assert_eq!(config.warnings, Vec::<String>::new());
}

#[test]
fn help_lists_flags_defaults_and_examples() {
    let fixture = Fixture::new();
    for args in [&["--help"][..], &["serve", "--help"], &["-h"]] {
        let help = fixture.command(args).unwrap_err();
        assert_eq!(help.exit_code(), 0);
        let help = help.to_string();
        for text in
            ["Listening:", "Data:", "Access:", "[default: 8080]", "[default: ./data]", "Examples:", "TIDEWIRE_DATA_DIR"]
        {
            assert!(help.contains(text), "{text} is missing in\n{help}");
        }
    }
    for (args, text) in [(["backup", "--help"], "`server.backup`"), (["restore", "--help"], "new epoch")] {
        let help = fixture.command(&args).unwrap_err();
        assert_eq!(help.exit_code(), 0);
        let help = help.to_string();
        assert!(help.contains(text) && help.contains("--data-dir") && !help.contains("--port"), "{help}");
    }
    let version = fixture.load(&["--version"]).unwrap_err();
    assert_eq!((version.to_string(), version.exit_code()), (format!("tidewire {}", env!("CARGO_PKG_VERSION")), 0));
}

#[test]
fn record_limit_follows_the_message_limit() {
    let fixture = Fixture::new();
    let limit = |json: Json| fixture.config(&json).max_record_bytes;
    assert_eq!(limit(json!({"maxPayloadBytes": 1000})), 1 << 20, "not below the default");
    assert_eq!(limit(json!({"maxPayloadBytes": 4 << 20})), 4 << 20);
    assert_eq!(limit(json!({"maxPayloadBytes": 4 << 20, "maxRecordBytes": 2 << 20})), 2 << 20);
    assert_eq!(limit(json!({"maxPayloadBytes": 1 << 30})), 256 << 20, "not above the largest possible value");
}

#[test]
fn backup_and_restore_read_the_data_directory_from_all_sources() {
    let dirs = |fixture: &Fixture, args: &[&str]| match fixture.command(args).unwrap() {
        Command::Backup { data_dir, to } => (data_dir, to),
        Command::Restore { from, data_dir } => (data_dir, from),
        command => panic!("{command:?}"),
    };
    let fixture = Fixture::new();
    // A backup does not need the secrets and certificates of the server.
    let json = json!({"dataDir": "file", "tls": {"cert": "no.pem"}, "auth": {"jwt": {"secretEnv": "NO_SECRET"}}});
    let file = fixture.file("c.json", json.to_string());
    for command in ["backup", "restore"] {
        assert_eq!(dirs(&fixture, &[command, "copy"]), ("./data".into(), "copy".into()));
        assert_eq!(dirs(&fixture, &[command, "copy", "-c", &file]), ("file".into(), "copy".into()));
        assert_eq!(dirs(&fixture, &[command, "copy", "-c", &file, "--data-dir", "d"]), ("d".into(), "copy".into()));
        let from_variable = Fixture::new().variable("TIDEWIRE_DATA_DIR", "v");
        assert_eq!(dirs(&from_variable, &[command, "copy", "-c", &file]), ("v".into(), "copy".into()));
    }
    let memory = fixture.file("m.json", r#"{"engine": "memory"}"#);
    let line = "m.json:1:12: `engine`: the engine \"memory\" has no data directory; backup and restore require the engine \"embedded\"";
    assert_eq!(fixture.errors(&["backup", "copy", "-c", &memory]), [line]);
    assert_eq!(fixture.errors(&["restore", "copy", "-c", "no.json"]).len(), 1);
}

#[test]
fn revoke_reads_flags_and_variables() {
    let revoke = |fixture: &Fixture, args: &[&str]| match fixture.command(args).unwrap() {
        Command::Revoke(command) => command,
        command => panic!("{command:?}"),
    };
    let fixture = Fixture::new().variable("TIDEWIRE_TOKEN", "s3cret-token");
    let command = revoke(&fixture, &["revoke", "ann"]);
    assert_eq!((&*command.user_id, command.reason.as_deref(), command.token()), ("ann", None, "s3cret-token"));
    assert_eq!(command.url.to_string(), "ws://127.0.0.1:8080/");
    assert!(!format!("{command:?}").contains("s3cret"));
    let fixture = fixture.variable("TIDEWIRE_URL", "wss://tide.example/live");
    assert_eq!(revoke(&fixture, &["revoke", "ann"]).url.to_string(), "wss://tide.example:443/live");
    let command = revoke(&fixture, &["revoke", "ann", "--url", "ws://[::1]:9", "--reason", "left"]);
    assert_eq!((command.url.to_string(), command.reason.as_deref()), ("ws://[::1]:9/".to_owned(), Some("left")));
    let fixture = Fixture::new().variable("TIDEWIRE_URL", "8080");
    assert_eq!(
        fixture.errors(&["revoke", "ann"]),
        [
            "TIDEWIRE_URL: expected a URL such as \"ws://127.0.0.1:8080/\", got \"8080\"",
            "TIDEWIRE_TOKEN: expected the token of a user with the tier admin, got nothing",
        ]
    );
    assert!(matches!(fixture.command(&["revoke", ""]), Err(ConfigErrors::Usage(_))));
}

#[test]
fn changed_keys_that_require_a_restart_are_listed() {
    let fixture = Fixture::new();
    let keys = |old: Json, new: Json| fixture.config(&old).restart_keys(&fixture.config(&new));
    let auth = |tokens: Json, is_required: bool| json!({"auth": {"required": is_required, "tokens": tokens}});
    let ann = json!({"t": {"userId": "ann"}});
    assert_eq!(keys(json!({}), json!({"port": null, "comment": "none"})), [""; 0]);
    assert_eq!(keys(json!({"port": 1}), json!({"port": 2, "name": "n"})), ["name", "port"]);
    assert_eq!(keys(json!({"port": 1}), json!({})), ["port"]);
    assert_eq!(keys(auth(ann.clone(), true), auth(json!({}), true)), [""; 0]);
    assert_eq!(
        keys(auth(ann.clone(), true), json!({"auth": {"required": true, "jwt": {"secret": "x".repeat(32)}}})),
        [""; 0]
    );
    assert_eq!(keys(auth(ann.clone(), true), auth(ann, false)), ["auth.required"]);
}
