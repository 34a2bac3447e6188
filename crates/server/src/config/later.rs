//! Keys of features that this version does not have. Their shape is checked, so that a file which a later version would refuse is
//! refused now, and whoever uses them is told that nothing happens.

use super::check::{Given, Report};
use super::node::Value;
use super::place::Place;

const AUDIT_KEYS: &[&str] = &["tiers", "maxEntries"];
const TIERS: &[(&str, ())] = &[("read", ()), ("write", ()), ("admin", ())];

/// Which of them were asked for, as the last who said something about it did: the warning of each.
#[derive(Default)]
pub(super) struct Later {
    audit: Option<String>,
    rules: Option<String>,
    preload: Option<String>,
    procedures: Option<String>,
}

impl Later {
    pub(super) fn audit(&mut self, given: &Given<'_>, report: &mut Report) {
        let is_on = if let Value::Bool(is_on) = given.node.value {
            is_on
        } else {
            for (key, given) in given.members(report, AUDIT_KEYS) {
                match key {
                    "tiers" => {
                        for tier in given.items(report, "a list of \"read\", \"write\", \"admin\"").unwrap_or_default()
                        {
                            tier.one_of(report, TIERS);
                        }
                    }
                    _ => drop(given.whole(report, 1..=10_000_000)),
                }
            }
            true
        };
        self.audit = is_on.then(|| warning(given, "this version keeps no audit log"));
    }

    pub(super) fn rules(&mut self, given: &Given<'_>, report: &mut Report) {
        if let Some(is_on) = given.flag(report) {
            self.rules = is_on.then(|| warning(given, "this version has no rules"));
        }
    }

    pub(super) fn preload(&mut self, given: &Given<'_>, report: &mut Report) {
        let items = given.items(report, "a list of rules").unwrap_or_default();
        for item in &items {
            is_object(item, report);
        }
        self.preload = (!items.is_empty()).then(|| warning(given, "this version has no rules, and loads none"));
    }

    pub(super) fn procedures(&mut self, given: &Given<'_>, report: &mut Report) {
        let procedures = given.named(report);
        for (_, procedure) in &procedures {
            is_object(procedure, report);
        }
        self.procedures = (!procedures.is_empty()).then(|| warning(given, "this version has no procedures"));
    }

    pub(super) fn finish(self, report: &mut Report) {
        report.warnings.extend([self.audit, self.rules, self.preload, self.procedures].into_iter().flatten());
    }
}

fn warning(given: &Given<'_>, what: &str) -> String {
    match given.place() {
        place @ Place::File { .. } => format!("{place}: {}: {what}; the key is ignored", given.key),
        place => format!("{place}: {what}; it is ignored"),
    }
}

fn is_object(given: &Given<'_>, report: &mut Report) {
    if !matches!(given.node.value, Value::Object(_)) {
        given.wrong::<()>(report, "an object");
    }
}

/// Settings of the built-in identity.
pub(super) const IDENTITY_KEYS: [&str; 5] =
    ["adminSecret", "sessionTtl", "passwordMinLength", "maxSessionsPerUser", "loginRateLimit"];
const LOGIN_KEYS: &[&str] = &["maxAttempts", "windowMs"];

/// Checks a setting of the built-in identity. Returns whether it says anything.
pub(super) fn identity(key: &str, given: &Given<'_>, report: &mut Report) -> bool {
    match key {
        "adminSecret" => return given.optional_secret(report).is_some(),
        "sessionTtl" => drop(given.milliseconds(report, 1)),
        "passwordMinLength" => drop(given.whole(report, 1..=1024)),
        "maxSessionsPerUser" => drop(given.whole(report, 1..=1_000_000)),
        _ => {
            for (key, given) in given.members(report, LOGIN_KEYS) {
                match key {
                    "maxAttempts" => drop(given.whole(report, 1..=1_000_000)),
                    _ => drop(given.milliseconds(report, 1)),
                }
            }
        }
    }
    true
}
