//! Reads `auth.permissions` into [`Permissions`].

use serde_json::Value as Json;

use super::entry::{Entry, Report, closest};
use super::tree::Value;
use crate::auth::{DefaultAccess, Permissions, Rule, RuleError};
use crate::ops::table;

pub(super) const KEYS: &[&str] = &["default", "rules"];
pub(super) const RULE_KEYS: &[&str] = &["role", "allow", "buckets", "topics", "where"];

const EXPECTED_ROLE: &str = "the name of a role";
const EXPECTED_ALLOW: &str = "an operation or a list of operations, such as \"store.get\", \"store.*\" or \"*\"";
const EXPECTED_DEFAULT: &str = "\"deny\" or \"allow\": add \"default\": \"deny\" to allow only what the rules allow";

pub(super) fn permissions(entry: &Entry<'_>, report: &mut Report) -> Permissions {
    let members = entry.members(report, KEYS);
    let (mut default, mut rules) = (None, Vec::new());
    if matches!(entry.node.value, Value::Object(_)) && !members.iter().any(|(key, _)| *key == "default") {
        entry.missing::<()>(report, "default", EXPECTED_DEFAULT);
    }
    for (key, entry) in members {
        if key == "default" {
            default = entry.one_of(report, &[("allow", DefaultAccess::Allow), ("deny", DefaultAccess::Deny)]);
        } else {
            let items = entry.items(report, "a list of rules").unwrap_or_default();
            rules = items.iter().filter_map(|entry| rule(entry, report)).collect();
        }
    }
    // If the default is invalid, an error has been reported, and the result is not used.
    Permissions::new(default.unwrap_or(DefaultAccess::Deny), rules)
}

fn rule(entry: &Entry<'_>, report: &mut Report) -> Option<Rule> {
    let members = entry.members(report, RULE_KEYS);
    let member = |name: &str| members.iter().find(|(key, _)| *key == name).map(|(_, entry)| entry);
    if matches!(entry.node.value, Value::Object(_)) {
        for (key, expected) in [("role", EXPECTED_ROLE), ("allow", EXPECTED_ALLOW)] {
            if member(key).is_none() {
                entry.missing::<()>(report, key, expected);
            }
        }
    }
    let role = member("role").and_then(|entry| entry.text(report, EXPECTED_ROLE));
    let allow = member("allow").and_then(|entry| operations(entry, report));
    let buckets = member("buckets").map(|entry| entry.texts(report, "a list of buckets"));
    let topics = member("topics").map(|entry| topics(entry, report));
    let row_filter = member("where").map(|entry| row_filter(entry, report));
    let mut rule = Rule::new(role?, texts(allow.as_ref()?));
    if let Some(buckets) = buckets {
        rule = rule.on_buckets(buckets?);
    }
    if let Some(topics) = &topics {
        rule = rule.on_topics(texts(topics.as_ref()?));
    }
    if let Err(error) = rule.check() {
        let patterns = allow.iter().chain(topics.iter().flatten()).flatten();
        let invalid_entry = match &error {
            RuleError::Pattern { pattern } => {
                patterns.clone().find(|(text, _)| text == pattern).map(|(_, entry)| entry)
            }
            RuleError::NothingAllowed => member("allow"),
            _ => None,
        };
        return invalid_entry.unwrap_or(entry).fail(report, error.into());
    }
    for (pattern, entry) in allow.iter().flatten() {
        warn_about_unknown(pattern, entry, report);
    }
    let (Some(row_filter), Some(entry)) = (row_filter, member("where")) else { return Some(rule) };
    rule.on_rows(row_filter?).map_err(|error| entry.reject(report, error.into())).ok()
}

/// Checks a row filter on its own, so that its errors are reported even if the rest of the rule is invalid.
fn row_filter(entry: &Entry<'_>, report: &mut Report) -> Option<Json> {
    let json = entry.node.json();
    let checked = Rule::new("any", ["*"]).on_rows(json.clone());
    checked.map_err(|error| entry.reject(report, error.into())).ok().map(|_| json)
}

/// The strings of a list, each with its entry.
type Texts<'n> = Vec<(&'n str, Entry<'n>)>;

fn operations<'n>(entry: &Entry<'n>, report: &mut Report) -> Option<Texts<'n>> {
    match entry.node.value {
        Value::String(_) => read_texts(vec![entry.clone()], report, EXPECTED_ALLOW),
        _ => read_texts(entry.items(report, EXPECTED_ALLOW)?, report, EXPECTED_ALLOW),
    }
}

fn topics<'n>(entry: &Entry<'n>, report: &mut Report) -> Option<Texts<'n>> {
    read_texts(entry.items(report, "a list of topics")?, report, "a topic, such as \"order.*\"")
}

fn read_texts<'n>(items: Vec<Entry<'n>>, report: &mut Report, expected: &str) -> Option<Texts<'n>> {
    // Collected first, so that all errors of the list are reported.
    let texts: Vec<_> = items.into_iter().map(|item| Some((item.text(report, expected)?, item))).collect();
    texts.into_iter().collect()
}

fn texts<'p>(texts: &'p Texts<'_>) -> impl Iterator<Item = &'p str> {
    texts.iter().map(|(text, _)| *text)
}

/// Warns about a pattern that matches no operation. It is not an error, because it may be for a later version.
fn warn_about_unknown(pattern: &str, entry: &Entry<'_>, report: &mut Report) {
    let mut names = table::OPERATIONS.iter().map(|operation| operation.name);
    if let Some(prefix) = pattern.strip_suffix('*') {
        if !names.any(|name| name.starts_with(prefix)) {
            report.warnings.push(entry.warning(&format!("no operation starts with \"{prefix}\"")));
        }
    } else if !names.clone().any(|name| name == pattern) {
        let suggestion = closest(pattern, names).map(|name| format!("; did you mean \"{name}\"?"));
        let suggestion = suggestion.unwrap_or_default();
        report.warnings.push(entry.warning(&format!("unknown operation \"{pattern}\"{suggestion}")));
    }
}
