//! What the environment and the flags say, in the shape of a file: one check is for all of them.

use std::ffi::OsString;

use super::check::Report;
use super::error::Problem;
use super::flags::Flags;
use super::node::{Member, Node, Value};
use super::place::Origin;

/// Looks a variable up.
pub(super) type Environment<'e> = &'e dyn Fn(&str) -> Option<OsString>;

/// What the environment and the flags say.
pub(super) struct Layers {
    /// The name of the file, and who named it.
    pub(super) file: Option<(String, Origin)>,
    pub(super) check: bool,
    /// Settings, in the order in which later ones win.
    pub(super) settings: [Node; 2],
}

/// How the text of a flag or variable is read.
#[derive(Clone, Copy)]
enum Form {
    Text,
    Number,
    List,
}

impl Layers {
    pub(super) fn of(flags: &Flags, environment: Environment<'_>, report: &mut Report) -> Self {
        let values: [(&str, &[&str], Form, &Option<String>); 14] = [
            ("name", &["name"], Form::Text, &flags.name),
            ("grace", &["shutdownGraceMs"], Form::Number, &flags.grace),
            ("port", &["port"], Form::Number, &flags.port),
            ("host", &["host"], Form::Text, &flags.host),
            ("path", &["path"], Form::Text, &flags.path),
            ("tls-cert", &["tls", "cert"], Form::Text, &flags.tls_cert),
            ("tls-key", &["tls", "key"], Form::Text, &flags.tls_key),
            ("engine", &["engine"], Form::Text, &flags.engine),
            ("data-dir", &["dataDir"], Form::Text, &flags.data_dir),
            ("durability", &["durability"], Form::Text, &flags.durability),
            ("admin-secret", &["auth", "adminSecret"], Form::Text, &flags.admin_secret),
            ("allowed-origins", &["allowedOrigins"], Form::List, &flags.allowed_origins),
            ("max-connections-per-ip", &["maxConnectionsPerIp"], Form::Number, &flags.max_connections_per_ip),
            ("config", &[], Form::Text, &flags.config),
        ];
        // With what each of them means when it is on.
        let switches: [(&str, &[&str], bool, bool); 5] = [
            ("auth", &["auth", "builtIn"], true, flags.auth),
            ("no-rules", &["rules"], false, flags.no_rules),
            ("audit", &["audit"], true, flags.audit),
            ("no-error-details", &["exposeErrorDetails"], false, flags.no_error_details),
            ("check", &[], true, flags.check),
        ];

        let (mut variables, mut flagged) = (Vec::new(), Vec::new());
        let (mut file, mut check) = (None, false);
        for (name, path, form, value) in values {
            let variable = variable_of(name);
            let text = text_of(&variable, environment, report).map(|text| (text, Origin::Variable(variable)));
            let flag = value.clone().map(|text| (text, Origin::Flag(format!("--{name}"))));
            if path.is_empty() {
                file = flag.or(text);
                continue;
            }
            variables.extend(text.map(|(text, origin)| nested(path, form.node(&text, origin))));
            flagged.extend(flag.map(|(text, origin)| nested(path, form.node(&text, origin))));
        }
        for (name, path, meaning, is_given) in switches {
            let variable = variable_of(name);
            let text = text_of(&variable, environment, report);
            let is_on = text.and_then(|text| switch(&text, &variable, report));
            if path.is_empty() {
                check = is_given || is_on.unwrap_or(false);
                continue;
            }
            let node = |is_on: bool, origin| nested(path, Node { value: Value::Bool(is_on == meaning), origin });
            variables.extend(is_on.map(|is_on| node(is_on, Origin::Variable(variable))));
            flagged.extend(is_given.then(|| node(true, Origin::Flag(format!("--{name}")))));
        }
        // Nobody is told of the place of a whole layer: it is an object, as it has to be.
        let layer = |members, name: &str| Node { value: Value::Object(members), origin: Origin::Flag(name.to_owned()) };
        Self { file, check, settings: [layer(variables, "the environment"), layer(flagged, "the flags")] }
    }
}

impl Form {
    fn node(self, text: &str, origin: Origin) -> Node {
        let string = |text: &str| Value::String(text.to_owned());
        let value = match self {
            Self::Text => string(text),
            // What is no number stays a text, and the check says so.
            Self::Number => text.trim().parse().map_or_else(|_| string(text), Value::Number),
            Self::List => {
                let items = text.split(',').map(str::trim).filter(|item| !item.is_empty());
                Value::Array(items.map(|item| Node { value: string(item), origin: origin.clone() }).collect())
            }
        };
        Node { value, origin }
    }
}

fn variable_of(flag: &str) -> String {
    format!("TIDEWIRE_{}", flag.to_uppercase().replace('-', "_"))
}

/// The value of a variable. An empty one is as good as none: many a shell cannot take one away.
fn text_of(variable: &str, environment: Environment<'_>, report: &mut Report) -> Option<String> {
    let value = environment(variable).filter(|value| !value.is_empty())?;
    match value.into_string() {
        Ok(text) => Some(text),
        Err(_) => report.fail(Origin::Variable(variable.to_owned()).place(), "", Problem::NotUtf8),
    }
}

fn switch(text: &str, variable: &str, report: &mut Report) -> Option<bool> {
    match text.trim().to_ascii_lowercase().as_str() {
        "1" | "true" | "yes" | "on" => Some(true),
        "0" | "false" | "no" | "off" => Some(false),
        _ => {
            let found = serde_json::Value::from(text).to_string();
            let problem = Problem::Expected { expected: "true or false (1 or 0)".to_owned(), found };
            report.fail(Origin::Variable(variable.to_owned()).place(), "", problem)
        }
    }
}

/// A member of the root that leads to a value.
fn nested(path: &[&str], value: Node) -> Member {
    let origin = value.origin.clone();
    let (inner, outer) = path.split_last().unwrap_or((&"", &[]));
    let member = Member { key: (*inner).to_owned(), origin: origin.clone(), value };
    outer.iter().rev().fold(member, |member, key| Member {
        key: (*key).to_owned(),
        origin: origin.clone(),
        value: Node { value: Value::Object(vec![member]), origin: origin.clone() },
    })
}
