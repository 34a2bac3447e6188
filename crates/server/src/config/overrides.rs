//! Settings from environment variables and flags, as configuration trees that override the file.

use std::ffi::OsString;

use super::cli::Flags;
use super::entry::Report;
use super::error::ConfigProblem;
use super::location::Origin;
use super::tree::{Member, Node, Value};

/// Looks up an environment variable.
pub(super) type Environment<'e> = &'e dyn Fn(&str) -> Option<OsString>;

/// The settings from the environment and the command line.
pub(super) struct Overrides {
    /// The path of the configuration file, and the flag or variable that sets it.
    pub(super) file: Option<(String, Origin)>,
    pub(super) check: bool,
    /// The environment, then the flags. Later trees take precedence.
    pub(super) trees: [Node; 2],
}

/// How the text of a flag or variable is parsed.
#[derive(Clone, Copy)]
enum Format {
    Text,
    Number,
    List,
}

impl Overrides {
    pub(super) fn new(flags: &Flags, environment: Environment<'_>, report: &mut Report) -> Self {
        // The flag, the path of its key, its format and its value. An empty path is a flag without a key in the file.
        let values: [(&str, &[&str], Format, &Option<String>); 24] = [
            ("name", &["name"], Format::Text, &flags.name),
            ("grace", &["shutdownGraceMs"], Format::Number, &flags.grace),
            ("slow-request-ms", &["slowRequestMs"], Format::Number, &flags.slow_request_ms),
            ("port", &["port"], Format::Number, &flags.port),
            ("host", &["host"], Format::Text, &flags.host),
            ("path", &["path"], Format::Text, &flags.path),
            ("tls-cert", &["tls", "cert"], Format::Text, &flags.tls_cert),
            ("tls-key", &["tls", "key"], Format::Text, &flags.tls_key),
            ("admin-listen", &["adminListen"], Format::Text, &flags.admin_listen),
            ("trusted-proxies", &["trustedProxies"], Format::List, &flags.trusted_proxies),
            ("engine", &["engine"], Format::Text, &flags.engine),
            ("data-dir", &["dataDir"], Format::Text, &flags.storage.data_dir),
            ("backup-dir", &["backupDir"], Format::Text, &flags.backup_dir),
            ("durability", &["durability"], Format::Text, &flags.durability),
            ("max-payload-bytes", &["maxPayloadBytes"], Format::Number, &flags.max_payload_bytes),
            ("max-record-bytes", &["maxRecordBytes"], Format::Number, &flags.max_record_bytes),
            ("memory-max-bytes", &["memory", "maxBytes"], Format::Number, &flags.memory_max_bytes),
            ("memory-max-store-bytes", &["memory", "maxStoreBytes"], Format::Number, &flags.memory_max_store_bytes),
            ("admin-secret", &["auth", "adminSecret"], Format::Text, &flags.admin_secret),
            ("allowed-origins", &["allowedOrigins"], Format::List, &flags.allowed_origins),
            ("allowed-hosts", &["allowedHosts"], Format::List, &flags.allowed_hosts),
            ("max-connections", &["maxConnections"], Format::Number, &flags.max_connections),
            ("max-connections-per-ip", &["maxConnectionsPerIp"], Format::Number, &flags.max_connections_per_ip),
            ("config", &[], Format::Text, &flags.storage.config),
        ];
        // The switch, the path of its key, the value of the key when the switch is on, and whether it was given.
        let switches: [(&str, &[&str], bool, bool); 5] = [
            ("auth", &["auth", "builtIn"], true, flags.auth),
            ("no-rules", &["rules"], false, flags.no_rules),
            ("audit", &["audit"], true, flags.audit),
            ("no-error-details", &["exposeErrorDetails"], false, flags.no_error_details),
            ("check", &[], true, flags.check),
        ];

        let (mut from_environment, mut from_flags) = (Vec::new(), Vec::new());
        let (mut file, mut check) = (None, false);
        for (name, path, format, value) in values {
            let variable = variable_name(name);
            let text = variable_text(&variable, environment, report).map(|text| (text, Origin::Variable(variable)));
            let flag = value.clone().map(|text| (text, Origin::Flag(format!("--{name}"))));
            if path.is_empty() {
                file = flag.or(text);
                continue;
            }
            from_environment.extend(text.map(|(text, origin)| nest(path, format.parse(&text, origin))));
            from_flags.extend(flag.map(|(text, origin)| nest(path, format.parse(&text, origin))));
        }
        for (name, path, value_if_on, is_given) in switches {
            let variable = variable_name(name);
            let text = variable_text(&variable, environment, report);
            let is_on = text.and_then(|text| parse_switch(&text, &variable, report));
            if path.is_empty() {
                check = is_given || is_on.unwrap_or(false);
                continue;
            }
            let member = |is_on: bool, origin| nest(path, Node { value: Value::Bool(is_on == value_if_on), origin });
            from_environment.extend(is_on.map(|is_on| member(is_on, Origin::Variable(variable))));
            from_flags.extend(is_given.then(|| member(true, Origin::Flag(format!("--{name}")))));
        }
        // The origin of the root is never shown, because the root is always a valid object.
        let tree = |members, name: &str| Node { value: Value::Object(members), origin: Origin::Flag(name.to_owned()) };
        Self { file, check, trees: [tree(from_environment, "the environment"), tree(from_flags, "the flags")] }
    }
}

impl Format {
    fn parse(self, text: &str, origin: Origin) -> Node {
        let string = |text: &str| Value::String(text.to_owned());
        let value = match self {
            Self::Text => string(text),
            // Text that is not a number remains text, and is reported when the setting is read.
            Self::Number => text.trim().parse().map_or_else(|_| string(text), Value::Number),
            Self::List => {
                let items = text.split(',').map(str::trim).filter(|item| !item.is_empty());
                Value::Array(items.map(|item| Node { value: string(item), origin: origin.clone() }).collect())
            }
        };
        Node { value, origin }
    }
}

fn variable_name(flag: &str) -> String {
    format!("TIDEWIRE_{}", flag.to_uppercase().replace('-', "_"))
}

/// Returns the value of a variable. An empty value is treated as unset, because many tools cannot unset a variable.
pub(super) fn variable_text(variable: &str, environment: Environment<'_>, report: &mut Report) -> Option<String> {
    let value = environment(variable).filter(|value| !value.is_empty())?;
    match value.into_string() {
        Ok(text) => Some(text),
        Err(_) => report.fail(Origin::Variable(variable.to_owned()).location(), "", ConfigProblem::NotUtf8),
    }
}

fn parse_switch(text: &str, variable: &str, report: &mut Report) -> Option<bool> {
    match text.trim().to_ascii_lowercase().as_str() {
        "1" | "true" | "yes" | "on" => Some(true),
        "0" | "false" | "no" | "off" => Some(false),
        _ => {
            let found = serde_json::Value::from(text).to_string();
            let problem = ConfigProblem::Expected { expected: "true or false (1 or 0)".to_owned(), found };
            report.fail(Origin::Variable(variable.to_owned()).location(), "", problem)
        }
    }
}

/// Wraps a value in the objects of its path. Returns the member of the root.
fn nest(path: &[&str], value: Node) -> Member {
    let origin = value.origin.clone();
    let (inner, outer) = path.split_last().unwrap_or((&"", &[]));
    let member = Member { key: (*inner).to_owned(), origin: origin.clone(), value };
    outer.iter().rev().fold(member, |member, key| Member {
        key: (*key).to_owned(),
        origin: origin.clone(),
        value: Node { value: Value::Object(vec![member]), origin: origin.clone() },
    })
}
