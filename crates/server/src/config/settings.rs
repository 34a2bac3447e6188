//! Merges the settings of all sources into a [`Config`].

use std::net::IpAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Map, Value as Json};
use tidewire_store::engine::Durability;
use tidewire_store::schema::BucketDefinition;
use tidewire_store::{Filter, Limits, Query};

use super::auth::AuthDraft;
use super::definitions::Definition;
use super::edge::EdgeLocations;
use super::entry::{Entry, MAX_MS, Report, warning};
use super::error::ConfigProblem;
use super::location::Location;
use super::overrides::Environment;
use super::reload::FixedSettings;
use super::unsupported::UnsupportedKeys;
use super::{Config, Engine, comments};
use crate::auth::Tier;
use crate::{Backpressure, ConnectionLimits, Heartbeat, RateLimit, ServerOptions, TlsFiles, machine};

pub(super) const KEYS: &[&str] = &[
    "port",
    "host",
    "name",
    "path",
    "engine",
    "dataDir",
    "backupDir",
    "durability",
    "auth",
    "audit",
    "rules",
    "rulesPreload",
    "procedures",
    "exposeErrorDetails",
    "allowedOrigins",
    "allowedHosts",
    "trustedProxies",
    "proxyProtocol",
    "adminListen",
    "maxConnectionsPerIp",
    "tls",
    "shutdownGraceMs",
    "maxPayloadBytes",
    "maxRecordBytes",
    "rateLimit",
    "heartbeat",
    "backpressure",
    "memory",
    "connectionLimits",
    "maxConnections",
    "maxResultBytes",
    "maxFilterConditions",
    "handshakeTimeoutMs",
    "requestTimeoutMs",
    "slowRequestMs",
    "revocationTtlMs",
    "buckets",
    "queries",
];

/// Limit of the sizes of one connection: messages, results and buffers.
pub(super) const MAX_BYTES: u64 = 1 << 30;
/// Limit of `maxRecordBytes`. A commit uses at most half of a log segment, which has at most 1 GiB.
const MAX_RECORD_BYTES: u64 = 256 << 20;
/// Limit of the sizes in `memory`, above the memory of any machine.
const MAX_MEMORY_BYTES: u64 = 1 << 50;
/// Limit of counts.
pub(super) const MAX_COUNT: u64 = 1_000_000_000;

/// The settings read so far. Later sources take precedence.
pub(super) struct Settings {
    server: ServerOptions,
    is_embedded: bool,
    engine_location: Option<Location>,
    data_dir: PathBuf,
    backup_dir_location: Option<Location>,
    durability: Durability,
    max_record_bytes: Option<(usize, Location)>,
    max_store_bytes: Option<usize>,
    shutdown_grace: Duration,
    tls_cert: Option<(PathBuf, Location)>,
    tls_key: Option<(PathBuf, Location)>,
    edge: EdgeLocations,
    auth: AuthDraft,
    unsupported: UnsupportedKeys,
    buckets: Vec<Definition>,
    queries: Vec<Definition>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            server: ServerOptions::default(),
            is_embedded: true,
            engine_location: None,
            data_dir: PathBuf::from("./data"),
            backup_dir_location: None,
            durability: Durability::Always,
            max_record_bytes: None,
            max_store_bytes: None,
            shutdown_grace: Duration::from_secs(5),
            tls_cert: None,
            tls_key: None,
            edge: EdgeLocations::default(),
            auth: AuthDraft::default(),
            unsupported: UnsupportedKeys::default(),
            buckets: Vec::new(),
            queries: Vec::new(),
        }
    }
}

/// Replaces a setting if the new value is valid.
pub(super) fn set<T>(setting: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *setting = value;
    }
}

impl Settings {
    /// Reads all keys of a source.
    pub(super) fn read(&mut self, root: &Entry<'_>, environment: Environment<'_>, report: &mut Report) {
        for (key, entry) in root.members(report, KEYS) {
            let server = &mut self.server;
            match key {
                "port" => {
                    let port = entry.integer(report, "a port number", 0..=65535);
                    set(&mut server.port, port.and_then(|port| port.try_into().ok()));
                }
                "host" => set(&mut server.host, host(&entry, report)),
                "name" => set(&mut server.name, entry.text(report, "a non-empty string").map(str::to_owned)),
                "path" => set(&mut server.path, path(&entry, report)),
                "engine" | "dataDir" => self.read_storage_key(key, &entry, report),
                "backupDir" => {
                    if let Some(dir) = entry.text(report, EXPECTED_DIRECTORY) {
                        server.backup_dir = Some(PathBuf::from(dir));
                        self.backup_dir_location = Some(entry.location());
                    }
                }
                "durability" => set(&mut self.durability, durability(&entry, report)),
                "auth" => self.auth.read(&entry, environment, report),
                "audit" => self.unsupported.audit(&entry, report),
                "rules" => self.unsupported.rules(&entry, report),
                "rulesPreload" => self.unsupported.rules_preload(&entry, report),
                "procedures" => self.unsupported.procedures(&entry, report),
                "exposeErrorDetails" => set(&mut server.expose_error_details, entry.boolean(report)),
                "allowedOrigins" => set(&mut server.allowed_origins, origins(&entry, report).map(Some)),
                "allowedHosts" | "trustedProxies" | "proxyProtocol" | "adminListen" => {
                    self.edge.read(key, &entry, server, report);
                }
                "maxConnectionsPerIp" => {
                    set(&mut server.max_connections_per_ip, entry.count(report, 1..=MAX_COUNT).map(Some));
                }
                "tls" => self.read_tls(&entry, report),
                "shutdownGraceMs" => set(&mut self.shutdown_grace, entry.milliseconds(report, 0)),
                "maxPayloadBytes" => set(&mut server.max_payload_bytes, entry.bytes(report, MAX_BYTES)),
                "maxRecordBytes" => {
                    let bytes = entry.bytes(report, MAX_RECORD_BYTES);
                    set(&mut self.max_record_bytes, bytes.map(|bytes| Some((bytes, entry.location()))));
                }
                "rateLimit" => set(&mut server.rate_limit, rate_limit(&entry, report).map(Some)),
                "heartbeat" => read_heartbeat(&mut server.heartbeat, &entry, report),
                "backpressure" => read_backpressure(&mut server.backpressure, &entry, report),
                "memory" => {
                    for (key, entry) in entry.members(report, MEMORY_KEYS) {
                        let bytes = entry.bytes(report, MAX_MEMORY_BYTES);
                        match key {
                            "maxBytes" => set(&mut server.memory.max_bytes, bytes),
                            _ => set(&mut self.max_store_bytes, bytes.map(Some)),
                        }
                    }
                }
                "connectionLimits" => read_connection_limits(&mut server.connection_limits, &entry, report),
                "maxConnections" => set(&mut server.max_connections, entry.count(report, 1..=MAX_COUNT)),
                "maxResultBytes" => set(&mut server.max_result_bytes, entry.bytes(report, MAX_BYTES)),
                "maxFilterConditions" => {
                    let max = Filter::MAX_CONDITIONS as u64;
                    set(&mut server.max_filter_conditions, entry.count(report, 1..=max));
                }
                "handshakeTimeoutMs" => set(&mut server.handshake_timeout, entry.milliseconds(report, 1)),
                "requestTimeoutMs" => set(&mut server.request_timeout, entry.milliseconds(report, 1)),
                "slowRequestMs" => set(&mut server.slow_request, entry.milliseconds(report, 0)),
                "revocationTtlMs" => set(&mut server.revocation_ttl, entry.milliseconds(report, 0)),
                "buckets" => self.buckets = definitions(&entry, report, comments::strip_bucket, check_bucket),
                "queries" => self.queries = definitions(&entry, report, comments::strip_query, check_query),
                _ => {}
            }
        }
    }

    /// Reads only the keys for the location of the data. Other values are not checked, because `backup` and `restore` must work
    /// without the secrets and certificates of the server.
    pub(super) fn read_storage(&mut self, root: &Entry<'_>, report: &mut Report) {
        for (key, entry) in root.members(report, KEYS) {
            self.read_storage_key(key, &entry, report);
        }
    }

    fn read_storage_key(&mut self, key: &str, entry: &Entry<'_>, report: &mut Report) {
        match key {
            "engine" => {
                set(&mut self.is_embedded, is_embedded(entry, report));
                self.engine_location = Some(entry.location());
            }
            "dataDir" => set(&mut self.data_dir, entry.text(report, EXPECTED_DIRECTORY).map(PathBuf::from)),
            _ => {}
        }
    }

    fn read_tls(&mut self, entry: &Entry<'_>, report: &mut Report) {
        for (key, entry) in entry.members(report, TLS_KEYS) {
            let file = entry.text(report, "the path of a PEM file").map(|file| (PathBuf::from(file), entry.location()));
            match key {
                "cert" => set(&mut self.tls_cert, file.map(Some)),
                _ => set(&mut self.tls_key, file.map(Some)),
            }
        }
    }

    /// Builds the configuration of a server, after all sources have been read.
    pub(super) fn finish(mut self, fixed: FixedSettings, report: &mut Report) -> Config {
        self.server.tls = tls_files(self.tls_cert, self.tls_key, report);
        let roles = self.auth.roles();
        self.server.auth = self.auth.finish(report);
        self.edge.finish(&self.server, report);
        self.unsupported.finish(report);
        if let Some(location) = self.backup_dir_location.filter(|_| !self.is_embedded) {
            report.warnings.push(warning(&location, "backupDir", "the memory engine cannot be backed up"));
        }
        let max_record_bytes = max_record_bytes(self.max_record_bytes, &self.server, report);
        warn_about_open_server(&self.server, report);
        if self.is_embedded {
            warn_about_open_directory(&self.data_dir, report);
        }
        let (dir, durability) = (self.data_dir, self.durability);
        Config {
            server: self.server,
            engine: if self.is_embedded { Engine::Embedded { dir, durability } } else { Engine::Memory },
            max_record_bytes,
            max_store_bytes: self.max_store_bytes.unwrap_or_else(default_store_bytes),
            shutdown_grace: self.shutdown_grace,
            buckets: self.buckets,
            queries: self.queries,
            roles,
            warnings: std::mem::take(&mut report.warnings),
            fixed,
        }
    }

    /// Returns the data directory. Reports an error if the engine has none.
    pub(super) fn data_dir(self, report: &mut Report) -> PathBuf {
        if let Some(location) = self.engine_location.filter(|_| !self.is_embedded) {
            report.add(location, "engine", ConfigProblem::NoDataDir);
        }
        self.data_dir
    }
}

/// Returns the limit of a record: as set, otherwise that of a message, but not less than the default of the store.
fn max_record_bytes(given: Option<(usize, Location)>, server: &ServerOptions, report: &mut Report) -> usize {
    let max_bytes = usize::try_from(MAX_RECORD_BYTES).unwrap_or(usize::MAX);
    let default = server.max_payload_bytes.min(max_bytes).max(Limits::default().max_record_bytes);
    let bytes = given.as_ref().map_or(default, |(bytes, _)| *bytes);
    if let Some((_, location)) = given.filter(|_| bytes > server.max_payload_bytes) {
        let message = format!(
            "the limit of {bytes} bytes is above `maxPayloadBytes` ({}), so clients cannot send records of this size",
            server.max_payload_bytes
        );
        report.warnings.push(warning(&location, "maxRecordBytes", &message));
    }
    if bytes > server.max_result_bytes {
        report.warnings.push(format!(
            "the record limit of {bytes} bytes is above `maxResultBytes` ({}), so clients cannot read records of this size",
            server.max_result_bytes
        ));
    }
    bytes
}

/// Warns if the server is reachable from other machines without auth or a rate limit.
fn warn_about_open_server(server: &ServerOptions, report: &mut Report) {
    let host = &server.host;
    // A lower tier restricts clients.
    let is_unlimited = |tier: Option<Tier>| tier.is_none_or(|tier| tier == Tier::Admin);
    let is_open = server.auth.as_ref().is_none_or(|auth| !auth.required && is_unlimited(auth.anonymous_tier));
    let is_loopback = host.parse::<IpAddr>().map_or(host == "localhost", |address| address.is_loopback());
    if is_loopback {
        return;
    }
    if is_open {
        report.warnings.push(format!(
            "auth is off or not required on {host}, which is not a loopback address: every client has full access"
        ));
    }
    if server.rate_limit.is_none() {
        report.warnings.push(format!(
            "the rate limit is off on {host}, which is not a loopback address: clients can send any number of requests"
        ));
    }
}

/// Warns if other users of the machine have access to an existing data directory. The server creates new directories as private.
fn warn_about_open_directory(dir: &Path, report: &mut Report) {
    // Other errors are reported when the directory is opened.
    let Ok(metadata) = std::fs::metadata(dir) else { return };
    let mode = metadata.permissions().mode() & 0o777;
    if mode & 0o077 != 0 {
        let dir = dir.display();
        report.warnings.push(format!(
            "the data directory {dir} has mode {mode:04o}, so other users have access to it; run `chmod 700 {dir}`"
        ));
    }
}

fn host(entry: &Entry<'_>, report: &mut Report) -> Option<String> {
    const EXPECTED: &str = "an address without a port, such as \"127.0.0.1\"";
    let host = entry.text(report, EXPECTED)?;
    // As in a URL, an IPv6 address may be in brackets.
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    let is_address = host.parse::<IpAddr>().is_ok();
    if !is_address && (host.is_empty() || host.contains(|c: char| c.is_whitespace() || "/:[]".contains(c))) {
        return entry.mismatch(report, EXPECTED);
    }
    Some(host.to_owned())
}

fn path(entry: &Entry<'_>, report: &mut Report) -> Option<String> {
    const EXPECTED: &str = "a path that starts with \"/\", without \"?\", \"#\" and spaces";
    let path = entry.text(report, EXPECTED)?;
    if !path.starts_with('/') || path.contains(|c: char| c == '?' || c == '#' || c.is_whitespace()) {
        return entry.mismatch(report, EXPECTED);
    }
    Some(path.to_owned())
}

fn is_embedded(entry: &Entry<'_>, report: &mut Report) -> Option<bool> {
    const EXPECTED: &str = "\"memory\" or \"embedded\"";
    match entry.text(report, EXPECTED)? {
        "memory" => Some(false),
        "embedded" => Some(true),
        // The URL may contain a password, so it is not shown.
        url if url.starts_with("redis:") || url.starts_with("rediss:") => {
            entry.fail(report, ConfigProblem::RedisUnsupported)
        }
        _ => entry.mismatch(report, EXPECTED),
    }
}

fn durability(entry: &Entry<'_>, report: &mut Report) -> Option<Durability> {
    let expected = format!("\"always\", \"none\" or \"interval:MS\" with 1 to {MAX_MS} milliseconds");
    match entry.text(report, &expected)? {
        "always" => Some(Durability::Always),
        "none" => Some(Durability::None),
        text => {
            let milliseconds = text.strip_prefix("interval:").and_then(|number| number.parse::<u64>().ok());
            let milliseconds = milliseconds.filter(|number| (1..=MAX_MS).contains(number));
            let interval = milliseconds.map(|number| Durability::Interval(Duration::from_millis(number)));
            interval.or_else(|| entry.mismatch(report, expected))
        }
    }
}

/// Reads `allowedOrigins`. Origins are compared with the header byte by byte, so any other spelling is rejected.
fn origins(entry: &Entry<'_>, report: &mut Report) -> Option<Vec<String>> {
    const EXPECTED: &str =
        "an origin as browsers send it, such as \"https://example.com\" or \"http://localhost:3000\"";
    let items = entry.items(report, "a list of origins")?;
    let mut origins = Vec::new();
    for item in &items {
        let Some(origin) = item.text(report, EXPECTED) else { continue };
        let host = origin.split_once("://").map_or("", |(scheme, host)| if scheme.is_empty() { "" } else { host });
        let is_host = !host.is_empty() && !host.contains(|c: char| "/?#*@".contains(c) || c.is_whitespace());
        if origin == "null" || is_host && !origin.contains(|c: char| c.is_uppercase()) {
            origins.push(origin.to_owned());
        } else {
            item.mismatch::<()>(report, EXPECTED);
        }
    }
    Some(origins)
}

const EXPECTED_DIRECTORY: &str = "the path of a directory";

pub(super) const TLS_KEYS: &[&str] = &["cert", "key"];

fn tls_files(
    cert: Option<(PathBuf, Location)>,
    key: Option<(PathBuf, Location)>,
    report: &mut Report,
) -> Option<TlsFiles> {
    let missing = |key, what: &str| ConfigProblem::Missing { key, expected: format!("the PEM file of the {what}") };
    let errors = report.errors.len();
    for (file, location) in [&cert, &key].into_iter().flatten() {
        if let Err(source) = std::fs::read(file) {
            let problem = ConfigProblem::Unreadable { file: file.display().to_string(), source };
            report.add(location.clone(), "tls", problem);
        }
    }
    match (cert, key) {
        (Some((certificate, location)), Some((key, _))) => {
            let files = TlsFiles { certificate, key };
            // Reports an invalid certificate or key now, not when the server starts.
            if report.errors.len() == errors
                && let Err(error) = crate::server::tls(&files)
            {
                return report.fail(location, "tls", ConfigProblem::Tls(error));
            }
            Some(files)
        }
        (Some((_, location)), None) => report.fail(location, "tls", missing("key", "private key")),
        (None, Some((_, location))) => report.fail(location, "tls", missing("cert", "certificate")),
        (None, None) => None,
    }
}

pub(super) const RATE_LIMIT_KEYS: &[&str] = &["maxRequests", "windowMs"];

fn rate_limit(entry: &Entry<'_>, report: &mut Report) -> Option<RateLimit> {
    let errors = report.errors.len();
    let (mut max_requests, mut window) = (None, None);
    for (key, entry) in entry.members(report, RATE_LIMIT_KEYS) {
        match key {
            "maxRequests" => max_requests = entry.count(report, 1..=MAX_COUNT),
            _ => window = entry.milliseconds(report, 1),
        }
    }
    if report.errors.len() > errors {
        return None;
    }
    let Some(max_requests) = max_requests else { return entry.missing(report, "maxRequests", "a number of requests") };
    let Some(window) = window else { return entry.missing(report, "windowMs", "a number of milliseconds") };
    Some(RateLimit::new(max_requests, window))
}

pub(super) const HEARTBEAT_KEYS: &[&str] = &["intervalMs", "timeoutMs"];

fn read_heartbeat(heartbeat: &mut Heartbeat, entry: &Entry<'_>, report: &mut Report) {
    for (key, entry) in entry.members(report, HEARTBEAT_KEYS) {
        match key {
            "intervalMs" => set(&mut heartbeat.interval, entry.milliseconds(report, 1)),
            _ => set(&mut heartbeat.timeout, entry.milliseconds(report, 1)),
        }
    }
}

pub(super) const BACKPRESSURE_KEYS: &[&str] = &["maxBufferedBytes", "highWaterMark"];

fn read_backpressure(backpressure: &mut Backpressure, entry: &Entry<'_>, report: &mut Report) {
    for (key, entry) in entry.members(report, BACKPRESSURE_KEYS) {
        if key == "maxBufferedBytes" {
            set(&mut backpressure.max_buffered_bytes, entry.bytes(report, MAX_BYTES));
        } else {
            let fraction = entry.node.json().as_f64().filter(|fraction| *fraction > 0.0 && *fraction <= 1.0);
            let fraction = fraction.or_else(|| entry.mismatch(report, "a number above 0 and at most 1"));
            set(&mut backpressure.high_water_mark, fraction);
        }
    }
}

pub(super) const MEMORY_KEYS: &[&str] = &["maxBytes", "maxStoreBytes"];

/// Returns the default memory limit of all records: half of the memory, which leaves the rest for indexes, connections and recovery,
/// but not less than a small store needs. There is no limit if the memory size is unknown.
fn default_store_bytes() -> usize {
    const MIN_STORE_BYTES: usize = 256 << 20;
    let half = machine::memory_bytes().map(|bytes| usize::try_from(bytes / 2).unwrap_or(usize::MAX));
    half.map_or(usize::MAX, |half| half.max(MIN_STORE_BYTES))
}

pub(super) const CONNECTION_LIMIT_KEYS: &[&str] = &["maxSubscriptionsPerConnection", "maxTotalSubscriptions"];

fn read_connection_limits(limits: &mut ConnectionLimits, entry: &Entry<'_>, report: &mut Report) {
    for (key, entry) in entry.members(report, CONNECTION_LIMIT_KEYS) {
        let count = entry.count(report, 1..=MAX_COUNT);
        match key {
            "maxSubscriptionsPerConnection" => set(&mut limits.max_subscriptions_per_connection, count),
            _ => set(&mut limits.max_total_subscriptions, count),
        }
    }
}

/// Reads and checks the definitions of `buckets` or `queries`. Their compatibility with the stored data is checked when they are
/// applied.
fn definitions(
    entry: &Entry<'_>,
    report: &mut Report,
    strip: fn(&mut Map<String, Json>),
    check: fn(&Json) -> Result<(), ConfigProblem>,
) -> Vec<Definition> {
    let mut definitions = Vec::new();
    for (name, entry) in entry.named_members(report) {
        let Json::Object(mut config) = entry.node.json() else {
            entry.mismatch::<()>(report, "an object");
            continue;
        };
        strip(&mut config);
        let config = Json::Object(config);
        match check(&config) {
            Ok(()) => definitions.push(Definition::new(name, config, Some(entry.location()))),
            Err(problem) => entry.reject(report, problem),
        }
    }
    definitions
}

fn check_bucket(config: &Json) -> Result<(), ConfigProblem> {
    Ok(BucketDefinition::parse(config).map(drop)?)
}

fn check_query(config: &Json) -> Result<(), ConfigProblem> {
    Query::template(config)?;
    Ok(())
}
