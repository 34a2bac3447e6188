//! Random rules and users, and a simple model of what the rules permit.

use std::time::Duration;

use serde_json::{Map, Value as Json, json};
use tidewire::auth::{Auth, DefaultAccess, Permissions, Rule, StaticToken, StaticTokens, Tier, TokenExpiry};

use super::random::Random;
use crate::tiers::OPERATIONS;

pub(super) const BUCKETS: [&str; 3] = ["b0", "b1", "b2"];
/// A bucket that every client may subscribe to. A push of it shows that all earlier pushes have arrived.
pub(super) const BARRIER: &str = "barrier";
const TIERS: [Tier; 3] = [Tier::Read, Tier::Write, Tier::Admin];
const TEAMS: [&str; 3] = ["red", "blue", "1"];

/// A random permission policy.
pub(super) struct Policy {
    pub(super) is_required: bool,
    is_default_allow: bool,
    /// The tier of sessions without a built-in role, without a rule.
    default_tier: usize,
    /// The tier of anonymous clients, if it is limited.
    anonymous_tier: Option<usize>,
    rules: Vec<PolicyRule>,
    pub(super) people: Vec<Person>,
}

struct PolicyRule {
    role: String,
    allow: Vec<&'static str>,
    buckets: Option<Vec<&'static str>>,
    rows: Option<RowFilter>,
}

pub(super) struct Person {
    pub(super) token: String,
    pub(super) user: String,
    roles: Vec<String>,
    metadata: Map<String, Json>,
    pub(super) ttl_millis: Option<u64>,
}

/// The rows that a rule applies to.
pub(super) enum RowFilter {
    Own,
    OfTeam,
    OfOtherTeams,
    OfTeams,
    OfRole,
    Below(u64),
    Public,
    Any(Vec<RowFilter>),
    All(Vec<RowFilter>),
}

/// The access of a session to a bucket.
pub(super) enum Access<'a> {
    Nothing,
    Everything,
    Rows(&'a Person, Vec<&'a RowFilter>),
}

impl Policy {
    pub(super) fn random(random: &mut Random) -> Self {
        let rules = (0..4 + random.below(6)).map(|_| PolicyRule::random(random)).collect();
        let people = (0..6).map(|index| Person::random(random, index)).collect();
        Self {
            is_required: !random.one_in(3),
            is_default_allow: random.one_in(4),
            default_tier: random.pick(&[0, 1, 1, 2]),
            anonymous_tier: random.pick(&[None, Some(0), Some(1)]),
            rules,
            people,
        }
    }

    pub(super) fn auth(&self) -> Auth {
        let tokens = self.people.iter().map(|person| (person.token.clone(), person.token()));
        let barrier = Rule::new("any", ["store.subscribe"]).on_buckets([BARRIER]);
        let default = if self.is_default_allow { DefaultAccess::Allow } else { DefaultAccess::Deny };
        let permissions = Permissions::new(default, self.rules.iter().map(PolicyRule::rule).chain([barrier]));
        let mut auth = Auth::new(StaticTokens::new(tokens).unwrap())
            .permissions(permissions)
            .required(self.is_required)
            .default_tier(TIERS[self.default_tier]);
        auth.anonymous_tier = self.anonymous_tier.map(|tier| TIERS[tier]);
        auth
    }

    /// Returns the access of a user, or of an anonymous client if `None`.
    pub(super) fn access(&self, person: Option<usize>, operation: &str, bucket: Option<&str>) -> Access<'_> {
        let tier =
            OPERATIONS.iter().find(|(name, ..)| *name == operation).map_or(0, |(_, tier, ..)| usize::from(*tier));
        let Some(person) = person.map(|person| &self.people[person]) else {
            let is_enough = self.anonymous_tier.is_none_or(|own| own >= tier);
            return if self.is_required || !is_enough { Access::Nothing } else { Access::Everything };
        };
        let level = |role: &String| ["reader", "writer", "admin"].iter().position(|known| known == role);
        let highest = person.roles.iter().filter_map(level).max();
        if highest.is_some_and(|highest| highest < tier) {
            return Access::Nothing;
        }
        let needs_rule = highest.is_none() && self.default_tier < tier;
        let mut rows = Vec::new();
        for rule in &self.rules {
            if !person.roles.contains(&rule.role)
                || !rule.allow.iter().any(|pattern| matches_pattern(pattern, operation))
            {
                continue;
            }
            let covers_bucket = match (&rule.buckets, bucket) {
                (None, _) => true,
                (Some(buckets), Some(bucket)) => buckets.contains(&bucket),
                (Some(_), None) => false,
            };
            match &rule.rows {
                _ if !covers_bucket => {}
                None => return Access::Everything,
                Some(rule) => rows.push(rule),
            }
        }
        match rows.is_empty() {
            false => Access::Rows(person, rows),
            true if self.is_default_allow && !needs_rule => Access::Everything,
            true => Access::Nothing,
        }
    }

    /// Returns whether a user may see a record by an operation.
    pub(super) fn may_see(&self, person: Option<usize>, operation: &str, bucket: &str, record: &Json) -> bool {
        match self.access(person, operation, Some(bucket)) {
            Access::Nothing => false,
            Access::Everything => true,
            Access::Rows(person, rows) => rows.iter().any(|rows| rows.matches(person, record) == Some(true)),
        }
    }

    /// Returns whether a user may see a record in a transaction step, which needs permission for the transaction and for the operation.
    pub(super) fn may_see_in_step(&self, person: Option<usize>, operation: &str, bucket: &str, record: &Json) -> bool {
        ["store.transaction", operation].iter().all(|operation| self.may_see(person, operation, bucket, record))
    }

    /// Returns a random record.
    pub(super) fn record(&self, random: &mut Random) -> Json {
        let person = &self.people[random.below(self.people.len())];
        let mut record = json!({
            "owner": person.user,
            "role": random.pick(&["r0", "r1", "r2"]),
            "n": random.below(10),
            "public": random.one_in(3),
            "name": format!("name-{}", random.below(60)),
        });
        match random.below(4) {
            0 => {}
            1 => record["team"] = json!(1),
            _ => record["team"] = json!(random.pick(&TEAMS)),
        }
        record
    }
}

fn matches_pattern(pattern: &str, operation: &str) -> bool {
    match pattern {
        "*" => true,
        "store.*" => operation.starts_with("store."),
        whole => whole == operation,
    }
}

impl PolicyRule {
    fn random(random: &mut Random) -> Self {
        let allow = match random.below(6) {
            0 => vec!["*"],
            1 | 2 => vec!["store.*"],
            3 => vec!["store.subscribe", "store.insert", "store.all", "store.query"],
            4 => vec!["store.transaction", "store.update", "store.get", "store.paginate", "store.delete"],
            _ => (0..4).map(|_| OPERATIONS[random.below(31)].0).collect(),
        };
        let buckets = random.one_in(2).then(|| (0..=random.below(2)).map(|_| random.pick(&BUCKETS)).collect());
        let rows = (!random.one_in(5) && allow[0] != "*").then(|| RowFilter::random(random, 2));
        Self { role: random.pick(&["r0", "r1", "r2", "any"]).to_owned(), allow, buckets, rows }
    }

    fn rule(&self) -> Rule {
        let mut rule = Rule::new(&*self.role, &self.allow);
        if let Some(buckets) = &self.buckets {
            rule = rule.on_buckets(buckets.iter().copied());
        }
        match &self.rows {
            Some(rows) => rule.on_rows(rows.json()).unwrap(),
            None => rule,
        }
    }
}

impl Person {
    fn random(random: &mut Random, index: usize) -> Self {
        let mut roles = vec!["any".to_owned()];
        for role in ["r0", "r1", "r2"] {
            if random.one_in(2) {
                roles.push(role.to_owned());
            }
        }
        if random.one_in(4) {
            roles.push(random.pick(&["reader", "writer", "admin"]).to_owned());
        }
        let mut metadata = Map::new();
        match random.below(6) {
            0 => {}
            1 => drop(metadata.insert("team".to_owned(), Json::Null)),
            2 => drop(metadata.insert("team".to_owned(), json!(1))),
            _ => drop(metadata.insert("team".to_owned(), json!(random.pick(&TEAMS)))),
        }
        if random.one_in(2) {
            metadata.insert("teams".to_owned(), json!([random.pick(&TEAMS), 1]));
        }
        // Some tokens belong to the same user with different roles.
        let user = format!("user-{}", index % 4);
        let ttl_millis = random.one_in(4).then_some(5000);
        Self { token: format!("token-{index}"), user, roles, metadata, ttl_millis }
    }

    fn token(&self) -> StaticToken {
        let expiry = self.ttl_millis.map(|ttl_millis| TokenExpiry::After(Duration::from_millis(ttl_millis)));
        StaticToken::new(&*self.user, &self.roles).metadata(self.metadata.clone()).expiry(expiry.unwrap_or_default())
    }
}

impl RowFilter {
    fn random(random: &mut Random, depth: usize) -> Self {
        let some = |random: &mut Random| (0..2).map(|_| Self::random(random, depth - 1)).collect();
        match random.below(if depth > 0 { 10 } else { 8 }) {
            0 | 1 => Self::Own,
            2 => Self::OfTeam,
            3 => Self::OfOtherTeams,
            4 => Self::OfTeams,
            5 => Self::OfRole,
            6 => Self::Below(random.below(10) as u64),
            7 => Self::Public,
            8 => Self::Any(some(random)),
            _ => Self::All(some(random)),
        }
    }

    fn json(&self) -> Json {
        match self {
            Self::Own => json!({"owner": "{{ session.userId }}"}),
            Self::OfTeam => json!({"team": "{{ session.metadata.team }}"}),
            Self::OfOtherTeams => json!({"team": {"$neq": "{{ session.metadata.team }}"}}),
            Self::OfTeams => json!({"team": {"$in": "{{ session.metadata.teams }}"}}),
            Self::OfRole => json!({"role": {"$in": "{{ session.roles }}"}}),
            Self::Below(n) => json!({"n": {"$lt": n}}),
            Self::Public => json!({"public": true}),
            Self::Any(rows) => json!({"$or": rows.iter().map(Self::json).collect::<Vec<_>>()}),
            Self::All(rows) => json!({"$and": rows.iter().map(Self::json).collect::<Vec<_>>()}),
        }
    }

    /// Returns whether the filter matches a record. `None` if the user lacks a value that the filter refers to.
    fn matches(&self, person: &Person, record: &Json) -> Option<bool> {
        let metadata = |name: &str| person.metadata.get(name).filter(|value| !value.is_null());
        Some(match self {
            Self::Own => record["owner"] == *person.user,
            Self::OfTeam => record.get("team") == Some(metadata("team")?),
            Self::OfOtherTeams => record.get("team") != Some(metadata("team")?),
            Self::OfTeams => {
                let teams = metadata("teams")?.as_array()?;
                record.get("team").is_some_and(|team| teams.contains(team))
            }
            Self::OfRole => person.roles.iter().any(|role| record["role"] == **role),
            Self::Below(bound) => record["n"].as_u64().is_some_and(|n| n < *bound),
            Self::Public => record["public"] == true,
            Self::Any(rows) => {
                rows.iter().map(|rows| rows.matches(person, record)).collect::<Option<Vec<_>>>()?.contains(&true)
            }
            Self::All(rows) => {
                !rows.iter().map(|rows| rows.matches(person, record)).collect::<Option<Vec<_>>>()?.contains(&false)
            }
        })
    }
}
