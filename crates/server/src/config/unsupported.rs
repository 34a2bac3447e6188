//! Keys that are reserved for features of later versions.
//!
//! Their values are validated, so that a file that a later version would reject is rejected now. A key that is set has no effect and
//! causes a warning.

use super::entry::{Entry, Report};
use super::tree::Value;

const AUDIT_KEYS: &[&str] = &["tiers", "maxEntries"];
const TIERS: &[(&str, ())] = &[("read", ()), ("write", ()), ("admin", ())];

/// The warnings of the unsupported keys that are set. A later source replaces the warning of an earlier one.
#[derive(Default)]
pub(super) struct UnsupportedKeys {
    audit: Option<String>,
    rules: Option<String>,
    rules_preload: Option<String>,
    procedures: Option<String>,
}

impl UnsupportedKeys {
    pub(super) fn audit(&mut self, entry: &Entry<'_>, report: &mut Report) {
        let is_on = if let Value::Bool(is_on) = entry.node.value {
            is_on
        } else {
            for (key, entry) in entry.members(report, AUDIT_KEYS) {
                match key {
                    "tiers" => {
                        for tier in entry.items(report, "a list of \"read\", \"write\", \"admin\"").unwrap_or_default()
                        {
                            tier.one_of(report, TIERS);
                        }
                    }
                    _ => drop(entry.count(report, 1..=10_000_000)),
                }
            }
            true
        };
        self.audit = is_on.then(|| warning(entry, "the audit log"));
    }

    pub(super) fn rules(&mut self, entry: &Entry<'_>, report: &mut Report) {
        if let Some(is_on) = entry.boolean(report) {
            self.rules = is_on.then(|| warning(entry, "rules"));
        }
    }

    pub(super) fn rules_preload(&mut self, entry: &Entry<'_>, report: &mut Report) {
        let items = entry.items(report, "a list of rules").unwrap_or_default();
        for item in &items {
            require_object(item, report);
        }
        self.rules_preload = (!items.is_empty()).then(|| warning(entry, "rules"));
    }

    pub(super) fn procedures(&mut self, entry: &Entry<'_>, report: &mut Report) {
        let procedures = entry.named_members(report);
        for (_, procedure) in &procedures {
            require_object(procedure, report);
        }
        self.procedures = (!procedures.is_empty()).then(|| warning(entry, "procedures"));
    }

    pub(super) fn finish(self, report: &mut Report) {
        report.warnings.extend([self.audit, self.rules, self.rules_preload, self.procedures].into_iter().flatten());
    }
}

fn warning(entry: &Entry<'_>, feature: &str) -> String {
    entry.warning(&format!("this version does not support {feature}; the setting is ignored"))
}

fn require_object(entry: &Entry<'_>, report: &mut Report) {
    if !matches!(entry.node.value, Value::Object(_)) {
        entry.mismatch::<()>(report, "an object");
    }
}

/// The keys of the built-in identity.
pub(super) const IDENTITY_KEYS: [&str; 4] = ["adminSecret", "sessionTtl", "passwordMinLength", "maxSessionsPerUser"];

/// Checks a key of the built-in identity. Returns whether it is set; an empty secret is not.
pub(super) fn check_identity(key: &str, entry: &Entry<'_>, report: &mut Report) -> bool {
    match key {
        "adminSecret" => return entry.optional_secret(report).is_some(),
        "sessionTtl" => drop(entry.milliseconds(report, 1)),
        "passwordMinLength" => drop(entry.count(report, 1..=1024)),
        _ => drop(entry.count(report, 1..=1_000_000)),
    }
    true
}
