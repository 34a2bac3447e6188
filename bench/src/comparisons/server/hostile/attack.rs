//! The requests of a hostile client.

use std::sync::Arc;

use serde_json::json;

use super::super::client::{self, position};
use super::super::{archive, get};

/// A kind of request that a client sends repeatedly.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Attack {
    /// Cheap reads by key: the baseline.
    Ordinary,
    /// Counts the records that match a costly filter.
    Count,
    /// Sorts all records and returns the first ones.
    Sort,
    /// Counts in a transaction, with the same filter.
    Transaction,
    /// Opens and closes subscriptions to a tenth of the records.
    Subscribe,
    /// Writes as many small records as a request can have.
    InsertMany,
    /// Requests statistics.
    Statistics,
}

/// A frame as a client sends it.
pub(super) type Frame = Arc<[u8]>;

/// The sequence of requests of one connection.
pub(super) struct Requests {
    attack: Attack,
    /// The requests that are sent in turn. Empty for subscriptions, because each request differs.
    prepared: Vec<Frame>,
    /// The number of requests so far.
    sent: usize,
}

/// The number of conditions of a costly filter.
const CONDITIONS: usize = 100;

/// The number of rows that [`Attack::Ordinary`] reads.
const ORDINARY_ROWS: u64 = 100;

impl Attack {
    /// All attacks, the baseline first.
    pub(super) const ALL: [Self; 7] = [
        Self::Ordinary,
        Self::Count,
        Self::Sort,
        Self::Transaction,
        Self::Subscribe,
        Self::InsertMany,
        Self::Statistics,
    ];

    /// Returns the name of the contender.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Ordinary => "ordinary",
            Self::Count => "count",
            Self::Sort => "sort",
            Self::Transaction => "transaction",
            Self::Subscribe => "subscribe",
            Self::InsertMany => "insertMany",
            Self::Statistics => "statistics",
        }
    }

    /// Returns the requests for an archive with `records` records. `insert_many_bytes` is the length of a `store.insertMany` request.
    pub(super) fn requests(self, records: u64, insert_many_bytes: usize) -> Requests {
        let archive = archive::BUCKET;
        let texts: Vec<String> = match self {
            Self::Ordinary => (0..ORDINARY_ROWS).map(|number| get::request(1, number)).collect(),
            Self::Count => {
                vec![json!({"id": 1, "type": "store.count", "bucket": archive, "filter": costly_filter()}).to_string()]
            }
            Self::Sort => {
                let sort = json!({"rank": "desc"});
                vec![json!({"id": 1, "type": "store.query", "bucket": archive, "sort": sort, "limit": 10}).to_string()]
            }
            Self::Transaction => {
                let count = json!({"op": "count", "bucket": archive, "filter": costly_filter()});
                vec![json!({"id": 1, "type": "store.transaction", "operations": [count]}).to_string()]
            }
            Self::Subscribe => Vec::new(),
            Self::InsertMany => vec![insert_many(records, insert_many_bytes)],
            Self::Statistics => ["store.stats", "server.stats", "server.connections"]
                .map(|name| json!({"id": 1, "type": name}).to_string())
                .into(),
        };
        let prepared = texts.iter().map(|text| client::text(text).into()).collect();
        Requests { attack: self, prepared, sent: 0 }
    }
}

/// Returns a filter whose conditions are all tested for every record. It matches no record.
fn costly_filter() -> serde_json::Value {
    let condition = |number| json!({"name": {"$contains": format!("absent {number}")}});
    json!({"$or": (0..CONDITIONS).map(condition).collect::<Vec<_>>()})
}

/// Returns a request of at most `bytes` bytes, with small records whose keys follow those of the archive. Each request has the same
/// keys, so that the bucket does not grow. With smaller records, a request would exceed the limit of 4 MiB per commit.
fn insert_many(first: u64, bytes: usize) -> String {
    let mut text = format!(r#"{{"id":1,"type":"store.insertMany","bucket":"{}","data":["#, archive::BUCKET);
    for number in first.. {
        let record = format!(r#"{{"id":{number},"group":{},"rank":{}}},"#, archive::GROUPS, archive::RANKS);
        if text.len() + record.len() + "]}".len() > bytes {
            break;
        }
        text.push_str(&record);
    }
    assert!(text.pop() == Some(','), "{bytes} bytes are enough for a record");
    text.push_str("]}");
    text
}

impl Requests {
    /// Returns the next request, without a preceding reply.
    pub(super) fn next(&mut self) -> Frame {
        let number = self.sent;
        self.sent += 1;
        if self.attack == Attack::Subscribe {
            return client::text(&subscribe(number)).into();
        }
        Arc::clone(&self.prepared[number % self.prepared.len()])
    }

    /// Returns the request that follows a reply, given the first bytes of the reply. If it opened a subscription, the request ends it.
    pub(super) fn after(&mut self, reply: &[u8]) -> Frame {
        const ID: &[u8] = br#""subscriptionId":""#;
        let Some(at) = position(reply, ID) else { return self.next() };
        let id = reply[at + ID.len()..].split(|&byte| byte == b'"').next().unwrap_or_default();
        let id = client::lossy(id);
        client::text(&json!({"id": 1, "type": "store.unsubscribe", "subscriptionId": id}).to_string()).into()
    }
}

/// Returns a request that subscribes to one group of the archive. Its filter has a condition that matches every record and differs from
/// request to request.
fn subscribe(number: usize) -> String {
    let group = number as u64 % archive::GROUPS;
    let filter = json!({"group": group, "rank": {"$lt": archive::RANKS + number as u64}});
    let config = json!({"bucket": archive::BUCKET, "filter": filter, "fields": ["id", "rank"]});
    json!({"id": 1, "type": "store.subscribe", "config": config}).to_string()
}
