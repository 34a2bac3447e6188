//! Reads the configuration file into a tree.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use super::entry::{Report, join_key};
use super::error::{ConfigError, ConfigProblem};
use super::location::{Location, Origin, SourceFile, SyntaxError, location_in};
use super::tree::{Node, Value};
use super::{json, toml};

/// Limit of the size of a configuration file. A larger file is most likely a mistake.
const MAX_FILE_BYTES: u64 = 16 << 20;

/// Reads and parses a file. `named_by` is the flag or variable with its path. Returns `None` after reporting an error.
pub(super) fn read(name: &str, named_by: &Origin, report: &mut Report) -> Option<Node> {
    let path = Path::new(name);
    let extension = path.extension().and_then(|extension| extension.to_str()).map(str::to_ascii_lowercase);
    let parse = match extension.as_deref() {
        Some("json") => parse_json,
        Some("toml") => parse_toml,
        _ => return report.fail(named_by.location(), "", ConfigProblem::Extension { file: name.to_owned() }),
    };
    let bytes = match read_bounded(path) {
        Ok(bytes) => bytes,
        Err(source) => {
            let problem = ConfigProblem::Unreadable { file: name.to_owned(), source };
            return report.fail(named_by.location(), "", problem);
        }
    };
    if bytes.len() as u64 > MAX_FILE_BYTES {
        let problem = ConfigProblem::TooLarge { file: name.to_owned(), max: MAX_FILE_BYTES };
        return report.fail(named_by.location(), "", problem);
    }
    let text = match String::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) => {
            let (end, bytes) = (error.utf8_error().valid_up_to(), error.into_bytes());
            let location = location_in(path, &String::from_utf8_lossy(&bytes[..end]), end);
            return report.fail(location, "", ConfigProblem::NotUtf8);
        }
    };
    // Some editors write a byte order mark.
    let text = text.strip_prefix('\u{feff}').map(str::to_owned).unwrap_or(text);
    let node = parse(&Arc::new(SourceFile { file: path.to_owned(), text }), report)?;
    report_duplicates(&node, "", report);
    Some(node)
}

/// Reads at most one byte more than the limit.
fn read_bounded(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn parse_json(source: &Arc<SourceFile>, report: &mut Report) -> Option<Node> {
    json::parse(source).map_err(|error| report_syntax(source, "JSON", error, report)).ok()
}

fn parse_toml(source: &Arc<SourceFile>, report: &mut Report) -> Option<Node> {
    let errors = match toml::parse(source) {
        Ok(node) => return Some(node),
        Err(errors) => errors,
    };
    for error in errors {
        report_syntax(source, "TOML", error, report);
    }
    None
}

fn report_syntax(source: &SourceFile, format: &'static str, error: SyntaxError, report: &mut Report) {
    let location = location_in(&source.file, &source.text, error.offset);
    let problem = ConfigProblem::Syntax { format, message: error.message };
    report.errors.push(ConfigError { location, key: String::new(), problem });
}

/// Reports duplicate keys. Otherwise the last one would silently win.
fn report_duplicates(node: &Node, path: &str, report: &mut Report) {
    match &node.value {
        Value::Object(members) => {
            let mut seen: HashMap<&str, &Origin> = HashMap::new();
            for member in members {
                let key = join_key(path, &member.key);
                if let Some(first) = seen.insert(&member.key, &member.origin)
                    && let Location::File { line, .. } = first.location()
                {
                    report.add(member.origin.location(), &key, ConfigProblem::Duplicate { first: line });
                }
                report_duplicates(&member.value, &key, report);
            }
        }
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                report_duplicates(item, &format!("{path}[{index}]"), report);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}
