//! Reads the file.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use super::check::Report;
use super::error::{ConfigError, Problem};
use super::node::{Node, Value};
use super::place::{Origin, Place, Source, Wrong, place_in};
use super::{json, toml};

/// A file that is larger is no configuration, but somebody's mistake.
const MAX_BYTES: u64 = 16 << 20;

/// What is in a file that was named somewhere; none if its text is wrong.
pub(super) fn read(name: &str, named: &Origin, report: &mut Report) -> Option<Node> {
    let path = Path::new(name);
    let extension = path.extension().and_then(|extension| extension.to_str()).map(str::to_ascii_lowercase);
    let parse = match extension.as_deref() {
        Some("json") => parse_json,
        Some("toml") => parse_toml,
        _ => return report.fail(named.place(), "", Problem::Extension { file: name.to_owned() }),
    };
    let bytes = match bytes_of(path) {
        Ok(bytes) => bytes,
        Err(source) => {
            let problem = Problem::Unreadable { file: name.to_owned(), source };
            return report.fail(named.place(), "", problem);
        }
    };
    if bytes.len() as u64 > MAX_BYTES {
        let problem = Problem::TooLarge { file: name.to_owned(), max: MAX_BYTES };
        return report.fail(named.place(), "", problem);
    }
    let text = match String::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) => {
            let (end, bytes) = (error.utf8_error().valid_up_to(), error.into_bytes());
            let place = place_in(path, &String::from_utf8_lossy(&bytes[..end]), end);
            return report.fail(place, "", Problem::NotUtf8);
        }
    };
    // Some editors begin a text with a mark that says that it is UTF-8.
    let text = text.strip_prefix('\u{feff}').map(str::to_owned).unwrap_or(text);
    let node = parse(&Arc::new(Source { file: path.to_owned(), text }), report)?;
    report_duplicates(&node, "", report);
    Some(node)
}

fn bytes_of(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(MAX_BYTES + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn parse_json(source: &Arc<Source>, report: &mut Report) -> Option<Node> {
    json::parse(source).map_err(|wrong| report_syntax(source, "JSON", wrong, report)).ok()
}

fn parse_toml(source: &Arc<Source>, report: &mut Report) -> Option<Node> {
    let wrong = match toml::parse(source) {
        Ok(node) => return Some(node),
        Err(wrong) => wrong,
    };
    for wrong in wrong {
        report_syntax(source, "TOML", wrong, report);
    }
    None
}

fn report_syntax(source: &Source, format: &'static str, wrong: Wrong, report: &mut Report) {
    let place = place_in(&source.file, &source.text, wrong.offset);
    let problem = Problem::Syntax { format, what: wrong.what };
    report.errors.push(ConfigError { place, key: String::new(), problem });
}

/// The later of two equal keys would win in silence.
fn report_duplicates(node: &Node, path: &str, report: &mut Report) {
    match &node.value {
        Value::Object(members) => {
            let mut seen: HashMap<&str, &Origin> = HashMap::new();
            for member in members {
                let key = super::check::joined(path, &member.key);
                if let Some(first) = seen.insert(&member.key, &member.origin)
                    && let Place::File { line, .. } = first.place()
                {
                    report.add(member.origin.place(), &key, Problem::Duplicate { first: line });
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
