//! Random rules and people, and a reading of the rules that is as simple as can be.

use std::time::Duration;

use serde_json::{Map, Value as Json, json};
use tidewire::auth::{Auth, DefaultAccess, Permissions, Rule, StaticToken, StaticTokens, Tier, TokenExpiry};

use super::random::Random;
use crate::tiers::OPERATIONS;

pub(super) const BUCKETS: [&str; 3] = ["b0", "b1", "b2"];
/// Everybody may follow this, so that it can be known when all that was pushed before has come.
pub(super) const BEAT: &str = "beat";
const TIERS: [Tier; 3] = [Tier::Read, Tier::Write, Tier::Admin];
const TEAMS: [&str; 3] = ["red", "blue", "1"];

/// Who may do what.
pub(super) struct Laws {
    pub(super) is_required: bool,
    is_default_allow: bool,
    /// How high who has no built-in role reaches without a rule.
    default_tier: usize,
    /// How high who has not logged in reaches, if there is a limit.
    anonymous_tier: Option<usize>,
    rules: Vec<Law>,
    pub(super) people: Vec<Person>,
}

struct Law {
    role: String,
    allow: Vec<&'static str>,
    buckets: Option<Vec<&'static str>>,
    rows: Option<Rows>,
}

pub(super) struct Person {
    pub(super) token: String,
    pub(super) user: String,
    roles: Vec<String>,
    metadata: Map<String, Json>,
    pub(super) lasts: Option<u64>,
}

/// Which rows a law is about.
pub(super) enum Rows {
    Own,
    OfTeam,
    OfOtherTeams,
    OfTeams,
    OfRole,
    Below(u64),
    Public,
    Any(Vec<Rows>),
    All(Vec<Rows>),
}

/// What somebody may do with a bucket.
pub(super) enum May<'a> {
    Nothing,
    Everything,
    Some(&'a Person, Vec<&'a Rows>),
}

impl Laws {
    pub(super) fn random(random: &mut Random) -> Self {
        let rules = (0..4 + random.below(6)).map(|_| Law::random(random)).collect();
        let people = (0..6).map(|place| Person::random(random, place)).collect();
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
        let beat = Rule::new("any", ["store.subscribe"]).on_buckets([BEAT]);
        let default = if self.is_default_allow { DefaultAccess::Allow } else { DefaultAccess::Deny };
        let permissions = Permissions::new(default, self.rules.iter().map(Law::rule).chain([beat]));
        let mut auth = Auth::new(StaticTokens::new(tokens).unwrap())
            .permissions(permissions)
            .required(self.is_required)
            .default_tier(TIERS[self.default_tier]);
        auth.anonymous_tier = self.anonymous_tier.map(|tier| TIERS[tier]);
        auth
    }

    /// What somebody may do, who is nobody if they have not logged in.
    pub(super) fn may(&self, who: Option<usize>, operation: &str, bucket: Option<&str>) -> May<'_> {
        let tier =
            OPERATIONS.iter().find(|(name, ..)| *name == operation).map_or(0, |(_, tier, ..)| usize::from(*tier));
        let Some(person) = who.map(|who| &self.people[who]) else {
            let is_enough = self.anonymous_tier.is_none_or(|own| own >= tier);
            return if self.is_required || !is_enough { May::Nothing } else { May::Everything };
        };
        let level = |role: &String| ["reader", "writer", "admin"].iter().position(|known| known == role);
        let highest = person.roles.iter().filter_map(level).max();
        if highest.is_some_and(|highest| highest < tier) {
            return May::Nothing;
        }
        let needs_rule = highest.is_none() && self.default_tier < tier;
        let mut rows = Vec::new();
        for law in &self.rules {
            if !person.roles.contains(&law.role) || !law.allow.iter().any(|pattern| is_meant(pattern, operation)) {
                continue;
            }
            let is_there = match (&law.buckets, bucket) {
                (None, _) => true,
                (Some(buckets), Some(bucket)) => buckets.contains(&bucket),
                (Some(_), None) => false,
            };
            match &law.rows {
                _ if !is_there => {}
                None => return May::Everything,
                Some(law) => rows.push(law),
            }
        }
        match rows.is_empty() {
            false => May::Some(person, rows),
            true if self.is_default_allow && !needs_rule => May::Everything,
            true => May::Nothing,
        }
    }

    /// Whether somebody may see a record by an operation.
    pub(super) fn may_see(&self, who: Option<usize>, operation: &str, bucket: &str, record: &Json) -> bool {
        match self.may(who, operation, Some(bucket)) {
            May::Nothing => false,
            May::Everything => true,
            May::Some(person, rows) => rows.iter().any(|rows| rows.have(person, record) == Some(true)),
        }
    }

    /// Whether somebody may see a record by a step of a transaction: both as a transaction and as what the step does.
    pub(super) fn may_see_in_step(&self, who: Option<usize>, operation: &str, bucket: &str, record: &Json) -> bool {
        ["store.transaction", operation].iter().all(|operation| self.may_see(who, operation, bucket, record))
    }

    /// A record that somebody might write.
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

fn is_meant(pattern: &str, operation: &str) -> bool {
    match pattern {
        "*" => true,
        "store.*" => operation.starts_with("store."),
        whole => whole == operation,
    }
}

impl Law {
    fn random(random: &mut Random) -> Self {
        let allow = match random.below(6) {
            0 => vec!["*"],
            1 | 2 => vec!["store.*"],
            3 => vec!["store.subscribe", "store.insert", "store.all", "store.query"],
            4 => vec!["store.transaction", "store.update", "store.get", "store.paginate", "store.delete"],
            _ => (0..4).map(|_| OPERATIONS[random.below(31)].0).collect(),
        };
        let buckets = random.one_in(2).then(|| (0..=random.below(2)).map(|_| random.pick(&BUCKETS)).collect());
        let rows = (!random.one_in(5) && allow[0] != "*").then(|| Rows::random(random, 2));
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
    fn random(random: &mut Random, place: usize) -> Self {
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
        // Some are the same in other roles.
        let user = format!("user-{}", place % 4);
        let lasts = random.one_in(4).then_some(5000);
        Self { token: format!("token-{place}"), user, roles, metadata, lasts }
    }

    fn token(&self) -> StaticToken {
        let expiry = self.lasts.map(|lasts| TokenExpiry::After(Duration::from_millis(lasts)));
        StaticToken::new(&*self.user, &self.roles).metadata(self.metadata.clone()).expiry(expiry.unwrap_or_default())
    }
}

impl Rows {
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

    /// Whether a record is among them; nobody knows if the person lacks what they speak of.
    fn have(&self, person: &Person, record: &Json) -> Option<bool> {
        let of_person = |name: &str| person.metadata.get(name).filter(|value| !value.is_null());
        Some(match self {
            Self::Own => record["owner"] == *person.user,
            Self::OfTeam => record.get("team") == Some(of_person("team")?),
            Self::OfOtherTeams => record.get("team") != Some(of_person("team")?),
            Self::OfTeams => {
                let teams = of_person("teams")?.as_array()?;
                record.get("team").is_some_and(|team| teams.contains(team))
            }
            Self::OfRole => person.roles.iter().any(|role| record["role"] == **role),
            Self::Below(bound) => record["n"].as_u64().is_some_and(|n| n < *bound),
            Self::Public => record["public"] == true,
            Self::Any(rows) => {
                rows.iter().map(|rows| rows.have(person, record)).collect::<Option<Vec<_>>>()?.contains(&true)
            }
            Self::All(rows) => {
                !rows.iter().map(|rows| rows.have(person, record)).collect::<Option<Vec<_>>>()?.contains(&false)
            }
        })
    }
}
