//! The settings, gathered from all who may say something.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Map, Value as Json};
use tidewire_store::{BucketDefinition, Durability, Query};

use super::auth::AuthDraft;
use super::check::{Given, MAX_MS, Report};
use super::definitions::Definition;
use super::error::Problem;
use super::later::Later;
use super::layers::Environment;
use super::place::Place;
use super::{Config, Engine, comments};
use crate::{Backpressure, ConnectionLimits, Heartbeat, RateLimit, ServerOptions, TlsFiles};

pub(super) const KEYS: &[&str] = &[
    "port",
    "host",
    "name",
    "path",
    "engine",
    "dataDir",
    "durability",
    "auth",
    "audit",
    "rules",
    "rulesPreload",
    "procedures",
    "exposeErrorDetails",
    "allowedOrigins",
    "maxConnectionsPerIp",
    "tls",
    "shutdownGraceMs",
    "maxPayloadBytes",
    "rateLimit",
    "heartbeat",
    "backpressure",
    "connectionLimits",
    "maxConnections",
    "maxResultBytes",
    "handshakeTimeoutMs",
    "requestTimeoutMs",
    "revocationTtlMs",
    "buckets",
    "queries",
];

/// No message, result or buffer of one connection is larger.
const MAX_BYTES: u64 = 1 << 30;
/// There are not more of anything.
const MAX_COUNT: u64 = 1_000_000_000;

/// What has been said so far. Whoever is read later wins.
pub(super) struct Settings {
    server: ServerOptions,
    is_embedded: bool,
    data_dir: PathBuf,
    durability: Durability,
    shutdown_grace: Duration,
    tls_cert: Option<(PathBuf, Place)>,
    tls_key: Option<(PathBuf, Place)>,
    auth: AuthDraft,
    later: Later,
    buckets: Vec<Definition>,
    queries: Vec<Definition>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            server: ServerOptions::default(),
            is_embedded: true,
            data_dir: PathBuf::from("./data"),
            durability: Durability::Always,
            shutdown_grace: Duration::from_secs(5),
            tls_cert: None,
            tls_key: None,
            auth: AuthDraft::default(),
            later: Later::default(),
            buckets: Vec::new(),
            queries: Vec::new(),
        }
    }
}

/// Puts a value in place, if there is one.
fn set<T>(place: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *place = value;
    }
}

impl Settings {
    pub(super) fn read(&mut self, root: &Given<'_>, environment: Environment<'_>, report: &mut Report) {
        for (key, given) in root.members(report, KEYS) {
            let server = &mut self.server;
            match key {
                "port" => set(&mut server.port, given.whole(report, 0..=65535).and_then(|port| port.try_into().ok())),
                "host" => set(&mut server.host, host(&given, report)),
                "name" => set(&mut server.name, given.text(report, "a name").map(str::to_owned)),
                "path" => set(&mut server.path, path(&given, report)),
                "engine" => set(&mut self.is_embedded, is_embedded(&given, report)),
                "dataDir" => set(&mut self.data_dir, given.text(report, "the name of a directory").map(PathBuf::from)),
                "durability" => set(&mut self.durability, durability(&given, report)),
                "auth" => self.auth.read(&given, environment, report),
                "audit" => self.later.audit(&given, report),
                "rules" => self.later.rules(&given, report),
                "rulesPreload" => self.later.preload(&given, report),
                "procedures" => self.later.procedures(&given, report),
                "exposeErrorDetails" => set(&mut server.expose_error_details, given.flag(report)),
                "allowedOrigins" => set(&mut server.allowed_origins, origins(&given, report).map(Some)),
                "maxConnectionsPerIp" => {
                    set(&mut server.max_connections_per_ip, given.count(report, 1..=MAX_COUNT).map(Some));
                }
                "tls" => self.read_tls(&given, report),
                "shutdownGraceMs" => set(&mut self.shutdown_grace, given.milliseconds(report, 0)),
                "maxPayloadBytes" => set(&mut server.max_payload_bytes, given.count(report, 1..=MAX_BYTES)),
                "rateLimit" => set(&mut server.rate_limit, rate_limit(&given, report).map(Some)),
                "heartbeat" => read_heartbeat(&mut server.heartbeat, &given, report),
                "backpressure" => read_backpressure(&mut server.backpressure, &given, report),
                "connectionLimits" => read_limits(&mut server.connection_limits, &given, report),
                "maxConnections" => set(&mut server.max_connections, given.count(report, 1..=MAX_COUNT)),
                "maxResultBytes" => set(&mut server.max_result_bytes, given.count(report, 1..=MAX_BYTES)),
                "handshakeTimeoutMs" => set(&mut server.handshake_timeout, given.milliseconds(report, 1)),
                "requestTimeoutMs" => set(&mut server.request_timeout, given.milliseconds(report, 1)),
                "revocationTtlMs" => set(&mut server.revocation_ttl, given.milliseconds(report, 0)),
                "buckets" => self.buckets = definitions(&given, report, comments::of_bucket, check_bucket),
                "queries" => self.queries = definitions(&given, report, comments::of_query, check_query),
                _ => {}
            }
        }
    }

    fn read_tls(&mut self, given: &Given<'_>, report: &mut Report) {
        for (key, given) in given.members(report, TLS_KEYS) {
            let file = given.text(report, "the name of a file in PEM").map(|file| (PathBuf::from(file), given.place()));
            match key {
                "cert" => set(&mut self.tls_cert, file.map(Some)),
                _ => set(&mut self.tls_key, file.map(Some)),
            }
        }
    }

    pub(super) fn finish(mut self, check: bool, report: &mut Report) -> Config {
        self.server.tls = tls_files(self.tls_cert, self.tls_key, report);
        self.server.auth = self.auth.finish(report);
        self.later.finish(report);
        warn_of_strangers(&self.server, report);
        let (dir, durability) = (self.data_dir, self.durability);
        Config {
            server: self.server,
            engine: if self.is_embedded { Engine::Embedded { dir, durability } } else { Engine::Memory },
            shutdown_grace: self.shutdown_grace,
            buckets: self.buckets,
            queries: self.queries,
            warnings: std::mem::take(&mut report.warnings),
            check,
        }
    }
}

/// Whoever can reach the server is let in, as often as they like: that is a mistake more often than not.
fn warn_of_strangers(server: &ServerOptions, report: &mut Report) {
    let host = &server.host;
    let is_open = server.auth.as_ref().is_none_or(|auth| !auth.required);
    let is_loopback = host.parse::<IpAddr>().map_or(host == "localhost", |address| address.is_loopback());
    if is_loopback {
        return;
    }
    if is_open {
        report.warnings.push(format!(
            "auth is off, or not required, and {host} is no loopback address: whoever reaches it may do everything"
        ));
    }
    if server.rate_limit.is_none() {
        report.warnings.push(format!(
            "rate limiting is off, and {host} is no loopback address: whoever reaches it may ask without end"
        ));
    }
}

fn host(given: &Given<'_>, report: &mut Report) -> Option<String> {
    const EXPECTED: &str = "an address, such as \"127.0.0.1\" or \"0.0.0.0\", without a port";
    let host = given.text(report, EXPECTED)?;
    // Like in a URL, an address with colons may be in brackets.
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    let is_address = host.parse::<IpAddr>().is_ok();
    if !is_address && (host.is_empty() || host.contains(|c: char| c.is_whitespace() || "/:[]".contains(c))) {
        return given.wrong(report, EXPECTED);
    }
    Some(host.to_owned())
}

fn path(given: &Given<'_>, report: &mut Report) -> Option<String> {
    const EXPECTED: &str = "a path that begins with \"/\" and has no \"?\", \"#\" or space in it";
    let path = given.text(report, EXPECTED)?;
    if !path.starts_with('/') || path.contains(|c: char| c == '?' || c == '#' || c.is_whitespace()) {
        return given.wrong(report, EXPECTED);
    }
    Some(path.to_owned())
}

fn is_embedded(given: &Given<'_>, report: &mut Report) -> Option<bool> {
    const EXPECTED: &str = "\"memory\" or \"embedded\"";
    match given.text(report, EXPECTED)? {
        "memory" => Some(false),
        "embedded" => Some(true),
        // Not shown: it may have a password in it.
        url if url.starts_with("redis:") || url.starts_with("rediss:") => given.fail(report, Problem::NoRedis),
        _ => given.wrong(report, EXPECTED),
    }
}

fn durability(given: &Given<'_>, report: &mut Report) -> Option<Durability> {
    let expected = format!("\"always\", \"none\" or \"interval:MS\" with 1 to {MAX_MS} milliseconds");
    match given.text(report, &expected)? {
        "always" => Some(Durability::Always),
        "none" => Some(Durability::None),
        text => {
            let milliseconds = text.strip_prefix("interval:").and_then(|number| number.parse::<u64>().ok());
            let milliseconds = milliseconds.filter(|number| (1..=MAX_MS).contains(number));
            let interval = milliseconds.map(|number| Durability::Interval(Duration::from_millis(number)));
            interval.or_else(|| given.wrong(report, expected))
        }
    }
}

/// They are compared with what browsers send, so one that is written in another way would match nothing.
fn origins(given: &Given<'_>, report: &mut Report) -> Option<Vec<String>> {
    const EXPECTED: &str =
        "an origin as browsers send it, such as \"https://example.com\" or \"http://localhost:3000\"";
    let items = given.items(report, "a list of origins")?;
    let mut origins = Vec::new();
    for item in &items {
        let Some(origin) = item.text(report, EXPECTED) else { continue };
        let host = origin.split_once("://").map_or("", |(scheme, host)| if scheme.is_empty() { "" } else { host });
        let is_host = !host.is_empty() && !host.contains(|c: char| "/?#*@".contains(c) || c.is_whitespace());
        if origin == "null" || is_host && !origin.contains(|c: char| c.is_uppercase()) {
            origins.push(origin.to_owned());
        } else {
            item.wrong::<()>(report, EXPECTED);
        }
    }
    Some(origins)
}

pub(super) const TLS_KEYS: &[&str] = &["cert", "key"];

fn tls_files(cert: Option<(PathBuf, Place)>, key: Option<(PathBuf, Place)>, report: &mut Report) -> Option<TlsFiles> {
    let missing = |key, what: &str| Problem::Missing { key, expected: format!("the file of the {what}, in PEM") };
    let errors = report.errors.len();
    for (file, place) in [&cert, &key].into_iter().flatten() {
        if let Err(source) = std::fs::read(file) {
            let problem = Problem::Unreadable { file: file.display().to_string(), source };
            report.add(place.clone(), "tls", problem);
        }
    }
    match (cert, key) {
        (Some((certificate, place)), Some((key, _))) => {
            let files = TlsFiles { certificate, key };
            // Whether they fit together is better known before there is a server.
            if report.errors.len() == errors
                && let Err(error) = crate::server::tls(&files)
            {
                return report.fail(place, "tls", Problem::Tls(error));
            }
            Some(files)
        }
        (Some((_, place)), None) => report.fail(place, "tls", missing("key", "certificate's private key")),
        (None, Some((_, place))) => report.fail(place, "tls", missing("cert", "certificate")),
        (None, None) => None,
    }
}

pub(super) const RATE_LIMIT_KEYS: &[&str] = &["maxRequests", "windowMs"];

fn rate_limit(given: &Given<'_>, report: &mut Report) -> Option<RateLimit> {
    let errors = report.errors.len();
    let (mut max_requests, mut window) = (None, None);
    for (key, given) in given.members(report, RATE_LIMIT_KEYS) {
        match key {
            "maxRequests" => max_requests = given.count(report, 1..=MAX_COUNT),
            _ => window = given.milliseconds(report, 1),
        }
    }
    if report.errors.len() > errors {
        return None;
    }
    let Some(max_requests) = max_requests else { return given.missing(report, "maxRequests", "how many requests") };
    let Some(window) = window else { return given.missing(report, "windowMs", "in which time, in milliseconds") };
    Some(RateLimit::new(max_requests, window))
}

pub(super) const HEARTBEAT_KEYS: &[&str] = &["intervalMs", "timeoutMs"];

fn read_heartbeat(heartbeat: &mut Heartbeat, given: &Given<'_>, report: &mut Report) {
    for (key, given) in given.members(report, HEARTBEAT_KEYS) {
        match key {
            "intervalMs" => set(&mut heartbeat.interval, given.milliseconds(report, 1)),
            _ => set(&mut heartbeat.timeout, given.milliseconds(report, 1)),
        }
    }
}

pub(super) const BACKPRESSURE_KEYS: &[&str] = &["maxBufferedBytes", "highWaterMark"];

fn read_backpressure(backpressure: &mut Backpressure, given: &Given<'_>, report: &mut Report) {
    for (key, given) in given.members(report, BACKPRESSURE_KEYS) {
        if key == "maxBufferedBytes" {
            set(&mut backpressure.max_buffered_bytes, given.count(report, 1..=MAX_BYTES));
        } else {
            let part = given.node.json().as_f64().filter(|part| *part > 0.0 && *part <= 1.0);
            let part = part.or_else(|| given.wrong(report, "a number above 0 and not above 1"));
            set(&mut backpressure.high_water_mark, part);
        }
    }
}

pub(super) const LIMIT_KEYS: &[&str] = &["maxSubscriptionsPerConnection", "maxTotalSubscriptions"];

fn read_limits(limits: &mut ConnectionLimits, given: &Given<'_>, report: &mut Report) {
    for (key, given) in given.members(report, LIMIT_KEYS) {
        let count = given.count(report, 1..=MAX_COUNT);
        match key {
            "maxSubscriptionsPerConnection" => set(&mut limits.max_subscriptions_per_connection, count),
            _ => set(&mut limits.max_total_subscriptions, count),
        }
    }
}

/// Definitions that can be used as far as they say themselves: whether they fit the data, only the store knows.
fn definitions(
    given: &Given<'_>,
    report: &mut Report,
    strip: fn(&mut Map<String, Json>),
    check: fn(&Json) -> Result<(), Problem>,
) -> Vec<Definition> {
    let mut definitions = Vec::new();
    for (name, given) in given.named(report) {
        let Json::Object(mut config) = given.node.json() else {
            given.wrong::<()>(report, "an object");
            continue;
        };
        strip(&mut config);
        let config = Json::Object(config);
        match check(&config) {
            Ok(()) => definitions.push(Definition::new(name, config, Some(given.place()))),
            Err(problem) => given.reject(report, problem),
        }
    }
    definitions
}

fn check_bucket(config: &Json) -> Result<(), Problem> {
    Ok(BucketDefinition::parse(config).map(drop)?)
}

fn check_query(config: &Json) -> Result<(), Problem> {
    Ok(Query::check(config)?)
}
