//! A client that pipelines writes, and retries them until each has taken effect once.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use serde_json::{Value as Json, json};
use tokio::sync::watch;

use super::Progress;
use super::connection::{CloseMethod, ConnectionLost};
use super::model::{ExpectedReply, Model, Write};
use super::query::rows;
use super::rng::Rng;
use super::subscriber::Subscriber;

/// Maximum number of pipelined writes.
const MAX_BATCH: usize = 12;

/// A client that writes.
pub(super) struct Writer {
    model: Model,
    rng: Rng,
    progress: Arc<watch::Sender<Progress>>,
    /// Subscribes to its own items, with snapshots and with deltas.
    subscriber: Subscriber,
    /// Number of writes not yet created.
    left: usize,
    /// Unacknowledged writes.
    pending: VecDeque<Write>,
    /// The state of its items after each write.
    items: Vec<String>,
    /// Numbers of the last acknowledged write, and of the last one sent on a lost connection.
    done: usize,
    maybe_done: usize,
    /// By subscription: the number of the write that the last result reflects.
    seen: Vec<usize>,
}

impl Writer {
    /// Creates a writer that subscribes to its own items with this subscriber.
    pub(super) fn new(
        owner: String,
        writes: usize,
        rng: Rng,
        progress: Arc<watch::Sender<Progress>>,
        own: Subscriber,
    ) -> Self {
        let model = Model::new(owner);
        Self {
            items: vec![digest(&model.items)],
            model,
            rng,
            progress,
            seen: vec![0; own.count()],
            subscriber: own,
            left: writes,
            pending: VecDeque::new(),
            done: 0,
            maybe_done: 0,
        }
    }

    /// Performs all writes. Returns the expected records.
    pub(super) async fn run(mut self) -> Model {
        while self.left > 0 || !self.pending.is_empty() {
            if self.pending.is_empty() {
                self.create_batch();
            }
            if self.attempt().await.is_err() {
                self.maybe_done = self
                    .pending
                    .iter()
                    .filter(|write| write.is_sent)
                    .map(|write| write.number)
                    .max()
                    .unwrap_or(self.done);
                self.subscriber.reset_connection();
            }
        }
        self.subscriber.disconnect(CloseMethod::Close).await;
        self.model
    }

    fn create_batch(&mut self) {
        let count = (1 + self.rng.below(MAX_BATCH)).min(self.left);
        self.left -= count;
        for _ in 0..count {
            let write = self.model.write(&mut self.rng);
            self.items.push(digest(&self.model.items));
            self.pending.push_back(write);
        }
    }

    /// Sends all unacknowledged writes, and reads the replies.
    async fn attempt(&mut self) -> Result<(), ConnectionLost> {
        let rng = &mut self.rng;
        self.subscriber.connect_and_subscribe(|| !rng.one_in(4)).await?;
        self.check_own_results();
        let break_at = self.rng.one_in(10).then(|| self.rng.below(self.pending.len() + 1));
        for (index, write) in self.pending.iter_mut().enumerate() {
            if break_at == Some(index) {
                break;
            }
            write.is_retried = write.is_sent;
            write.is_sent = true;
            write.id = self.subscriber.connection()?.send(write.operation, &write.params).await?;
        }
        if break_at.is_some() {
            let method = *self.rng.pick(&[CloseMethod::Drop, CloseMethod::Reset]);
            self.subscriber.disconnect(method).await;
            return Err(ConnectionLost);
        }
        let mut last = None;
        while let Some(write) = self.pending.front() {
            let message = self.subscriber.connection()?.expect("the reply to a write").await?;
            if message.get("id").is_none() {
                self.subscriber.apply_push(&message)?;
                self.check_own_results();
                continue;
            }
            assert_eq!(message["id"], json!(write.id), "replies must come in order: {message}");
            let reply = check_reply(write, &message)?;
            self.done = write.number;
            last = self.pending.pop_front().map(|write| (write, reply));
            self.progress.send_modify(|progress| progress.written += 1);
        }
        if let Some((write, reply)) = last
            && write.expected.is_repeatable()
            && self.rng.one_in(3)
        {
            let again = self.subscriber.request(write.operation, &write.params).await?;
            assert_eq!(again, reply, "a repeated request must get the same reply");
            self.check_own_results();
        }
        Ok(())
    }

    /// Checks that each result is the state after some write: not before its reply, and not earlier than the result before.
    fn check_own_results(&mut self) {
        let visible = self.done.max(self.maybe_done);
        for index in 0..self.subscriber.count() {
            let result = &self.subscriber.history(index).state;
            let state = digest(&rows(result).iter().map(parse_item).collect());
            let from = self.seen[index];
            let Some(after) = self.items[from..].iter().position(|items| *items == state).map(|offset| from + offset)
            else {
                let (owner, expected) = (&self.model.owner, self.items[from..].join("\n"));
                panic!("the items of {owner} are {state}, expected one of\n{expected}")
            };
            assert!(after <= visible, "{} received write {after} after {visible} replies", self.model.owner);
            self.seen[index] = after;
        }
    }
}

/// Checks a reply and returns its data. An unknown outcome is `Err`: the write is retried on another connection.
fn check_reply(write: &Write, message: &Json) -> Result<Json, ConnectionLost> {
    let Some(code) = message["code"].as_str() else {
        write.expected.check(&message["data"]);
        return Ok(message["data"].clone());
    };
    match (code, &write.expected) {
        ("SHUTTING_DOWN" | "TIMEOUT", _) => Err(ConnectionLost),
        // The first attempt took effect.
        ("CONFLICT", ExpectedReply::Versioned { version, .. }) if write.is_retried => {
            assert!(message["details"]["version"].as_u64() >= Some(*version), "{message}");
            Ok(Json::Null)
        }
        // The first attempt took effect, and a later write deleted the record.
        ("NOT_FOUND", ExpectedReply::Versioned { .. }) if write.is_retried => Ok(Json::Null),
        _ => panic!("{} {}: {message}", write.operation, write.params),
    }
}

/// Returns the key of an item, and the number of its last write, its rank and version.
fn parse_item(row: &Json) -> (String, (u64, u64, u64)) {
    let number = |field: &str| row[field].as_u64().unwrap_or_else(|| panic!("no {field} in {row}"));
    let key = row["id"].as_str().expect("an item has a key").to_owned();
    (key, (number("n"), number("rank"), number("_version")))
}

fn digest(items: &BTreeMap<String, (u64, u64, u64)>) -> String {
    json!(items).to_string()
}
