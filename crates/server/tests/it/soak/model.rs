//! The writes of a writer, and the records that must exist afterwards.

use std::collections::BTreeMap;

use serde_json::{Value as Json, json};

use super::query::{TOTAL_FUNDS, rows};
use super::rng::Rng;

/// Maximum number of items of a writer.
const MAX_ITEMS: usize = 10;
/// Number and size of the large records of a writer.
const LARGE_RECORDS: usize = 3;
const LARGE_RECORD_BYTES: usize = 3000;

/// A write.
#[derive(Debug)]
pub(super) struct Write {
    /// The sequence number among all writes of its writer, from 1.
    pub(super) number: usize,
    pub(super) operation: &'static str,
    pub(super) params: Json,
    pub(super) expected: ExpectedReply,
    /// The request id on the current connection.
    pub(super) id: u64,
    pub(super) is_sent: bool,
    pub(super) is_retried: bool,
}

/// The expected reply to a write.
#[derive(Debug)]
pub(super) enum ExpectedReply {
    /// The record.
    Record {
        n: usize,
        version: u64,
    },
    /// The record. The write has no idempotency key; a retry is recognized by the version.
    Versioned {
        n: usize,
        version: u64,
    },
    /// The records.
    Records {
        n: usize,
        count: usize,
    },
    Deleted,
    /// The first result is the account before the transfer.
    Transfer {
        before: i64,
        n: usize,
    },
}

impl ExpectedReply {
    /// Returns whether a repeated request gets the same reply.
    pub(super) fn is_repeatable(&self) -> bool {
        !matches!(self, Self::Versioned { .. })
    }

    pub(super) fn check(&self, reply: &Json) {
        let is_expected = match self {
            Self::Record { n, version } | Self::Versioned { n, version } => {
                reply["n"] == json!(n) && reply["_version"] == json!(version)
            }
            Self::Records { n, count } => {
                let records = rows(&reply["records"]);
                records.len() == *count && records.iter().all(|record| record["n"] == json!(n))
            }
            Self::Deleted => *reply == json!({"deleted": true}),
            Self::Transfer { before, n } => {
                let results = rows(&reply["results"]);
                results.len() == 6
                    && results[0]["data"]["amount"] == json!(before)
                    && results[1..].iter().all(|result| result["data"]["n"] == json!(n))
            }
        };
        assert!(is_expected, "expected {self:?}, got {reply}");
    }
}

/// The records of a writer.
#[derive(Debug)]
pub(super) struct Model {
    pub(super) owner: String,
    writes: usize,
    /// By key: number of the last write, rank and version.
    pub(super) items: BTreeMap<String, (u64, u64, u64)>,
    /// By key: number of the last write, and version.
    heavy: BTreeMap<String, (u64, u64)>,
    /// The amount of the first account in the left bucket, which determines all others.
    amount: i64,
    transfers: u64,
    /// Numbers of the writes in the log.
    log: Vec<usize>,
}

impl Model {
    pub(super) fn new(owner: String) -> Self {
        let (items, heavy) = (BTreeMap::new(), BTreeMap::new());
        Self { owner, writes: 0, items, heavy, amount: TOTAL_FUNDS / 2, transfers: 0, log: Vec::new() }
    }

    /// Returns the initial accounts of an owner.
    pub(super) fn accounts(owner: &str) -> [Json; 2] {
        ["a", "b"]
            .map(|name| json!({"id": format!("{owner}-{name}"), "owner": owner, "amount": TOTAL_FUNDS / 2, "n": 0}))
    }

    /// Returns the next random write.
    pub(super) fn write(&mut self, rng: &mut Rng) -> Write {
        self.writes += 1;
        let (operation, mut params, expected) = match rng.below(16) {
            0..5 if self.items.len() < MAX_ITEMS => self.insert(rng),
            5 if self.items.len() + 2 < MAX_ITEMS => self.insert_many(rng),
            0..8 => self.update(rng),
            8 => self.delete(rng),
            9 | 10 => self.upsert_heavy(rng),
            11 => self.log(),
            _ => self.transfer(rng),
        };
        if expected.is_repeatable() {
            params["idempotencyKey"] = json!(format!("{}-{}", self.owner, self.writes));
        }
        let number = self.writes;
        Write { number, operation, params, expected, id: 0, is_sent: false, is_retried: false }
    }

    fn item(&mut self, name: &str, rng: &mut Rng) -> Json {
        let (key, rank) = (format!("{}-{}{name}", self.owner, self.writes), rng.below(100) as u64);
        self.items.insert(key.clone(), (self.writes as u64, rank, 1));
        json!({"id": key, "owner": self.owner, "n": self.writes, "rank": rank})
    }

    fn insert(&mut self, rng: &mut Rng) -> (&'static str, Json, ExpectedReply) {
        let data = self.item("", rng);
        ("store.insert", json!({"bucket": "items", "data": data}), ExpectedReply::Record { n: self.writes, version: 1 })
    }

    fn insert_many(&mut self, rng: &mut Rng) -> (&'static str, Json, ExpectedReply) {
        let data = ["x", "y"].map(|name| self.item(name, rng));
        (
            "store.insertMany",
            json!({"bucket": "items", "data": data}),
            ExpectedReply::Records { n: self.writes, count: 2 },
        )
    }

    fn update(&mut self, rng: &mut Rng) -> (&'static str, Json, ExpectedReply) {
        let index = rng.below(self.items.len());
        let Some((key, item)) = self.items.iter_mut().nth(index) else { return self.insert(rng) };
        let version = item.2;
        *item = (self.writes as u64, rng.below(100) as u64, version + 1);
        let data = json!({"n": self.writes, "rank": item.1});
        let (n, next) = (self.writes, version + 1);
        match rng.below(4) {
            0 => (
                "store.update",
                json!({"bucket": "items", "key": key, "data": data, "version": version}),
                ExpectedReply::Versioned { n, version: next },
            ),
            1 => {
                let data = json!({"id": key, "n": n, "rank": item.1});
                ("store.upsert", json!({"bucket": "items", "data": data}), ExpectedReply::Record { n, version: next })
            }
            _ => (
                "store.update",
                json!({"bucket": "items", "key": key, "data": data}),
                ExpectedReply::Record { n, version: next },
            ),
        }
    }

    fn delete(&mut self, rng: &mut Rng) -> (&'static str, Json, ExpectedReply) {
        let index = rng.below(self.items.len());
        let Some(key) = self.items.keys().nth(index).cloned() else { return self.insert(rng) };
        self.items.remove(&key);
        ("store.delete", json!({"bucket": "items", "key": key}), ExpectedReply::Deleted)
    }

    fn upsert_heavy(&mut self, rng: &mut Rng) -> (&'static str, Json, ExpectedReply) {
        let key = format!("{}-{}", self.owner, rng.below(LARGE_RECORDS));
        let (last, version) = self.heavy.entry(key.clone()).or_default();
        (*last, *version) = (self.writes as u64, *version + 1);
        let expected = ExpectedReply::Record { n: self.writes, version: *version };
        let data = json!({"id": key, "owner": self.owner, "n": self.writes, "pad": "~".repeat(LARGE_RECORD_BYTES)});
        ("store.upsert", json!({"bucket": "heavy", "data": data}), expected)
    }

    /// Inserts into the log. The server generates the key, so a write that took effect twice would add a second record.
    fn log(&mut self) -> (&'static str, Json, ExpectedReply) {
        self.log.push(self.writes);
        let data = json!({"owner": self.owner, "n": self.writes});
        ("store.insert", json!({"bucket": "log", "data": data}), ExpectedReply::Record { n: self.writes, version: 1 })
    }

    /// Moves an amount between the two accounts in the left bucket, and back in the right bucket.
    fn transfer(&mut self, rng: &mut Rng) -> (&'static str, Json, ExpectedReply) {
        let before = self.amount;
        self.amount = i64::try_from(rng.below(usize::try_from(TOTAL_FUNDS).unwrap_or_default())).unwrap_or_default();
        self.transfers += 1;
        self.log.push(self.writes);
        let [a, b] = ["a", "b"].map(|name| format!("{}-{name}", self.owner));
        let update = |bucket: &str, key: &str, amount: i64| json!({"op": "update", "bucket": bucket, "key": key, "data": {"amount": amount, "n": self.writes}});
        let operations = json!([
            {"op": "get", "bucket": "left", "key": a},
            update("left", &a, self.amount),
            update("right", &a, TOTAL_FUNDS - self.amount),
            update("right", &b, self.amount),
            update("left", &b, TOTAL_FUNDS - self.amount),
            {"op": "insert", "bucket": "log", "data": {"owner": self.owner, "n": self.writes}},
        ]);
        ("store.transaction", json!({"operations": operations}), ExpectedReply::Transfer { before, n: self.writes })
    }

    /// Checks that these are exactly the records of the owner: no write is lost or duplicated.
    pub(super) fn check(&self, bucket: &str, records: &[Json]) {
        let number = |row: &Json, field: &str| row[field].as_u64().unwrap_or_else(|| panic!("no {field} in {row}"));
        let key = |row: &Json| row["id"].as_str().unwrap_or_default().to_owned();
        let pair = |row: &Json| (key(row), (number(row, "n"), number(row, "_version")));
        let owner = &self.owner;
        match bucket {
            "items" => {
                let item = |row: &Json| (key(row), (number(row, "n"), number(row, "rank"), number(row, "_version")));
                assert_eq!(records.iter().map(item).collect::<BTreeMap<_, _>>(), self.items, "items of {owner}");
            }
            "heavy" => {
                assert_eq!(
                    records.iter().map(pair).collect::<BTreeMap<_, _>>(),
                    self.heavy,
                    "large records of {owner}"
                );
            }
            "log" => {
                let mut log: Vec<u64> = records.iter().map(|row| number(row, "n")).collect();
                log.sort_unstable();
                let expected: Vec<u64> = self.log.iter().map(|write| *write as u64).collect();
                assert_eq!(log, expected, "the log of {owner}");
            }
            _ => {
                let first = if bucket == "left" { self.amount } else { TOTAL_FUNDS - self.amount };
                let amounts: Vec<Option<i64>> = records.iter().map(|row| row["amount"].as_i64()).collect();
                assert_eq!(amounts, [Some(first), Some(TOTAL_FUNDS - first)], "accounts of {owner}");
                let versions: Vec<u64> = records.iter().map(|row| number(row, "_version")).collect();
                assert_eq!(versions, [self.transfers + 1; 2], "versions of the accounts of {owner}");
            }
        }
    }
}
