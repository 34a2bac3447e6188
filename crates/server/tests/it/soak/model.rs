//! What a writer writes, and what there must be when all of it is done.

use std::collections::BTreeMap;

use serde_json::{Value as Json, json};

use super::chance::Chance;
use super::query::{FUNDS, rows};

/// How many items a writer has, at most.
const ITEMS: usize = 10;
/// How many great records a writer has, and how great they are.
const HEAVY: usize = 3;
const PAD: usize = 3000;

/// A write.
#[derive(Debug)]
pub(super) struct Write {
    /// Its place among all writes of its writer, from one.
    pub(super) number: usize,
    pub(super) operation: &'static str,
    pub(super) params: Json,
    pub(super) proof: Proof,
    /// The id of its request on this connection.
    pub(super) id: u64,
    pub(super) is_sent: bool,
    pub(super) is_retried: bool,
}

/// What the reply to a write must be.
#[derive(Debug)]
pub(super) enum Proof {
    /// The record.
    Record {
        n: usize,
        version: u64,
    },
    /// The record; the write has no key, and is known to be done by the version.
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
    /// The first result is the account as it was before.
    Transfer {
        before: i64,
        n: usize,
    },
}

impl Proof {
    /// Whether the same request gives the same reply again.
    pub(super) fn is_repeatable(&self) -> bool {
        !matches!(self, Self::Versioned { .. })
    }

    pub(super) fn check(&self, reply: &Json) {
        let is_it = match self {
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
        assert!(is_it, "{self:?} is not proved by {reply}");
    }
}

/// What a writer has written.
#[derive(Debug)]
pub(super) struct Model {
    pub(super) owner: String,
    writes: usize,
    /// By key: what was written last, with which rank and version.
    pub(super) items: BTreeMap<String, (u64, u64, u64)>,
    /// By key: what was written last, and the version.
    heavy: BTreeMap<String, (u64, u64)>,
    /// What the first account in the left bucket has; all others follow from it.
    amount: i64,
    transfers: u64,
    /// Which writes are in the log.
    log: Vec<usize>,
}

impl Model {
    pub(super) fn new(owner: String) -> Self {
        let (items, heavy) = (BTreeMap::new(), BTreeMap::new());
        Self { owner, writes: 0, items, heavy, amount: FUNDS / 2, transfers: 0, log: Vec::new() }
    }

    /// The accounts of an owner at the beginning.
    pub(super) fn accounts(owner: &str) -> [Json; 2] {
        ["a", "b"].map(|name| json!({"id": format!("{owner}-{name}"), "owner": owner, "amount": FUNDS / 2, "n": 0}))
    }

    /// The next write.
    pub(super) fn write(&mut self, chance: &mut Chance) -> Write {
        self.writes += 1;
        let (operation, mut params, proof) = match chance.below(16) {
            0..5 if self.items.len() < ITEMS => self.insert(chance),
            5 if self.items.len() + 2 < ITEMS => self.insert_many(chance),
            0..8 => self.update(chance),
            8 => self.delete(chance),
            9 | 10 => self.upsert_heavy(chance),
            11 => self.log(),
            _ => self.transfer(chance),
        };
        if proof.is_repeatable() {
            params["idempotencyKey"] = json!(format!("{}-{}", self.owner, self.writes));
        }
        let number = self.writes;
        Write { number, operation, params, proof, id: 0, is_sent: false, is_retried: false }
    }

    fn item(&mut self, name: &str, chance: &mut Chance) -> Json {
        let (key, rank) = (format!("{}-{}{name}", self.owner, self.writes), chance.below(100) as u64);
        self.items.insert(key.clone(), (self.writes as u64, rank, 1));
        json!({"id": key, "owner": self.owner, "n": self.writes, "rank": rank})
    }

    fn insert(&mut self, chance: &mut Chance) -> (&'static str, Json, Proof) {
        let data = self.item("", chance);
        ("store.insert", json!({"bucket": "items", "data": data}), Proof::Record { n: self.writes, version: 1 })
    }

    fn insert_many(&mut self, chance: &mut Chance) -> (&'static str, Json, Proof) {
        let data = ["x", "y"].map(|name| self.item(name, chance));
        ("store.insertMany", json!({"bucket": "items", "data": data}), Proof::Records { n: self.writes, count: 2 })
    }

    fn update(&mut self, chance: &mut Chance) -> (&'static str, Json, Proof) {
        let place = chance.below(self.items.len());
        let Some((key, item)) = self.items.iter_mut().nth(place) else { return self.insert(chance) };
        let known = item.2;
        *item = (self.writes as u64, chance.below(100) as u64, known + 1);
        let data = json!({"n": self.writes, "rank": item.1});
        let (n, version) = (self.writes, known + 1);
        match chance.below(4) {
            0 => (
                "store.update",
                json!({"bucket": "items", "key": key, "data": data, "version": known}),
                Proof::Versioned { n, version },
            ),
            1 => {
                let data = json!({"id": key, "n": n, "rank": item.1});
                ("store.upsert", json!({"bucket": "items", "data": data}), Proof::Record { n, version })
            }
            _ => ("store.update", json!({"bucket": "items", "key": key, "data": data}), Proof::Record { n, version }),
        }
    }

    fn delete(&mut self, chance: &mut Chance) -> (&'static str, Json, Proof) {
        let place = chance.below(self.items.len());
        let Some(key) = self.items.keys().nth(place).cloned() else { return self.insert(chance) };
        self.items.remove(&key);
        ("store.delete", json!({"bucket": "items", "key": key}), Proof::Deleted)
    }

    fn upsert_heavy(&mut self, chance: &mut Chance) -> (&'static str, Json, Proof) {
        let key = format!("{}-{}", self.owner, chance.below(HEAVY));
        let (last, version) = self.heavy.entry(key.clone()).or_default();
        (*last, *version) = (self.writes as u64, *version + 1);
        let proof = Proof::Record { n: self.writes, version: *version };
        let data = json!({"id": key, "owner": self.owner, "n": self.writes, "pad": "~".repeat(PAD)});
        ("store.upsert", json!({"bucket": "heavy", "data": data}), proof)
    }

    /// The key is the server's to choose: done twice, it would be there twice.
    fn log(&mut self) -> (&'static str, Json, Proof) {
        self.log.push(self.writes);
        let data = json!({"owner": self.owner, "n": self.writes});
        ("store.insert", json!({"bucket": "log", "data": data}), Proof::Record { n: self.writes, version: 1 })
    }

    /// From one account to the other on the left, and as much the other way on the right.
    fn transfer(&mut self, chance: &mut Chance) -> (&'static str, Json, Proof) {
        let before = self.amount;
        self.amount = i64::try_from(chance.below(usize::try_from(FUNDS).unwrap_or_default())).unwrap_or_default();
        self.transfers += 1;
        self.log.push(self.writes);
        let [a, b] = ["a", "b"].map(|name| format!("{}-{name}", self.owner));
        let update = |bucket: &str, key: &str, amount: i64| json!({"op": "update", "bucket": bucket, "key": key, "data": {"amount": amount, "n": self.writes}});
        let operations = json!([
            {"op": "get", "bucket": "left", "key": a},
            update("left", &a, self.amount),
            update("right", &a, FUNDS - self.amount),
            update("right", &b, self.amount),
            update("left", &b, FUNDS - self.amount),
            {"op": "insert", "bucket": "log", "data": {"owner": self.owner, "n": self.writes}},
        ]);
        ("store.transaction", json!({"operations": operations}), Proof::Transfer { before, n: self.writes })
    }

    /// Whether these are all records of the owner: no write is lost, and none was done twice.
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
                assert_eq!(records.iter().map(pair).collect::<BTreeMap<_, _>>(), self.heavy, "great ones of {owner}");
            }
            "log" => {
                let mut log: Vec<u64> = records.iter().map(|row| number(row, "n")).collect();
                log.sort_unstable();
                let expected: Vec<u64> = self.log.iter().map(|write| *write as u64).collect();
                assert_eq!(log, expected, "the log of {owner}");
            }
            _ => {
                let first = if bucket == "left" { self.amount } else { FUNDS - self.amount };
                let amounts: Vec<Option<i64>> = records.iter().map(|row| row["amount"].as_i64()).collect();
                assert_eq!(amounts, [Some(first), Some(FUNDS - first)], "accounts of {owner}");
                let versions: Vec<u64> = records.iter().map(|row| number(row, "_version")).collect();
                assert_eq!(versions, [self.transfers + 1; 2], "versions of the accounts of {owner}");
            }
        }
    }
}
