//! The access report of `--check`: the operations that each kind of client may use.
//!
//! Every line is derived from the explanation of an operation, so it agrees with the decisions of the server.

use std::fmt::Write as _;

use super::Config;
use crate::Explanation;
use crate::auth::{Session, Tier};
use crate::ops::table::{OPERATIONS, Operation, Scope};

const ALL_BUCKETS: &str = "all buckets";

/// A group of operations that are allowed on the same buckets and rows.
struct Group {
    operations: Vec<&'static str>,
    extent: String,
}

impl Config {
    /// Returns a report for users on what clients without a login, a session without roles, and each role may do.
    pub fn access_report(&self) -> String {
        if self.server.auth.is_none() {
            return "Auth is off: every client may do everything.\n".to_owned();
        }
        let mut report = "Access of clients (`tidewire check-access` explains each decision):\n".to_owned();
        self.describe("clients without a login", None, &mut report);
        self.describe("a session without roles", Some(&Session::new("", [""; 0])), &mut report);
        for role in &self.roles {
            self.describe(&format!("role \"{role}\""), Some(&Session::new("", [role])), &mut report);
        }
        report
    }

    fn describe(&self, client: &str, session: Option<&Session>, report: &mut String) {
        let explain = |operation: &str, bucket: Option<&str>| self.server.explain(session, operation, bucket).ok();
        // The tier of the client is the same for every operation.
        let Some(any) = explain("store.get", None) else { return };
        let tier = any.tier.map_or_else(String::new, |tier| format!("tier {}, ", tier.name()));
        // Writing to a string cannot fail.
        let _ = writeln!(report, "\n{client} ({tier}{})", any.tier_source);
        for tier in Tier::ALL {
            let mut groups: Vec<Group> = Vec::new();
            let mut names = Vec::new();
            // Operations on the client's own connection are always allowed.
            let is_listed = |operation: &&Operation| {
                operation.tier == Some(tier) && operation.is_implemented() && operation.scope != Scope::Connection
            };
            for operation in OPERATIONS.iter().filter(is_listed) {
                names.push(operation.name);
                let extent = if operation.scope.names_bucket() {
                    self.buckets_of(|bucket| explain(operation.name, bucket))
                } else {
                    explain(operation.name, None).filter(|explanation| explanation.is_allowed).map(|_| String::new())
                };
                let Some(extent) = extent else { continue };
                match groups.iter_mut().find(|group| group.extent == extent) {
                    Some(group) => group.operations.push(operation.name),
                    None => groups.push(Group { operations: vec![operation.name], extent }),
                }
            }
            write_groups(tier, &groups, &names, report);
        }
    }

    /// Describes the buckets and rows on which an operation is allowed; `None` if it is denied.
    fn buckets_of(&self, explain: impl Fn(Option<&str>) -> Option<Explanation>) -> Option<String> {
        let permissions = self.server.auth.as_ref().map(|auth| &auth.permissions);
        let named = permissions.map(|permissions| permissions.buckets()).unwrap_or_default();
        let others = explain(None).and_then(|explanation| rows_of(&explanation));
        let of = |bucket: &str| explain(Some(bucket)).and_then(|explanation| rows_of(&explanation));
        let named: Vec<(&str, Option<String>)> = named.into_iter().map(|bucket| (bucket, of(bucket))).collect();
        if named.iter().all(|(_, rows)| *rows == others) {
            return others.map(|rows| format!("{ALL_BUCKETS}{rows}"));
        }
        let allowed = named.iter().filter_map(|(bucket, rows)| rows.as_ref().map(|rows| format!("{bucket}{rows}")));
        let others = others.map(|rows| format!("other buckets{rows}"));
        let parts: Vec<String> = allowed.chain(others).collect();
        (!parts.is_empty()).then(|| parts.join("; "))
    }
}

/// Describes the rows on which an operation is allowed; `None` if it is denied. The filters have unresolved parameters, because there
/// is no user.
fn rows_of(explanation: &Explanation) -> Option<String> {
    if !explanation.is_allowed {
        return None;
    }
    if explanation.row_filter.is_none() {
        return Some(String::new());
    }
    let filters = explanation.rules.iter().filter_map(|(_, rule)| rule.get("where").map(ToString::to_string));
    Some(format!(" where {}", filters.collect::<Vec<_>>().join(" or ")))
}

fn write_groups(tier: Tier, groups: &[Group], names: &[&str], report: &mut String) {
    let name = tier.name();
    let is_unrestricted = |group: &Group| group.extent.is_empty() || group.extent == ALL_BUCKETS;
    let allowed: usize = groups.iter().map(|group| group.operations.len()).sum();
    if groups.is_empty() || (allowed == names.len() && groups.iter().all(is_unrestricted)) {
        let _ = writeln!(report, "  {name:<5}  {}", if groups.is_empty() { "nothing" } else { "everything" });
        return;
    }
    for Group { operations, extent } in groups {
        let others: Vec<&str> = names.iter().copied().filter(|name| !operations.contains(name)).collect();
        let listed = match others.len() {
            0 => "all operations".to_owned(),
            count if count < operations.len() => format!("all operations except {}", others.join(", ")),
            _ => operations.join(", "),
        };
        let separator = if extent.is_empty() { "" } else { ": " };
        let _ = writeln!(report, "  {name:<5}  {listed}{separator}{extent}");
    }
}
