//! The queries, and invariants of their results.

use serde_json::{Value as Json, json};

/// The sum of the two accounts of a writer, in each of the two account buckets.
pub(super) const TOTAL_FUNDS: i64 = 2000;

/// A query, by name or inline.
#[derive(Debug, Clone)]
pub(super) struct LiveQuery {
    pub(super) config: Json,
    pub(super) params: Json,
    /// Its name, if it is defined on the server.
    pub(super) name: Option<&'static str>,
    invariant: Invariant,
}

/// A property of every result.
#[derive(Debug, Clone, Copy)]
enum Invariant {
    Unchecked,
    /// The rows are pairs of accounts that are changed together and hold [`TOTAL_FUNDS`].
    Accounts,
    /// The result is the sum of all accounts.
    Funds {
        owners: i64,
    },
    /// At most `limit` rows, in descending order of rank.
    Top {
        limit: usize,
    },
}

/// Returns the definitions of the named queries.
pub(super) fn named() -> [(&'static str, Json); 4] {
    [
        ("all-items", json!({"bucket": "items"})),
        ("items-of", json!({"bucket": "items", "filter": {"owner": "{{ params.owner }}"}})),
        ("left", json!({"bucket": "left"})),
        ("ranks", json!({"bucket": "items", "aggregate": {"function": "sum", "field": "rank", "groupBy": "owner"}})),
    ]
}

fn by_name(name: &'static str, params: Json, invariant: Invariant) -> LiveQuery {
    let definition = named().into_iter().find(|(defined, _)| *defined == name);
    LiveQuery { config: definition.expect("the query is defined").1, params, name: Some(name), invariant }
}

fn inline(config: Json, invariant: Invariant) -> LiveQuery {
    LiveQuery { config, params: json!({}), name: None, invariant }
}

/// Returns the items of a writer.
pub(super) fn items_of(owner: &str) -> LiveQuery {
    by_name("items-of", json!({"owner": owner}), Invariant::Unchecked)
}

/// Returns the large records, which fill the buffers of slow readers.
pub(super) fn heavy() -> LiveQuery {
    inline(json!({"bucket": "heavy"}), Invariant::Unchecked)
}

/// Returns all queries, for this number of writers.
pub(super) fn all(writers: usize) -> Vec<LiveQuery> {
    let owners = i64::try_from(writers).expect("few writers");
    vec![
        by_name("all-items", json!({}), Invariant::Unchecked),
        by_name("left", json!({}), Invariant::Accounts),
        by_name("ranks", json!({}), Invariant::Unchecked),
        items_of("w0"),
        heavy(),
        inline(json!({"bucket": "right"}), Invariant::Accounts),
        inline(json!({"bucket": "items", "filter": {"rank": {"$gte": 50}}}), Invariant::Unchecked),
        inline(
            json!({"bucket": "items", "filter": {"rank": {"$lt": 30}}, "fields": ["owner", "rank"]}),
            Invariant::Unchecked,
        ),
        inline(
            json!({"bucket": "items", "sort": {"rank": "desc", "id": "asc"}, "limit": 5}),
            Invariant::Top { limit: 5 },
        ),
        inline(json!({"bucket": "items", "sort": {"rank": "asc"}, "offset": 3, "limit": 7}), Invariant::Unchecked),
        inline(json!({"bucket": "items", "aggregate": {"function": "count"}}), Invariant::Unchecked),
        inline(
            json!({"bucket": "items", "filter": {"rank": {"$gte": 90}}, "aggregate": {"function": "max", "field": "rank"}}),
            Invariant::Unchecked,
        ),
        inline(
            json!({"bucket": "right", "aggregate": {"function": "sum", "field": "amount"}}),
            Invariant::Funds { owners },
        ),
        inline(json!({"bucket": "log", "filter": {"n": {"$gte": 10}}}), Invariant::Unchecked),
    ]
}

impl LiveQuery {
    /// Identifies equal queries.
    pub(super) fn identity(&self) -> String {
        json!([self.config, self.params]).to_string()
    }

    /// Returns the parameters of `store.subscribe`.
    pub(super) fn subscribe(&self) -> Json {
        match self.name {
            Some(name) => json!({"query": name, "params": self.params}),
            None => json!({"config": self.config}),
        }
    }

    /// Returns the parameters of `store.query`.
    pub(super) fn query(&self) -> Json {
        let mut params = self.config.clone();
        params["params"] = self.params.clone();
        params
    }

    /// Returns whether the entries of its deltas have indexes.
    pub(super) fn is_indexed(&self) -> bool {
        ["sort", "limit", "offset", "fields"].iter().any(|name| self.config.get(name).is_some())
    }

    /// Checks the invariant on a result.
    pub(super) fn check(&self, result: &Json) {
        match self.invariant {
            Invariant::Unchecked => {}
            Invariant::Accounts => check_accounts(result),
            Invariant::Funds { owners } => {
                let all = json!(owners * TOTAL_FUNDS);
                assert_eq!(result.as_f64(), all.as_f64(), "partial transaction in {}", self.config);
            }
            Invariant::Top { limit } => {
                let ranks: Vec<i64> = rows(result).iter().filter_map(|row| row["rank"].as_i64()).collect();
                assert!(ranks.len() <= limit && ranks.is_sorted_by(|a, b| a >= b), "{} gives {ranks:?}", self.config);
            }
        }
    }
}

pub(super) fn rows(result: &Json) -> &[Json] {
    result.as_array().map_or(&[], Vec::as_slice)
}

/// Checks that both accounts of an owner were changed together.
fn check_accounts(result: &Json) {
    let (pairs, rest) = rows(result).as_chunks::<2>();
    for [a, b] in pairs {
        let both = |field: &str| (a[field].clone(), b[field].clone());
        let (owners, versions, writes) = (both("owner"), both("_version"), both("n"));
        assert_eq!(owners.0, owners.1, "accounts must come in pairs: {result}");
        let is_consistent = versions.0 == versions.1 && writes.0 == writes.1;
        let funds = a["amount"].as_i64().zip(b["amount"].as_i64()).map(|(a, b)| a + b);
        assert!(is_consistent && funds == Some(TOTAL_FUNDS), "partial transaction: {a} {b}");
    }
    assert!(rest.iter().all(|row| row["owner"] == "marker"), "accounts must come in pairs: {result}");
}
