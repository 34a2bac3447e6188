//! Permission rules by role, operation, bucket and row.
//!
//! Rules only grant access. The default applies if no rule of a session's roles covers an operation. So a rule with a row filter is
//! safe only with the default `deny`: with `allow`, an operation that the rule does not name has access to all rows.

use std::sync::Arc;

use serde_json::{Value as Json, json};
use tidewire_store::query::FilterError;

use super::pattern::Pattern;
use super::row_filter::{RowFilter, SessionValues};
use super::{Grants, Session};

/// A permission check of the embedding program, which takes precedence over the rules.
pub trait PermissionCheck: Send + Sync + 'static {
    /// Returns whether a session may use an operation on a resource. `None` leaves the decision to the rules.
    fn check(&self, session: &Session, operation: &str, resource: &str) -> Option<bool>;
}

impl<C: PermissionCheck + ?Sized> PermissionCheck for Arc<C> {
    fn check(&self, session: &Session, operation: &str, resource: &str) -> Option<bool> {
        (**self).check(session, operation, resource)
    }
}

/// The permission rules of a server, and the access where no rule applies.
///
/// ```
/// use serde_json::json;
/// use tidewire::auth::{Access, DefaultAccess, Permissions, Rule, Session};
///
/// let permissions = Permissions::new(
///     DefaultAccess::Deny,
///     [
///         Rule::new("member", ["store.get", "store.all"]).on_buckets(["harbours"]),
///         Rule::new("member", ["store.*"]).on_buckets(["trips"]).on_rows(json!({"owner": "{{ session.userId }}"}))?,
///     ],
/// );
/// let grants = permissions.for_session(&Session::new("mara", ["member"]));
/// assert_eq!(grants.access("store.get", Some("harbours")), Access::All);
/// assert_eq!(grants.access("store.insert", Some("harbours")), Access::Denied);
/// assert!(matches!(grants.access("store.insert", Some("trips")), Access::Rows(_)));
/// # Ok::<(), tidewire::auth::RuleError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Permissions {
    default: DefaultAccess,
    rules: Arc<[Arc<Rule>]>,
}

/// The access if no rule covers an operation. It has no `Default`, because the safe choice depends on the rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum DefaultAccess {
    /// Full access, within the tier of the session.
    Allow,
    /// No access.
    Deny,
}

/// A rule that allows operations to a role, optionally restricted to buckets, topics and rows.
#[derive(Debug, Clone, PartialEq)]
pub struct Rule {
    pub(super) role: String,
    pub(super) allow: Vec<Pattern>,
    pub(super) buckets: Option<Vec<String>>,
    pub(super) topics: Option<Vec<Pattern>>,
    row_filter: Option<RowFilter>,
}

/// Why a rule is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RuleError {
    /// The role is empty.
    #[error("the role of a rule must be a non-empty string")]
    NoRole,
    /// The list of operations is empty.
    #[error("the rule allows no operation; list at least one, or use \"*\"")]
    NothingAllowed,
    /// A pattern that cannot match any name.
    #[error(
        "invalid pattern {pattern:?}; expected \"*\", a prefix such as \"store.*\" or a name such as \"store.get\""
    )]
    Pattern {
        /// The pattern.
        pattern: String,
    },
    /// A row filter on topics, which have no records.
    #[error("a row filter applies to records only, not to {target}; use a separate rule for {target}")]
    RowFilterOnTopics {
        /// The operation or `topics`.
        target: String,
    },
    /// The row filter is invalid.
    #[error(transparent)]
    Filter(#[from] FilterError),
    /// A parameter of the row filter does not exist.
    #[error(
        "unknown parameter {text}; use {{{{ session.userId }}}}, {{{{ session.roles }}}} or \
         {{{{ session.metadata.NAME }}}} as the whole string"
    )]
    UnknownParameter {
        /// The parameter.
        text: String,
    },
    /// A parameter of the row filter has the wrong type for its operator.
    #[error("expected {expected} for `{field}`, got {parameter}")]
    ParameterType {
        /// The parameter.
        parameter: String,
        /// The field that is compared.
        field: String,
        /// The type that the operator expects.
        expected: &'static str,
    },
    /// A field is compared with a list or object, which never equals a value.
    #[error("expected a string, number, boolean or null for `{field}`, got a list or object")]
    NotComparable {
        /// The field that is compared.
        field: String,
    },
}

impl Permissions {
    /// Creates permissions from rules and a default.
    pub fn new(default: DefaultAccess, rules: impl IntoIterator<Item = Rule>) -> Self {
        Self { default, rules: rules.into_iter().map(Arc::new).collect() }
    }

    /// Creates permissions without rules: a session may do what its tier allows, on all rows.
    pub fn tiers_only() -> Self {
        Self::new(DefaultAccess::Allow, [])
    }

    /// Returns the roles in the rules, without duplicates, in order.
    pub(crate) fn roles(&self) -> Vec<&str> {
        let mut roles: Vec<&str> = Vec::new();
        for rule in &*self.rules {
            if !roles.contains(&&*rule.role) {
                roles.push(&rule.role);
            }
        }
        roles
    }

    /// Returns the buckets in the rules, without duplicates, in order.
    pub(crate) fn buckets(&self) -> Vec<&str> {
        let mut buckets: Vec<&str> = Vec::new();
        for bucket in self.rules.iter().flat_map(|rule| rule.buckets.iter().flatten()) {
            if !buckets.contains(&&**bucket) {
                buckets.push(bucket);
            }
        }
        buckets
    }

    /// Returns whether the rules restrict sessions, so that clients to which they do not apply have more access.
    pub(crate) fn restrict_anything(&self) -> bool {
        self.default == DefaultAccess::Deny || self.rules.iter().any(|rule| rule.row_filter.is_some())
    }

    /// Returns the permissions of a session. The server computes them once, at login.
    pub fn for_session(&self, session: &Session) -> Grants {
        let mut values = None;
        let own = self.rules.iter().enumerate().filter(|(_, rule)| session.roles.contains(&rule.role));
        let own = own.map(|(index, rule)| {
            let values = &mut values;
            let resolve =
                |filter: &RowFilter| filter.resolve(values.get_or_insert_with(|| SessionValues::new(session)));
            (index, Arc::clone(rule), rule.row_filter.as_ref().map(resolve))
        });
        Grants::new(self.default, own)
    }
}

impl Rule {
    /// Creates a rule that allows a role the operations that match one of the patterns: `*`, a prefix such as `store.*`, or a name
    /// such as `store.get`.
    pub fn new(role: impl Into<String>, allow: impl IntoIterator<Item = impl AsRef<str>>) -> Self {
        Self { role: role.into(), allow: patterns(allow), buckets: None, topics: None, row_filter: None }
    }

    /// Restricts the rule to these buckets. It then does not allow operations without a bucket, such as `store.stats`.
    #[must_use]
    pub fn on_buckets(self, buckets: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Self { buckets: Some(buckets.into_iter().map(Into::into).collect()), ..self }
    }

    /// Restricts `rules.*` operations to topics that match one of the patterns.
    #[must_use]
    pub fn on_topics(self, topics: impl IntoIterator<Item = impl AsRef<str>>) -> Self {
        Self { topics: Some(patterns(topics)), ..self }
    }

    /// Restricts the rule to rows that match a filter. The filter may contain the parameters `{{ session.userId }}`,
    /// `{{ session.roles }}` and `{{ session.metadata.NAME }}`. If a session lacks one of the values, the rule allows no rows.
    ///
    /// # Errors
    ///
    /// Returns an error if the filter or the rest of the rule is invalid (see [`check`](Self::check)), or if the rule covers topics.
    pub fn on_rows(self, filter: Json) -> Result<Self, RuleError> {
        let rule = Self { row_filter: Some(RowFilter::new(filter)?), ..self };
        rule.check()?;
        Ok(rule)
    }

    pub(crate) fn role(&self) -> &str {
        &self.role
    }

    /// Returns the rule as in a configuration file.
    pub(crate) fn to_json(&self) -> Json {
        let texts = |patterns: &Vec<Pattern>| patterns.iter().map(Pattern::text).collect::<Vec<_>>();
        let mut json = json!({"role": self.role, "allow": texts(&self.allow)});
        if let Some(buckets) = &self.buckets {
            json["buckets"] = json!(buckets);
        }
        if let Some(topics) = &self.topics {
            json["topics"] = json!(texts(topics));
        }
        if let Some(row_filter) = self.row_filter() {
            json["where"] = row_filter.clone();
        }
        json
    }

    /// Returns the row filter with its parameters.
    pub(crate) fn row_filter(&self) -> Option<&Json> {
        self.row_filter.as_ref().map(RowFilter::json)
    }

    /// Checks that the rule can match. A rule that cannot is harmless but probably a mistake, so the rules in a configuration are
    /// checked.
    ///
    /// # Errors
    ///
    /// Returns the first error of the rule.
    pub fn check(&self) -> Result<(), RuleError> {
        if self.role.is_empty() {
            return Err(RuleError::NoRole);
        }
        if self.allow.is_empty() {
            return Err(RuleError::NothingAllowed);
        }
        let topics = self.topics.iter().flatten();
        if let Some(pattern) = self.allow.iter().chain(topics).find(|pattern| !pattern.is_valid()) {
            return Err(RuleError::Pattern { pattern: pattern.text() });
        }
        if self.row_filter.is_some() {
            let operation = self.allow.iter().map(Pattern::text).find(|text| text.starts_with("rules."));
            if let Some(target) = operation.or_else(|| self.topics.as_ref().map(|_| "topics".to_owned())) {
                return Err(RuleError::RowFilterOnTopics { target });
            }
        }
        Ok(())
    }
}

fn patterns(texts: impl IntoIterator<Item = impl AsRef<str>>) -> Vec<Pattern> {
    texts.into_iter().map(|text| Pattern::new(text.as_ref())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rule_that_cannot_match_is_invalid() {
        for (rule, error) in [
            (Rule::new("", ["*"]), "the role of a rule must be a non-empty string"),
            (Rule::new("r", [""; 0]), "the rule allows no operation; list at least one, or use \"*\""),
            (
                Rule::new("r", ["store.get", "store*"]),
                "invalid pattern \"store*\"; expected \"*\", a prefix such as \"store.*\" or a name such as \"store.get\"",
            ),
            (
                Rule::new("r", ["*"]).on_topics(["*.x"]),
                "invalid pattern \"*.x\"; expected \"*\", a prefix such as \"store.*\" or a name such as \"store.get\"",
            ),
        ] {
            assert_eq!(rule.check().unwrap_err().to_string(), error);
            // A row filter implies the check.
            assert_eq!(rule.on_rows(json!({})).unwrap_err().to_string(), error);
        }
        assert_eq!(Rule::new("r", ["*", "rules.*"]).on_topics(["a.*"]).on_buckets(["b"]).check(), Ok(()));
    }

    #[test]
    fn row_filter_on_topics_is_rejected() {
        let target = |rule: Rule| match rule.on_rows(json!({"a": 1})) {
            Err(RuleError::RowFilterOnTopics { target }) => target,
            other => panic!("{other:?}"),
        };
        assert_eq!(target(Rule::new("r", ["store.*", "rules.emit"])), "rules.emit");
        assert_eq!(target(Rule::new("r", ["rules.*"])), "rules.*");
        assert_eq!(target(Rule::new("r", ["*"]).on_topics(["a"])), "topics");
        assert!(Rule::new("r", ["*"]).on_rows(json!({"a": 1})).is_ok());
    }

    #[test]
    fn row_filter_is_checked_when_the_rule_is_created() {
        let rule = |filter| Rule::new("r", ["*"]).on_rows(filter);
        assert!(matches!(rule(json!({"a": {"$regex": "x"}})), Err(RuleError::Filter(_))));
        assert!(matches!(rule(json!({"a": "{{ session.name }}"})), Err(RuleError::UnknownParameter { .. })));
        assert!(rule(json!({"a": "{{ session.metadata.name }}"})).is_ok());
    }
}
