//! Reads `auth.permissions`.

use serde_json::Value as Json;

use super::check::{Given, Report, nearest};
use super::node::Value;
use crate::ops::table::Operation;
use crate::{DefaultAccess, Permissions, Rule, RuleError};

pub(super) const KEYS: &[&str] = &["default", "rules"];
pub(super) const RULE_KEYS: &[&str] = &["role", "allow", "buckets", "topics", "where"];

const ROLE: &str = "the name of a role";
const OPERATIONS: &str = "an operation, or a list of them, each such as \"store.get\", \"store.*\" or \"*\"";

pub(super) fn permissions(given: &Given<'_>, report: &mut Report) -> Permissions {
    let (mut default, mut rules) = (DefaultAccess::default(), Vec::new());
    for (key, given) in given.members(report, KEYS) {
        if key == "default" {
            let words = [("allow", DefaultAccess::Allow), ("deny", DefaultAccess::Deny)];
            default = given.one_of(report, &words).unwrap_or_default();
        } else {
            let items = given.items(report, "a list of rules").unwrap_or_default();
            rules = items.iter().filter_map(|given| rule(given, report)).collect();
        }
    }
    Permissions::new(default, rules)
}

fn rule(given: &Given<'_>, report: &mut Report) -> Option<Rule> {
    let members = given.members(report, RULE_KEYS);
    let member = |name: &str| members.iter().find(|(key, _)| *key == name).map(|(_, given)| given);
    if matches!(given.node.value, Value::Object(_)) {
        for (key, expected) in [("role", ROLE), ("allow", OPERATIONS)] {
            if member(key).is_none() {
                given.missing::<()>(report, key, expected);
            }
        }
    }
    let role = member("role").and_then(|given| given.text(report, ROLE));
    let allow = member("allow").and_then(|given| operations(given, report));
    let buckets = member("buckets").map(|given| given.texts(report, "a list of buckets"));
    let topics = member("topics").map(|given| topics(given, report));
    let rows = member("where").map(|given| rows(given, report));
    let mut rule = Rule::new(role?, texts(allow.as_ref()?));
    if let Some(buckets) = buckets {
        rule = rule.on_buckets(buckets?);
    }
    if let Some(topics) = &topics {
        rule = rule.on_topics(texts(topics.as_ref()?));
    }
    if let Err(error) = rule.check() {
        let patterns = allow.iter().chain(topics.iter().flatten()).flatten();
        let wrong = match &error {
            RuleError::Pattern { pattern } => {
                patterns.clone().find(|(text, _)| text == pattern).map(|(_, given)| given)
            }
            RuleError::NothingAllowed => member("allow"),
            _ => None,
        };
        return wrong.unwrap_or(given).fail(report, error.into());
    }
    for (pattern, given) in allow.iter().flatten() {
        warn_of_unknown(pattern, given, report);
    }
    let (Some(rows), Some(given)) = (rows, member("where")) else { return Some(rule) };
    rule.on_rows(rows?).map_err(|error| given.reject(report, error.into())).ok()
}

/// A filter that a rule can have, whatever else is wrong with this one.
fn rows(given: &Given<'_>, report: &mut Report) -> Option<Json> {
    let json = given.node.json();
    let checked = Rule::new("any", ["*"]).on_rows(json.clone());
    checked.map_err(|error| given.reject(report, error.into())).ok().map(|_| json)
}

/// Texts of a list, each with its place.
type Placed<'n> = Vec<(&'n str, Given<'n>)>;

fn operations<'n>(given: &Given<'n>, report: &mut Report) -> Option<Placed<'n>> {
    match given.node.value {
        Value::String(_) => placed(vec![given.clone()], report, OPERATIONS),
        _ => placed(given.items(report, OPERATIONS)?, report, OPERATIONS),
    }
}

fn topics<'n>(given: &Given<'n>, report: &mut Report) -> Option<Placed<'n>> {
    placed(given.items(report, "a list of topics")?, report, "a topic, such as \"order.*\"")
}

fn placed<'n>(items: Vec<Given<'n>>, report: &mut Report, expected: &str) -> Option<Placed<'n>> {
    // All of them are looked at, also if one is wrong.
    let texts: Vec<_> = items.into_iter().map(|item| Some((item.text(report, expected)?, item))).collect();
    texts.into_iter().collect()
}

fn texts<'p>(placed: &'p Placed<'_>) -> impl Iterator<Item = &'p str> {
    placed.iter().map(|(text, _)| *text)
}

/// It may be an operation of a later version, or one that was written wrong.
fn warn_of_unknown(pattern: &str, given: &Given<'_>, report: &mut Report) {
    let mut names = Operation::ALL.iter().map(|operation| operation.name());
    if let Some(stem) = pattern.strip_suffix('*') {
        if !names.any(|name| name.starts_with(stem)) {
            given.warn(report, &format!("no operation of this version begins with \"{stem}\""));
        }
    } else if !names.clone().any(|name| name == pattern) {
        let nearest = nearest(pattern, names).unwrap_or_default();
        given.warn(report, &format!("\"{pattern}\" is no operation of this version; the nearest one is \"{nearest}\""));
    }
}
