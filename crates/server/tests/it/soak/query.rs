//! What is followed, and what must hold in every result of it.

use serde_json::{Value as Json, json};

/// What the two accounts of a writer have together, in each of the two buckets of accounts.
pub(super) const FUNDS: i64 = 2000;

/// A query, by name or not.
#[derive(Debug, Clone)]
pub(super) struct Asked {
    pub(super) config: Json,
    pub(super) params: Json,
    /// What it is defined as.
    pub(super) name: Option<&'static str>,
    law: Law,
}

/// What holds in every result.
#[derive(Debug, Clone, Copy)]
enum Law {
    Nothing,
    /// The rows are the accounts: of every owner both, changed together, with all funds.
    Accounts,
    /// The result is the sum of all accounts.
    Funds {
        owners: i64,
    },
    /// So many rows at most, the greatest rank first.
    Top {
        limit: usize,
    },
}

/// The named queries, as they are defined.
pub(super) fn named() -> [(&'static str, Json); 4] {
    [
        ("all-items", json!({"bucket": "items"})),
        ("items-of", json!({"bucket": "items", "filter": {"owner": "{{ params.owner }}"}})),
        ("left", json!({"bucket": "left"})),
        ("ranks", json!({"bucket": "items", "aggregate": {"function": "sum", "field": "rank", "groupBy": "owner"}})),
    ]
}

fn by_name(name: &'static str, params: Json, law: Law) -> Asked {
    let known = named().into_iter().find(|(known, _)| *known == name);
    Asked { config: known.expect("the query is defined").1, params, name: Some(name), law }
}

fn inline(config: Json, law: Law) -> Asked {
    Asked { config, params: json!({}), name: None, law }
}

/// The items of a writer.
pub(super) fn items_of(owner: &str) -> Asked {
    by_name("items-of", json!({"owner": owner}), Law::Nothing)
}

/// The great records, which fill the buffers of whoever is slow.
pub(super) fn heavy() -> Asked {
    inline(json!({"bucket": "heavy"}), Law::Nothing)
}

/// All that is followed while so many write.
pub(super) fn all(writers: usize) -> Vec<Asked> {
    let owners = i64::try_from(writers).expect("there are few");
    vec![
        by_name("all-items", json!({}), Law::Nothing),
        by_name("left", json!({}), Law::Accounts),
        by_name("ranks", json!({}), Law::Nothing),
        items_of("w0"),
        heavy(),
        inline(json!({"bucket": "right"}), Law::Accounts),
        inline(json!({"bucket": "items", "filter": {"rank": {"$gte": 50}}}), Law::Nothing),
        inline(json!({"bucket": "items", "filter": {"rank": {"$lt": 30}}, "fields": ["owner", "rank"]}), Law::Nothing),
        inline(json!({"bucket": "items", "sort": {"rank": "desc", "id": "asc"}, "limit": 5}), Law::Top { limit: 5 }),
        inline(json!({"bucket": "items", "sort": {"rank": "asc"}, "offset": 3, "limit": 7}), Law::Nothing),
        inline(json!({"bucket": "items", "aggregate": {"function": "count"}}), Law::Nothing),
        inline(
            json!({"bucket": "items", "filter": {"rank": {"$gte": 90}}, "aggregate": {"function": "max", "field": "rank"}}),
            Law::Nothing,
        ),
        inline(json!({"bucket": "right", "aggregate": {"function": "sum", "field": "amount"}}), Law::Funds { owners }),
        inline(json!({"bucket": "log", "filter": {"n": {"$gte": 10}}}), Law::Nothing),
    ]
}

impl Asked {
    /// What tells it from others.
    pub(super) fn identity(&self) -> String {
        json!([self.config, self.params]).to_string()
    }

    /// The parameters of `store.subscribe`.
    pub(super) fn subscribe(&self) -> Json {
        match self.name {
            Some(name) => json!({"query": name, "params": self.params}),
            None => json!({"config": self.config}),
        }
    }

    /// The parameters of `store.query`.
    pub(super) fn query(&self) -> Json {
        let mut params = self.config.clone();
        params["params"] = self.params.clone();
        params
    }

    /// Whether the entries of its deltas carry indexes.
    pub(super) fn is_indexed(&self) -> bool {
        ["sort", "limit", "offset", "fields"].iter().any(|name| self.config.get(name).is_some())
    }

    /// Whether this can be a result of it.
    pub(super) fn check(&self, result: &Json) {
        match self.law {
            Law::Nothing => {}
            Law::Accounts => check_accounts(result),
            Law::Funds { owners } => {
                let all = json!(owners * FUNDS);
                assert_eq!(result.as_f64(), all.as_f64(), "half a transaction in {}", self.config);
            }
            Law::Top { limit } => {
                let ranks: Vec<i64> = rows(result).iter().filter_map(|row| row["rank"].as_i64()).collect();
                assert!(ranks.len() <= limit && ranks.is_sorted_by(|a, b| a >= b), "{} gives {ranks:?}", self.config);
            }
        }
    }
}

pub(super) fn rows(result: &Json) -> &[Json] {
    result.as_array().map_or(&[], Vec::as_slice)
}

/// Every transaction changes both accounts of an owner.
fn check_accounts(result: &Json) {
    let (pairs, rest) = rows(result).as_chunks::<2>();
    for [a, b] in pairs {
        let both = |field: &str| (a[field].clone(), b[field].clone());
        let (owners, versions, writes) = (both("owner"), both("_version"), both("n"));
        assert_eq!(owners.0, owners.1, "accounts come in pairs: {result}");
        let is_whole = versions.0 == versions.1 && writes.0 == writes.1;
        let funds = a["amount"].as_i64().zip(b["amount"].as_i64()).map(|(a, b)| a + b);
        assert!(is_whole && funds == Some(FUNDS), "half a transaction: {a} {b}");
    }
    assert!(rest.iter().all(|row| row["owner"] == "marker"), "accounts come in pairs: {result}");
}
