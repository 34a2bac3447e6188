//! Rules that say who may do what, with which rows.
//!
//! A rule only ever allows. What no rule of a session's roles is about is left to the default, so that a rule with `where` can be
//! trusted where the default is to deny: where it is to allow, an operation that the rule does not name sees every row.

use std::sync::Arc;

use serde_json::Value as Json;
use tidewire_store::FilterError;

use super::pattern::Pattern;
use super::row_filter::{Known, Rows};
use super::{Granted, Session};

/// Decides before the rules do.
pub trait PermissionCheck: Send + Sync + 'static {
    /// Whether this session may use an operation on a resource; none leaves it to the rules.
    fn check(&self, session: &Session, operation: &str, resource: &str) -> Option<bool>;
}

/// Rules that say who may do what, with which rows. Without any, everybody may do everything.
///
/// ```
/// use serde_json::json;
/// use tidewire::{Access, DefaultAccess, Permissions, Rule, Session};
///
/// let permissions = Permissions::new(
///     DefaultAccess::Deny,
///     [
///         Rule::new("member", ["store.get", "store.all"]).on_buckets(["harbours"]),
///         Rule::new("member", ["store.*"]).on_buckets(["trips"]).on_rows(json!({"owner": "{{ session.userId }}"}))?,
///     ],
/// );
/// let granted = permissions.for_session(&Session::new("mara", ["member"]));
/// assert_eq!(granted.access("store.get", Some("harbours")), Access::All);
/// assert_eq!(granted.access("store.insert", Some("harbours")), Access::Denied);
/// assert!(matches!(granted.access("store.insert", Some("trips")), Access::Rows(_)));
/// # Ok::<(), tidewire::RuleError>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct Permissions {
    default: DefaultAccess,
    rules: Arc<[Arc<Rule>]>,
}

/// What may be done where no rule is about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum DefaultAccess {
    /// Everything. The default, because without rules the roles' tiers are all there is.
    #[default]
    Allow,
    /// Nothing.
    Deny,
}

/// Allows those in a role something.
#[derive(Debug, Clone, PartialEq)]
pub struct Rule {
    pub(super) role: String,
    pub(super) allow: Vec<Pattern>,
    pub(super) buckets: Option<Vec<String>>,
    pub(super) topics: Option<Vec<Pattern>>,
    rows: Option<Rows>,
}

/// What is wrong with a rule.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RuleError {
    /// It is for nobody.
    #[error("the role is empty: name the role that the rule is for")]
    NoRole,
    /// It allows nothing.
    #[error("the rule allows nothing: name an operation, or *")]
    NothingAllowed,
    /// A pattern that nothing can match.
    #[error("{pattern:?} is no pattern: write *, or a prefix as in store.*, or a whole name as in store.get")]
    Pattern {
        /// As it was written.
        pattern: String,
    },
    /// The rows are for records, and events and facts have none.
    #[error("a rule with a filter of rows is about records, and {about} is not: make it a rule of its own")]
    RowsOfTopics {
        /// What the rule is about besides.
        about: String,
    },
    /// The rows are no filter.
    #[error(transparent)]
    Filter(#[from] FilterError),
    /// There is no such parameter.
    #[error(
        "{text} is no parameter here: there are {{{{ session.userId }}}}, {{{{ session.roles }}}} and \
         {{{{ session.metadata.NAME }}}}, each the whole of its string"
    )]
    UnknownParameter {
        /// As it was written.
        text: String,
    },
    /// A parameter stands where its value can never fit.
    #[error("{field} is compared with {parameter}, where it takes {expected}")]
    UnfitParameter {
        /// As it was written.
        parameter: String,
        /// What is compared.
        field: String,
        /// What would fit.
        expected: &'static str,
    },
    /// A list or object stands where one value belongs.
    #[error("{field} is compared with a list or object, which equals nothing")]
    NotComparable {
        /// What is compared.
        field: String,
    },
}

impl Permissions {
    /// These rules, and what holds where none is about it.
    pub fn new(default: DefaultAccess, rules: impl IntoIterator<Item = Rule>) -> Self {
        Self { default, rules: rules.into_iter().map(Arc::new).collect() }
    }

    /// What a session may do. It is worked out once, at the login, and asked at every request.
    pub fn for_session(&self, session: &Session) -> Granted {
        let mut known = None;
        let own = self.rules.iter().filter(|rule| session.roles.contains(&rule.role)).map(|rule| {
            let rows = rule.rows.as_ref().map(|rows| rows.of(known.get_or_insert_with(|| Known::new(session))));
            (Arc::clone(rule), rows)
        });
        Granted::new(self.default, own)
    }
}

impl Rule {
    /// Allows those in a role the operations that match one of these patterns: `*`, a prefix as in `store.*`, or a whole name.
    pub fn new(role: impl Into<String>, allow: impl IntoIterator<Item = impl AsRef<str>>) -> Self {
        Self { role: role.into(), allow: patterns(allow), buckets: None, topics: None, rows: None }
    }

    /// Only on these buckets. Such a rule does not allow what names no bucket, as `store.stats`.
    #[must_use]
    pub fn on_buckets(self, buckets: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Self { buckets: Some(buckets.into_iter().map(Into::into).collect()), ..self }
    }

    /// Of the operations `rules.*`, only on the topics that match one of these patterns.
    #[must_use]
    pub fn on_topics(self, topics: impl IntoIterator<Item = impl AsRef<str>>) -> Self {
        Self { topics: Some(patterns(topics)), ..self }
    }

    /// Only with the rows that a filter means. It may speak of `{{ session.userId }}`, `{{ session.roles }}` and
    /// `{{ session.metadata.NAME }}`; who lacks what it speaks of gets no row by this rule.
    ///
    /// Such a rule is about records only, and is [checked](Self::check) whole: where the default is to allow, one that is never
    /// met would open what it was to close.
    pub fn on_rows(self, filter: Json) -> Result<Self, RuleError> {
        let rule = Self { rows: Some(Rows::new(filter)?), ..self };
        rule.check()?;
        Ok(rule)
    }

    /// Whether it can be met at all. A rule that cannot is harmless, and surely a mistake: whoever reads rules from a file asks.
    pub fn check(&self) -> Result<(), RuleError> {
        if self.role.is_empty() {
            return Err(RuleError::NoRole);
        }
        if self.allow.is_empty() {
            return Err(RuleError::NothingAllowed);
        }
        let topics = self.topics.iter().flatten();
        if let Some(pattern) = self.allow.iter().chain(topics).find(|pattern| !pattern.is_proper()) {
            return Err(RuleError::Pattern { pattern: pattern.text() });
        }
        if self.rows.is_some() {
            let of_topics = self.allow.iter().map(Pattern::text).find(|text| text.starts_with("rules."));
            if let Some(about) = of_topics.or_else(|| self.topics.as_ref().map(|_| "topics".to_owned())) {
                return Err(RuleError::RowsOfTopics { about });
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
    use serde_json::json;

    use super::*;

    #[test]
    fn a_rule_that_cannot_be_met_can_be_told() {
        for (rule, error) in [
            (Rule::new("", ["*"]), "the role is empty: name the role that the rule is for"),
            (Rule::new("r", [""; 0]), "the rule allows nothing: name an operation, or *"),
            (
                Rule::new("r", ["store.get", "store*"]),
                "\"store*\" is no pattern: write *, or a prefix as in store.*, or a whole name as in store.get",
            ),
            (
                Rule::new("r", ["*"]).on_topics(["*.x"]),
                "\"*.x\" is no pattern: write *, or a prefix as in store.*, or a whole name as in store.get",
            ),
        ] {
            assert_eq!(rule.check().unwrap_err().to_string(), error);
            // With rows, nobody has to ask.
            assert_eq!(rule.on_rows(json!({})).unwrap_err().to_string(), error);
        }
        assert_eq!(Rule::new("r", ["*", "rules.*"]).on_topics(["a.*"]).on_buckets(["b"]).check(), Ok(()));
    }

    #[test]
    fn rows_are_of_records_only() {
        let about = |rule: Rule| match rule.on_rows(json!({"a": 1})) {
            Err(RuleError::RowsOfTopics { about }) => about,
            other => panic!("{other:?}"),
        };
        assert_eq!(about(Rule::new("r", ["store.*", "rules.emit"])), "rules.emit");
        assert_eq!(about(Rule::new("r", ["rules.*"])), "rules.*");
        assert_eq!(about(Rule::new("r", ["*"]).on_topics(["a"])), "topics");
        assert!(Rule::new("r", ["*"]).on_rows(json!({"a": 1})).is_ok());
    }

    #[test]
    fn the_rows_are_checked_when_the_rule_is_made() {
        let rule = |rows| Rule::new("r", ["*"]).on_rows(rows);
        assert!(matches!(rule(json!({"a": {"$regex": "x"}})), Err(RuleError::Filter(_))));
        assert!(matches!(rule(json!({"a": "{{ session.name }}"})), Err(RuleError::UnknownParameter { .. })));
        assert!(rule(json!({"a": "{{ session.metadata.name }}"})).is_ok());
    }
}
