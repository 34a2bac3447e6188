//! The permissions of one session: the rules of its roles, with its values substituted.

use std::sync::Arc;

use tidewire_store::Filter;

use super::{DefaultAccess, Rule};

/// The permissions of one session: the rules of its roles, with its values substituted. A clone shares the rules.
///
/// Covers sessions only. Anonymous clients, tiers, `auth.*` and `store.unsubscribe` are checked elsewhere.
#[derive(Debug, Clone)]
pub struct Grants {
    default: DefaultAccess,
    grants: Arc<[Grant]>,
}

/// A rule of one of the session's roles.
#[derive(Debug)]
pub(crate) struct Grant {
    /// The zero-based index of the rule in the list of rules.
    pub(crate) index: usize,
    pub(crate) rule: Arc<Rule>,
    /// `None` means all rows.
    row_filter: Option<Filter>,
}

/// The access of a session to a bucket with an operation.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Access {
    /// No access.
    Denied,
    /// Full access.
    All,
    /// Access to the rows that match the filter. Operations that affect all rows, such as `store.stats` and `store.dropBucket`, are
    /// denied.
    Rows(Filter),
}

impl Grants {
    pub(super) fn new(default: DefaultAccess, rules: impl Iterator<Item = (usize, Arc<Rule>, Option<Filter>)>) -> Self {
        let grants = rules.map(|(index, rule, row_filter)| Grant {
            index,
            rule,
            row_filter: row_filter.filter(|filter| !filter.is_everything()),
        });
        Self { default, grants: grants.collect() }
    }

    /// Returns the access to a bucket with an operation; `None` for an operation without a bucket. For an operation on several
    /// buckets, call this for each of them.
    pub fn access(&self, operation: &str, bucket: Option<&str>) -> Access {
        self.rule_access(operation, bucket).unwrap_or_else(|| self.default_access())
    }

    /// Returns the access where no rule applies.
    pub(crate) fn default_access(&self) -> Access {
        match self.default {
            DefaultAccess::Allow => Access::All,
            DefaultAccess::Deny => Access::Denied,
        }
    }

    /// Returns the access by the rules alone, or `None` if no rule applies.
    pub(crate) fn rule_access(&self, operation: &str, bucket: Option<&str>) -> Option<Access> {
        if is_topic_operation(operation) {
            return self.rules_allow_topic(operation, "*").then_some(Access::All);
        }
        let mut filter: Option<Filter> = None;
        for grant in self.matching(operation, bucket) {
            let Some(row_filter) = &grant.row_filter else { return Some(Access::All) };
            filter = Some(match filter {
                None => row_filter.clone(),
                Some(filter) => Filter::any_of([filter, row_filter.clone()]),
            });
        }
        filter.map(Access::Rows)
    }

    /// Returns the rules that apply to an operation on a bucket.
    pub(crate) fn matching<'a>(&'a self, operation: &str, bucket: Option<&str>) -> impl Iterator<Item = &'a Grant> {
        self.grants.iter().filter(move |grant| grant.covers(operation) && grant.covers_bucket(operation, bucket))
    }

    /// Returns whether a `rules.*` operation is allowed on a topic, key or pattern; `*` if the request has none.
    ///
    /// A requested pattern is compared literally: a rule for `orders.*` allows subscribing to `orders.*`, but not to `*`.
    pub fn topic_access(&self, operation: &str, topic: &str) -> bool {
        self.default == DefaultAccess::Allow || self.rules_allow_topic(operation, topic)
    }

    /// Returns whether the rules alone allow a `rules.*` operation on a topic.
    pub(crate) fn rules_allow_topic(&self, operation: &str, topic: &str) -> bool {
        self.matching_topic(operation, topic).next().is_some()
    }

    /// Returns the rules that allow a `rules.*` operation on a topic.
    pub(crate) fn matching_topic<'a>(&'a self, operation: &str, topic: &str) -> impl Iterator<Item = &'a Grant> {
        let is_allowed = move |grant: &Grant| match &grant.rule.topics {
            Some(topics) => topics.iter().any(|pattern| pattern.matches(topic)),
            None => grant.rule.buckets.is_none(),
        };
        self.grants
            .iter()
            .filter(move |grant| grant.covers(operation) && grant.row_filter.is_none() && is_allowed(grant))
    }

    /// Returns whether an operation is allowed on at least one bucket or topic. If not, a request with invalid parameters fails with
    /// `FORBIDDEN` instead of the parameter error.
    pub fn may_ever(&self, operation: &str) -> bool {
        self.default == DefaultAccess::Allow || self.rules_may_ever_allow(operation)
    }

    /// Returns whether the rules alone allow an operation on at least one bucket or topic.
    pub(crate) fn rules_may_ever_allow(&self, operation: &str) -> bool {
        let is_allowed = |grant: &Grant| match (&grant.rule.buckets, &grant.rule.topics) {
            _ if is_topic_operation(operation) && grant.row_filter.is_some() => false,
            (_, Some(topics)) if is_topic_operation(operation) => !topics.is_empty(),
            (Some(buckets), _) => is_bucket_operation(operation) && !buckets.is_empty(),
            (None, _) => true,
        };
        self.grants.iter().any(|grant| grant.covers(operation) && is_allowed(grant))
    }

    /// Returns the buckets that are named by the rules for an operation.
    pub(crate) fn buckets(&self, operation: &str) -> Vec<&str> {
        let rules = self.grants.iter().filter(|grant| grant.covers(operation)).map(|grant| &grant.rule);
        rules.flat_map(|rule| rule.buckets.iter().flatten()).map(String::as_str).collect()
    }

    /// Returns whether a rule has a row filter, so that some rows may be hidden.
    pub(crate) fn have_row_filters(&self) -> bool {
        self.grants.iter().any(|grant| grant.row_filter.is_some())
    }
}

impl Grant {
    fn covers(&self, operation: &str) -> bool {
        self.rule.allow.iter().any(|pattern| pattern.matches(operation))
    }

    fn covers_bucket(&self, operation: &str, bucket: Option<&str>) -> bool {
        match (&self.rule.buckets, bucket) {
            (None, _) => true,
            (Some(own), Some(bucket)) => is_bucket_operation(operation) && own.iter().any(|own| own == bucket),
            (Some(_), None) => false,
        }
    }
}

fn is_bucket_operation(operation: &str) -> bool {
    operation.starts_with("store.")
}

fn is_topic_operation(operation: &str) -> bool {
    operation.starts_with("rules.")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value as Json, json};
    use tidewire_store::Row;

    use super::*;
    use crate::auth::{Permissions, Session};

    fn grants(default: DefaultAccess, rules: impl IntoIterator<Item = Rule>) -> Grants {
        Permissions::new(default, rules).for_session(&Session::new("ann", ["member", "editor"]))
    }

    fn deny(rules: impl IntoIterator<Item = Rule>) -> Grants {
        grants(DefaultAccess::Deny, rules)
    }

    fn own(rule: Rule) -> Rule {
        rule.on_rows(json!({"owner": "{{ session.userId }}"})).unwrap()
    }

    fn filter(json: &Json) -> Filter {
        Filter::parse(json).unwrap()
    }

    #[test]
    fn without_rules_the_default_decides() {
        assert_eq!(
            Permissions::tiers_only().for_session(&Session::default()).access("store.get", Some("b")),
            Access::All
        );
        assert_eq!(grants(DefaultAccess::Allow, []).access("store.stats", None), Access::All);
        assert_eq!(deny([]).access("store.get", Some("b")), Access::Denied);
        assert!(
            grants(DefaultAccess::Allow, []).topic_access("rules.emit", "t")
                && !deny([]).topic_access("rules.emit", "t")
        );
        assert!(grants(DefaultAccess::Allow, []).may_ever("store.get") && !deny([]).may_ever("store.get"));
    }

    #[test]
    fn rules_add_to_the_default() {
        let rules = [Rule::new("member", ["store.get"]).on_buckets(["b"]), Rule::new("other", ["*"])];
        let grants = grants(DefaultAccess::Allow, rules.clone());
        for (operation, bucket) in [("store.get", Some("b")), ("store.get", Some("c")), ("server.stats", None)] {
            assert_eq!(grants.access(operation, bucket), Access::All, "{operation}");
        }
        assert_eq!(deny(rules).access("store.get", Some("c")), Access::Denied);
    }

    #[test]
    fn role_operation_and_bucket_must_match() {
        let grants = deny([
            Rule::new("stranger", ["*"]),
            Rule::new("member", ["store.get", "procedures.*"]),
            Rule::new("editor", ["store.*"]).on_buckets(["b", "c"]),
        ]);
        for (operation, bucket, expected) in [
            ("store.get", Some("a"), true),
            ("store.get", None, true),
            ("store.insert", Some("a"), false),
            ("store.insert", Some("b"), true),
            ("store.insert", Some("c"), true),
            // Bucket names are literal, not patterns.
            ("store.insert", Some("bc"), false),
            ("store.insert", Some("*"), false),
            ("store.stats", None, false),
            ("store.buckets", None, false),
            ("procedures.call", None, true),
            ("server.stats", None, false),
            ("unknown", None, false),
        ] {
            let access = grants.access(operation, bucket);
            assert_eq!(access, if expected { Access::All } else { Access::Denied }, "{operation} {bucket:?}");
        }
    }

    #[test]
    fn rule_with_buckets_denies_operations_without_bucket() {
        let grants = deny([Rule::new("member", ["*"]).on_buckets(["b"])]);
        for operation in ["store.stats", "store.listQueries", "server.stats", "procedures.call", "rules.emit"] {
            assert_eq!(grants.access(operation, None), Access::Denied, "{operation}");
        }
        assert!(!grants.topic_access("rules.emit", "b"));
        assert_eq!(
            deny([Rule::new("member", ["*"]).on_buckets([""; 0])]).access("store.get", Some("b")),
            Access::Denied
        );
    }

    #[test]
    fn topic_patterns_apply_to_rules_operations_only() {
        let grants = deny([Rule::new("member", ["*"]).on_topics(["orders.*", "alarm"]).on_buckets(["b"])]);
        for (topic, expected) in [
            ("orders.created", true),
            ("orders.*", true),
            ("alarm", true),
            ("orders", false),
            ("alarm.x", false),
            ("*", false),
            ("*.created", false),
        ] {
            assert_eq!(grants.topic_access("rules.subscribe", topic), expected, "{topic}");
        }
        assert_eq!(grants.access("store.get", Some("b")), Access::All);
        assert_eq!(grants.access("store.get", Some("orders.x")), Access::Denied);
        // An operation without a topic needs access to all topics.
        assert_eq!(grants.access("rules.stats", None), Access::Denied);
        let all = deny([Rule::new("member", ["rules.*"]).on_topics(["*"])]);
        assert_eq!(all.access("rules.stats", None), Access::All);
        assert_eq!(deny([Rule::new("member", ["rules.*"])]).access("rules.stats", None), Access::All);
        assert!(deny([Rule::new("member", ["rules.emit"])]).topic_access("rules.emit", "anything"));
        assert!(!deny([Rule::new("member", ["rules.emit"])]).topic_access("rules.subscribe", "anything"));
        // A list of topics does not restrict buckets.
        assert_eq!(deny([Rule::new("member", ["*"]).on_topics(["t"])]).access("store.get", Some("b")), Access::All);
    }

    #[test]
    fn row_filters_of_matching_rules_are_combined_with_or() {
        let public = || Rule::new("editor", ["store.get"]).on_rows(json!({"public": true})).unwrap();
        let (mine, published) = (filter(&json!({"owner": "ann"})), filter(&json!({"public": true})));
        let grants = deny([own(Rule::new("member", ["store.*"])), public()]);
        assert_eq!(grants.access("store.insert", Some("b")), Access::Rows(mine.clone()));
        assert_eq!(grants.access("store.get", Some("b")), Access::Rows(Filter::any_of([mine.clone(), published])));
        let grants =
            deny([own(Rule::new("member", ["store.*"])), public(), Rule::new("editor", ["*"]).on_buckets(["b"])]);
        assert_eq!(grants.access("store.get", Some("b")), Access::All);
        assert_eq!(grants.access("store.insert", Some("c")), Access::Rows(mine));
        let everything = deny([Rule::new("member", ["*"]).on_rows(json!({})).unwrap()]);
        assert_eq!(everything.access("store.get", Some("b")), Access::All);
    }

    #[test]
    fn row_filter_that_matches_nothing_overrides_the_default() {
        let rule = || {
            let rows = json!({"team": {"$neq": "{{ session.metadata.team }}"}});
            Rule::new("member", ["store.*"]).on_rows(rows).unwrap()
        };
        let nothing = Access::Rows(Filter::nothing());
        assert_eq!(grants(DefaultAccess::Allow, [rule()]).access("store.get", Some("b")), nothing);
        assert_eq!(deny([rule()]).access("store.get", Some("b")), nothing);
        // It does not restrict another rule.
        let mine = Access::Rows(filter(&json!({"owner": "ann"})));
        assert_eq!(deny([rule(), own(Rule::new("editor", ["store.get"]))]).access("store.get", Some("b")), mine);
        assert_eq!(deny([own(Rule::new("editor", ["store.get"])), rule()]).access("store.get", Some("b")), mine);
    }

    #[test]
    fn rule_with_row_filter_allows_no_topic() {
        let grants = deny([own(Rule::new("member", ["*"]))]);
        assert!(!grants.topic_access("rules.subscribe", "bucket.b.inserted") && !grants.may_ever("rules.subscribe"));
        assert_eq!(grants.access("rules.stats", None), Access::Denied);
        assert!(matches!(grants.access("procedures.call", None), Access::Rows(_)));
    }

    #[test]
    fn may_ever_needs_one_possible_bucket_or_topic() {
        let grants = deny([
            Rule::new("member", ["store.get"]).on_buckets(["b"]),
            Rule::new("member", ["store.all"]).on_buckets([""; 0]),
            Rule::new("member", ["rules.emit"]).on_topics(["t"]),
            Rule::new("member", ["rules.subscribe"]).on_topics([""; 0]),
            Rule::new("member", ["rules.getFact", "server.stats"]).on_buckets(["b"]),
            Rule::new("other", ["*"]),
            own(Rule::new("editor", ["store.insert"])),
        ]);
        for (operation, expected) in [
            ("store.get", true),
            ("store.all", false),
            ("store.insert", true),
            ("store.update", false),
            ("rules.emit", true),
            ("rules.subscribe", false),
            ("rules.getFact", false),
            ("server.stats", false),
        ] {
            assert_eq!(grants.may_ever(operation), expected, "{operation}");
        }
    }

    const ROLES: [&str; 3] = ["a", "b", "c"];
    const OPERATIONS: [&str; 6] =
        ["store.get", "store.insert", "store.stats", "rules.emit", "rules.stats", "server.stats"];
    const PATTERNS: [&str; 7] = ["*", "store.*", "rules.*", "store.get", "rules.emit", "server.stats", "store"];
    const NAMES: [&str; 3] = ["x", "y", "x.y"];
    const TOPICS: [&str; 4] = ["*", "x.*", "x", "y"];
    const OWNERS: [&str; 4] =
        ["", "{{ session.userId }}", "{{ session.metadata.given }}", "{{ session.metadata.missing }}"];

    /// The source of a rule, evaluated by a reference implementation.
    #[derive(Debug, Clone)]
    struct RuleSource {
        role: &'static str,
        allow: Vec<&'static str>,
        buckets: Option<Vec<&'static str>>,
        topics: Option<Vec<&'static str>>,
        /// The value that `owner` must equal; empty for no row filter.
        owner: &'static str,
    }

    impl RuleSource {
        fn rule(&self) -> Option<Rule> {
            let mut rule = Rule::new(self.role, &self.allow);
            if let Some(buckets) = &self.buckets {
                rule = rule.on_buckets(buckets.iter().copied());
            }
            if let Some(topics) = &self.topics {
                rule = rule.on_topics(topics);
            }
            if self.owner.is_empty() { Some(rule) } else { rule.on_rows(json!({"owner": self.owner})).ok() }
        }

        fn matches(pattern: &str, name: &str) -> bool {
            pattern == "*"
                || pattern == name
                || (pattern.ends_with(".*") && name.starts_with(&pattern[..pattern.len() - 1]))
        }

        /// Returns the owners whose rows the rule grants, or `None` if it does not cover the operation.
        fn owners(&self, roles: &[&str], operation: &str, bucket: Option<&str>, topic: Option<&str>) -> Option<Owners> {
            let is_topic_operation = operation.starts_with("rules.");
            let is_covered = roles.contains(&self.role) && self.allow.iter().any(|one| Self::matches(one, operation));
            let is_in_scope = if is_topic_operation {
                let topic = topic.unwrap_or("*");
                let listed = self.topics.as_ref().map(|list| list.iter().any(|one| Self::matches(one, topic)));
                self.owner.is_empty() && listed.unwrap_or(self.buckets.is_none())
            } else {
                let is_listed = |list: &Vec<&str>| bucket.is_some_and(|bucket| list.contains(&bucket));
                self.buckets.as_ref().is_none_or(|list| operation.starts_with("store.") && is_listed(list))
            };
            (is_covered && is_in_scope).then_some(match self.owner {
                "" => Owners::All,
                "{{ session.userId }}" => Owners::One("ann"),
                "{{ session.metadata.given }}" => Owners::One("team"),
                _ => Owners::None,
            })
        }
    }

    #[derive(Debug, Clone, Copy, PartialEq)]
    enum Owners {
        All,
        One(&'static str),
        None,
    }

    fn some_of(all: &'static [&'static str], least: usize) -> impl Strategy<Value = Vec<&'static str>> {
        proptest::sample::subsequence(all, least..=all.len().min(2))
    }

    fn rule_source() -> impl Strategy<Value = RuleSource> {
        let lists = (
            some_of(&PATTERNS, 1),
            proptest::option::of(some_of(&NAMES, 0)),
            proptest::option::of(some_of(&TOPICS, 0)),
        );
        (proptest::sample::select(&ROLES[..]), lists, proptest::sample::select(&OWNERS[..]))
            .prop_map(|(role, (allow, buckets, topics), owner)| RuleSource { role, allow, buckets, topics, owner })
    }

    proptest! {
        #[test]
        fn grants_agree_with_the_reference_implementation(
            sources in prop::collection::vec(rule_source(), 0..6),
            roles in some_of(&ROLES, 0),
            is_denied in any::<bool>(),
        ) {
            let (sources, rules): (Vec<_>, Vec<_>) =
                sources.into_iter().filter_map(|one| one.rule().map(|rule| (one, rule))).unzip();
            let default = if is_denied { DefaultAccess::Deny } else { DefaultAccess::Allow };
            let metadata = json!({"given": "team", "missing": null}).as_object().unwrap().clone();
            let session = Session::new("ann", roles.clone()).metadata(metadata);
            let grants = Permissions::new(default, rules).for_session(&session);
            for operation in OPERATIONS {
                let mut is_ever = false;
                for name in NAMES.iter().copied().map(Some).chain([None]) {
                    let given: Vec<Owners> =
                        sources.iter().filter_map(|one| one.owners(&roles, operation, name, name)).collect();
                    is_ever |= !given.is_empty() || !is_denied;
                    if operation.starts_with("rules.") {
                        let expected = !given.is_empty() || !is_denied;
                        prop_assert_eq!(grants.topic_access(operation, name.unwrap_or("*")), expected);
                        continue;
                    }
                    let is_visible = |owner: &str| match grants.access(operation, name) {
                        Access::Denied => false,
                        Access::All => true,
                        Access::Rows(filter) => {
                            filter.matches(&Row::new(json!({"owner": owner}).as_object().unwrap()).unwrap())
                        }
                    };
                    for owner in ["ann", "team", "other"] {
                        let expected = if given.is_empty() {
                            !is_denied
                        } else {
                            given.iter().any(|one| *one == Owners::All || *one == Owners::One(owner))
                        };
                        prop_assert_eq!(is_visible(owner), expected, "{} {:?} {}", operation, name, owner);
                    }
                    let is_denied = given.is_empty() && is_denied;
                    prop_assert_eq!(grants.access(operation, name) == Access::Denied, is_denied);
                }
                prop_assert_eq!(grants.may_ever(operation), is_ever, "{}", operation);
            }
        }
    }
}
