//! What a session may do: its rules, with its own values in them.

use std::sync::Arc;

use tidewire_store::Filter;

use super::{DefaultAccess, Rule};

/// What a session may do: the rules of its roles, with its own values in them. A clone is the same one.
///
/// It is about sessions. Anonymous clients, tiers, `auth.*` and the end of one's own subscription are not asked here.
#[derive(Debug, Clone)]
pub struct Granted {
    default: DefaultAccess,
    grants: Arc<[Grant]>,
}

#[derive(Debug)]
struct Grant {
    rule: Arc<Rule>,
    /// None are all.
    rows: Option<Filter>,
}

/// What somebody may do with a bucket.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Access {
    /// Nothing.
    Denied,
    /// Everything.
    All,
    /// Only with these rows. What has no rows to choose from, as `store.stats` or `store.dropBucket`, is not allowed by it.
    Rows(Filter),
}

impl Granted {
    pub(super) fn new(default: DefaultAccess, rules: impl Iterator<Item = (Arc<Rule>, Option<Filter>)>) -> Self {
        let grants = rules.map(|(rule, rows)| Grant { rule, rows: rows.filter(|rows| !rows.is_everything()) });
        Self { default, grants: grants.collect() }
    }

    /// What may be done by an operation with a bucket, or without one. An operation that touches several is asked about each.
    pub fn access(&self, operation: &str, bucket: Option<&str>) -> Access {
        if is_of_topics(operation) {
            return if self.topic_access(operation, "*") { Access::All } else { Access::Denied };
        }
        let mut rows: Option<Filter> = None;
        for grant in self.grants.iter().filter(|grant| grant.is_about(operation) && grant.has_bucket(operation, bucket))
        {
            let Some(more) = &grant.rows else { return Access::All };
            rows = Some(match rows {
                None => more.clone(),
                Some(rows) => Filter::any_of([rows, more.clone()]),
            });
        }
        match rows {
            Some(rows) => Access::Rows(rows),
            None if self.default == DefaultAccess::Allow => Access::All,
            None => Access::Denied,
        }
    }

    /// Whether one of `rules.*` may be done with a topic, or with the key or pattern that it names instead; `*` if it names none.
    ///
    /// A pattern is taken as it is written: whoever may use `orders.*` may follow `orders.*` and not `*`.
    pub fn topic_access(&self, operation: &str, topic: &str) -> bool {
        let is_allowed = |grant: &Grant| match &grant.rule.topics {
            Some(topics) => topics.iter().any(|pattern| pattern.matches(topic)),
            None => grant.rule.buckets.is_none(),
        };
        self.default == DefaultAccess::Allow
            || self.grants.iter().any(|grant| grant.is_about(operation) && grant.rows.is_none() && is_allowed(grant))
    }

    /// Whether there may be a bucket or topic with which an operation is allowed. Who asks with parameters that are wrong learns
    /// what is wrong only if there is.
    pub fn may_ever(&self, operation: &str) -> bool {
        let is_allowed = |grant: &Grant| match (&grant.rule.buckets, &grant.rule.topics) {
            _ if is_of_topics(operation) && grant.rows.is_some() => false,
            (_, Some(topics)) if is_of_topics(operation) => !topics.is_empty(),
            (Some(buckets), _) => is_of_buckets(operation) && !buckets.is_empty(),
            (None, _) => true,
        };
        self.default == DefaultAccess::Allow
            || self.grants.iter().any(|grant| grant.is_about(operation) && is_allowed(grant))
    }
}

impl Grant {
    fn is_about(&self, operation: &str) -> bool {
        self.rule.allow.iter().any(|pattern| pattern.matches(operation))
    }

    fn has_bucket(&self, operation: &str, bucket: Option<&str>) -> bool {
        match (&self.rule.buckets, bucket) {
            (None, _) => true,
            (Some(own), Some(bucket)) => is_of_buckets(operation) && own.iter().any(|own| own == bucket),
            (Some(_), None) => false,
        }
    }
}

fn is_of_buckets(operation: &str) -> bool {
    operation.starts_with("store.")
}

fn is_of_topics(operation: &str) -> bool {
    operation.starts_with("rules.")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value as Json, json};
    use tidewire_store::Row;

    use super::*;
    use crate::{Permissions, Session};

    fn granted(default: DefaultAccess, rules: impl IntoIterator<Item = Rule>) -> Granted {
        Permissions::new(default, rules).for_session(&Session::new("ann", ["member", "editor"]))
    }

    fn deny(rules: impl IntoIterator<Item = Rule>) -> Granted {
        granted(DefaultAccess::Deny, rules)
    }

    fn own(rule: Rule) -> Rule {
        rule.on_rows(json!({"owner": "{{ session.userId }}"})).unwrap()
    }

    fn filter(json: &Json) -> Filter {
        Filter::parse(json, &serde_json::Map::new()).unwrap()
    }

    #[test]
    fn without_rules_the_default_decides() {
        assert_eq!(Permissions::default().for_session(&Session::default()).access("store.get", Some("b")), Access::All);
        assert_eq!(granted(DefaultAccess::Allow, []).access("store.stats", None), Access::All);
        assert_eq!(deny([]).access("store.get", Some("b")), Access::Denied);
        assert!(
            granted(DefaultAccess::Allow, []).topic_access("rules.emit", "t")
                && !deny([]).topic_access("rules.emit", "t")
        );
        assert!(granted(DefaultAccess::Allow, []).may_ever("store.get") && !deny([]).may_ever("store.get"));
    }

    #[test]
    fn rules_only_ever_allow() {
        let rules = [Rule::new("member", ["store.get"]).on_buckets(["b"]), Rule::new("nobody", ["*"])];
        let granted = granted(DefaultAccess::Allow, rules.clone());
        for (operation, bucket) in [("store.get", Some("b")), ("store.get", Some("c")), ("server.stats", None)] {
            assert_eq!(granted.access(operation, bucket), Access::All, "{operation}");
        }
        assert_eq!(deny(rules).access("store.get", Some("c")), Access::Denied);
    }

    #[test]
    fn role_operation_and_bucket_must_match() {
        let granted = deny([
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
            // The names of buckets are no patterns, and must be whole.
            ("store.insert", Some("bc"), false),
            ("store.insert", Some("*"), false),
            ("store.stats", None, false),
            ("store.buckets", None, false),
            ("procedures.call", None, true),
            ("server.stats", None, false),
            ("unknown", None, false),
        ] {
            let access = granted.access(operation, bucket);
            assert_eq!(access, if expected { Access::All } else { Access::Denied }, "{operation} {bucket:?}");
        }
    }

    #[test]
    fn a_rule_with_buckets_allows_nothing_that_names_none() {
        let granted = deny([Rule::new("member", ["*"]).on_buckets(["b"])]);
        for operation in ["store.stats", "store.listQueries", "server.stats", "procedures.call", "rules.emit"] {
            assert_eq!(granted.access(operation, None), Access::Denied, "{operation}");
        }
        assert!(!granted.topic_access("rules.emit", "b"));
        assert_eq!(
            deny([Rule::new("member", ["*"]).on_buckets([""; 0])]).access("store.get", Some("b")),
            Access::Denied
        );
    }

    #[test]
    fn topics_are_patterns_and_of_rules_only() {
        let granted = deny([Rule::new("member", ["*"]).on_topics(["orders.*", "alarm"]).on_buckets(["b"])]);
        for (topic, expected) in [
            ("orders.created", true),
            ("orders.*", true),
            ("alarm", true),
            ("orders", false),
            ("alarm.x", false),
            ("*", false),
            ("*.created", false),
        ] {
            assert_eq!(granted.topic_access("rules.subscribe", topic), expected, "{topic}");
        }
        assert_eq!(granted.access("store.get", Some("b")), Access::All);
        assert_eq!(granted.access("store.get", Some("orders.x")), Access::Denied);
        // What names no topic is about all of them.
        assert_eq!(granted.access("rules.stats", None), Access::Denied);
        let all = deny([Rule::new("member", ["rules.*"]).on_topics(["*"])]);
        assert_eq!(all.access("rules.stats", None), Access::All);
        assert_eq!(deny([Rule::new("member", ["rules.*"])]).access("rules.stats", None), Access::All);
        assert!(deny([Rule::new("member", ["rules.emit"])]).topic_access("rules.emit", "anything"));
        assert!(!deny([Rule::new("member", ["rules.emit"])]).topic_access("rules.subscribe", "anything"));
        // A list of topics says nothing about buckets.
        assert_eq!(deny([Rule::new("member", ["*"]).on_topics(["t"])]).access("store.get", Some("b")), Access::All);
    }

    #[test]
    fn the_rows_of_all_rules_that_match_are_meant() {
        let public = || Rule::new("editor", ["store.get"]).on_rows(json!({"public": true})).unwrap();
        let (mine, published) = (filter(&json!({"owner": "ann"})), filter(&json!({"public": true})));
        let granted = deny([own(Rule::new("member", ["store.*"])), public()]);
        assert_eq!(granted.access("store.insert", Some("b")), Access::Rows(mine.clone()));
        assert_eq!(granted.access("store.get", Some("b")), Access::Rows(Filter::any_of([mine.clone(), published])));
        let granted =
            deny([own(Rule::new("member", ["store.*"])), public(), Rule::new("editor", ["*"]).on_buckets(["b"])]);
        assert_eq!(granted.access("store.get", Some("b")), Access::All);
        assert_eq!(granted.access("store.insert", Some("c")), Access::Rows(mine));
        let everything = deny([Rule::new("member", ["*"]).on_rows(json!({})).unwrap()]);
        assert_eq!(everything.access("store.get", Some("b")), Access::All);
    }

    #[test]
    fn a_rule_that_gives_no_rows_does_not_fall_to_the_default() {
        let rule = || {
            let rows = json!({"team": {"$neq": "{{ session.metadata.team }}"}});
            Rule::new("member", ["store.*"]).on_rows(rows).unwrap()
        };
        let nothing = Access::Rows(Filter::nothing());
        assert_eq!(granted(DefaultAccess::Allow, [rule()]).access("store.get", Some("b")), nothing);
        assert_eq!(deny([rule()]).access("store.get", Some("b")), nothing);
        // And takes nothing from another rule.
        let mine = Access::Rows(filter(&json!({"owner": "ann"})));
        assert_eq!(deny([rule(), own(Rule::new("editor", ["store.get"]))]).access("store.get", Some("b")), mine);
        assert_eq!(deny([own(Rule::new("editor", ["store.get"])), rule()]).access("store.get", Some("b")), mine);
    }

    #[test]
    fn a_rule_with_rows_allows_no_topic() {
        let granted = deny([own(Rule::new("member", ["*"]))]);
        assert!(!granted.topic_access("rules.subscribe", "bucket.b.inserted") && !granted.may_ever("rules.subscribe"));
        assert_eq!(granted.access("rules.stats", None), Access::Denied);
        assert!(matches!(granted.access("procedures.call", None), Access::Rows(_)));
    }

    #[test]
    fn whether_an_operation_may_ever_be_allowed() {
        let granted = deny([
            Rule::new("member", ["store.get"]).on_buckets(["b"]),
            Rule::new("member", ["store.all"]).on_buckets([""; 0]),
            Rule::new("member", ["rules.emit"]).on_topics(["t"]),
            Rule::new("member", ["rules.subscribe"]).on_topics([""; 0]),
            Rule::new("member", ["rules.getFact", "server.stats"]).on_buckets(["b"]),
            Rule::new("nobody", ["*"]),
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
            assert_eq!(granted.may_ever(operation), expected, "{operation}");
        }
    }

    const ROLES: [&str; 3] = ["a", "b", "c"];
    const OPERATIONS: [&str; 6] =
        ["store.get", "store.insert", "store.stats", "rules.emit", "rules.stats", "server.stats"];
    const PATTERNS: [&str; 7] = ["*", "store.*", "rules.*", "store.get", "rules.emit", "server.stats", "store"];
    const NAMES: [&str; 3] = ["x", "y", "x.y"];
    const TOPICS: [&str; 4] = ["*", "x.*", "x", "y"];
    const ROWS: [&str; 4] =
        ["", "{{ session.userId }}", "{{ session.metadata.given }}", "{{ session.metadata.missing }}"];

    /// A rule, as it is written.
    #[derive(Debug, Clone)]
    struct Written {
        role: &'static str,
        allow: Vec<&'static str>,
        buckets: Option<Vec<&'static str>>,
        topics: Option<Vec<&'static str>>,
        /// The value that `owner` must have; empty for no rows.
        rows: &'static str,
    }

    impl Written {
        fn rule(&self) -> Option<Rule> {
            let mut rule = Rule::new(self.role, &self.allow);
            if let Some(buckets) = &self.buckets {
                rule = rule.on_buckets(buckets.iter().copied());
            }
            if let Some(topics) = &self.topics {
                rule = rule.on_topics(topics);
            }
            if self.rows.is_empty() { Some(rule) } else { rule.on_rows(json!({"owner": self.rows})).ok() }
        }

        fn matches(pattern: &str, name: &str) -> bool {
            pattern == "*"
                || pattern == name
                || (pattern.ends_with(".*") && name.starts_with(&pattern[..pattern.len() - 1]))
        }

        /// The owners whose rows it gives: all, or one; none if it is not about this.
        fn gives(&self, roles: &[&str], operation: &str, bucket: Option<&str>, topic: Option<&str>) -> Option<Owners> {
            let of_topics = operation.starts_with("rules.");
            let about = roles.contains(&self.role) && self.allow.iter().any(|one| Self::matches(one, operation));
            let place = if of_topics {
                let topic = topic.unwrap_or("*");
                let listed = self.topics.as_ref().map(|list| list.iter().any(|one| Self::matches(one, topic)));
                self.rows.is_empty() && listed.unwrap_or(self.buckets.is_none())
            } else {
                let is_listed = |list: &Vec<&str>| bucket.is_some_and(|bucket| list.contains(&bucket));
                self.buckets.as_ref().is_none_or(|list| operation.starts_with("store.") && is_listed(list))
            };
            (about && place).then_some(match self.rows {
                "" => Owners::All,
                "{{ session.userId }}" => Owners::One("ann"),
                "{{ session.metadata.given }}" => Owners::One("team"),
                _ => Owners::Nobody,
            })
        }
    }

    #[derive(Debug, Clone, Copy, PartialEq)]
    enum Owners {
        All,
        One(&'static str),
        Nobody,
    }

    fn some_of(all: &'static [&'static str], least: usize) -> impl Strategy<Value = Vec<&'static str>> {
        proptest::sample::subsequence(all, least..=all.len().min(2))
    }

    fn written() -> impl Strategy<Value = Written> {
        let lists = (
            some_of(&PATTERNS, 1),
            proptest::option::of(some_of(&NAMES, 0)),
            proptest::option::of(some_of(&TOPICS, 0)),
        );
        (proptest::sample::select(&ROLES[..]), lists, proptest::sample::select(&ROWS[..]))
            .prop_map(|(role, (allow, buckets, topics), rows)| Written { role, allow, buckets, topics, rows })
    }

    proptest! {
        #[test]
        fn what_is_granted_is_what_the_rules_say(
            written in prop::collection::vec(written(), 0..6),
            roles in some_of(&ROLES, 0),
            is_denied in any::<bool>(),
        ) {
            let (written, rules): (Vec<_>, Vec<_>) =
                written.into_iter().filter_map(|one| one.rule().map(|rule| (one, rule))).unzip();
            let default = if is_denied { DefaultAccess::Deny } else { DefaultAccess::Allow };
            let mut session = Session::new("ann", roles.clone());
            session.metadata = json!({"given": "team", "missing": null}).as_object().unwrap().clone();
            let granted = Permissions::new(default, rules).for_session(&session);
            for operation in OPERATIONS {
                let mut is_ever = false;
                for name in NAMES.iter().copied().map(Some).chain([None]) {
                    let given: Vec<Owners> =
                        written.iter().filter_map(|one| one.gives(&roles, operation, name, name)).collect();
                    is_ever |= !given.is_empty() || !is_denied;
                    if operation.starts_with("rules.") {
                        let expected = !given.is_empty() || !is_denied;
                        prop_assert_eq!(granted.topic_access(operation, name.unwrap_or("*")), expected);
                        continue;
                    }
                    let is_meant = |owner: &str| match granted.access(operation, name) {
                        Access::Denied => false,
                        Access::All => true,
                        Access::Rows(rows) => {
                            rows.matches(&Row::new(json!({"owner": owner}).as_object().unwrap()).unwrap())
                        }
                    };
                    for owner in ["ann", "team", "other"] {
                        let expected = if given.is_empty() {
                            !is_denied
                        } else {
                            given.iter().any(|one| *one == Owners::All || *one == Owners::One(owner))
                        };
                        prop_assert_eq!(is_meant(owner), expected, "{} {:?} {}", operation, name, owner);
                    }
                    let is_denied = given.is_empty() && is_denied;
                    prop_assert_eq!(granted.access(operation, name) == Access::Denied, is_denied);
                }
                prop_assert_eq!(granted.may_ever(operation), is_ever, "{}", operation);
            }
        }
    }
}
