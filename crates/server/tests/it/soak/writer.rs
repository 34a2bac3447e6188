//! A client that writes, many at a time, until it knows of every write that it was done, once.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use serde_json::{Value as Json, json};
use tokio::sync::watch;

use super::Course;
use super::chance::Chance;
use super::link::{Leave, Lost};
use super::model::{Model, Proof, Write};
use super::query::rows;
use super::subscriber::Subscriber;

/// How many writes are sent at once, at most.
const BATCH: usize = 12;

/// A client that writes.
pub(super) struct Writer {
    model: Model,
    chance: Chance,
    course: Arc<watch::Sender<Course>>,
    /// Follows its own items, whole and as deltas.
    subscriber: Subscriber,
    /// How many writes are left to be made.
    left: usize,
    /// Writes that it does not know to be done.
    pending: VecDeque<Write>,
    /// What its items are after each write.
    items: Vec<String>,
    /// How many writes are known to be done, and how many were sent on connections that are lost.
    done: usize,
    exposed: usize,
    /// After how many writes its items were as it was told last, by subscription.
    seen: Vec<usize>,
}

impl Writer {
    /// Follows its own items with this subscriber.
    pub(super) fn new(
        owner: String,
        writes: usize,
        chance: Chance,
        course: Arc<watch::Sender<Course>>,
        own: Subscriber,
    ) -> Self {
        let model = Model::new(owner);
        Self {
            items: vec![digest(&model.items)],
            model,
            chance,
            course,
            seen: vec![0; own.count()],
            subscriber: own,
            left: writes,
            pending: VecDeque::new(),
            done: 0,
            exposed: 0,
        }
    }

    /// Writes all that it has to write. Returns what there must be then.
    pub(super) async fn run(mut self) -> Model {
        while self.left > 0 || !self.pending.is_empty() {
            if self.pending.is_empty() {
                self.make();
            }
            if self.attempt().await.is_err() {
                self.exposed = self
                    .pending
                    .iter()
                    .filter(|write| write.is_sent)
                    .map(|write| write.number)
                    .max()
                    .unwrap_or(self.done);
                self.subscriber.lose();
            }
        }
        self.subscriber.leave(Leave::Close).await;
        self.model
    }

    fn make(&mut self) {
        let count = (1 + self.chance.below(BATCH)).min(self.left);
        self.left -= count;
        for _ in 0..count {
            let write = self.model.write(&mut self.chance);
            self.items.push(digest(&self.model.items));
            self.pending.push_back(write);
        }
    }

    /// Sends all that it does not know to be done, and reads the replies.
    async fn attempt(&mut self) -> Result<(), Lost> {
        let chance = &mut self.chance;
        self.subscriber.enter(|| !chance.one_in(4)).await?;
        self.check_own();
        let breaks_off = self.chance.one_in(10).then(|| self.chance.below(self.pending.len() + 1));
        for (place, write) in self.pending.iter_mut().enumerate() {
            if breaks_off == Some(place) {
                break;
            }
            write.is_retried = write.is_sent;
            write.is_sent = true;
            write.id = self.subscriber.link()?.send(write.operation, &write.params).await?;
        }
        if breaks_off.is_some() {
            let how = *self.chance.pick(&[Leave::Drop, Leave::Reset]);
            self.subscriber.leave(how).await;
            return Err(Lost);
        }
        let mut last = None;
        while let Some(write) = self.pending.front() {
            let message = self.subscriber.link()?.expect("the reply to a write").await?;
            if message.get("id").is_none() {
                self.subscriber.take(&message)?;
                self.check_own();
                continue;
            }
            assert_eq!(message["id"], json!(write.id), "replies come in order: {message}");
            let reply = outcome(write, &message)?;
            self.done = write.number;
            last = self.pending.pop_front().map(|write| (write, reply));
            self.course.send_modify(|course| course.written += 1);
        }
        if let Some((write, reply)) = last
            && write.proof.is_repeatable()
            && self.chance.one_in(3)
        {
            let again = self.subscriber.request(write.operation, &write.params).await?;
            assert_eq!(again, reply, "the first reply is given again");
            self.check_own();
        }
        Ok(())
    }

    /// What it was told of its own items is what they were after some write, never before the reply to it, and never an earlier
    /// one than before.
    fn check_own(&mut self) {
        let known = self.done.max(self.exposed);
        for which in 0..self.subscriber.count() {
            let told = &self.subscriber.history(which).state;
            let told = digest(&rows(told).iter().map(item).collect());
            let from = self.seen[which];
            let Some(after) = self.items[from..].iter().position(|items| *items == told).map(|place| from + place)
            else {
                let (owner, could) = (&self.model.owner, self.items[from..].join("\n"));
                panic!("the items of {owner} were told to be {told}, and could be one of\n{could}")
            };
            assert!(after <= known, "{} was told of write {after} when {known} were answered", self.model.owner);
            self.seen[which] = after;
        }
    }
}

/// What is replied, if it is what it should be. A write that may have been done, or not, is sent again on another connection.
fn outcome(write: &Write, message: &Json) -> Result<Json, Lost> {
    let Some(code) = message["code"].as_str() else {
        write.proof.check(&message["data"]);
        return Ok(message["data"].clone());
    };
    match (code, &write.proof) {
        ("SHUTTING_DOWN" | "TIMEOUT", _) => Err(Lost),
        // It was done when it was sent before.
        ("CONFLICT", Proof::Versioned { version, .. }) if write.is_retried => {
            assert!(message["details"]["version"].as_u64() >= Some(*version), "{message}");
            Ok(Json::Null)
        }
        // And so was a later one, which deleted the record.
        ("NOT_FOUND", Proof::Versioned { .. }) if write.is_retried => Ok(Json::Null),
        _ => panic!("{} {}: {message}", write.operation, write.params),
    }
}

/// The key of an item, and what was written to it last, with which rank and version.
fn item(row: &Json) -> (String, (u64, u64, u64)) {
    let number = |field: &str| row[field].as_u64().unwrap_or_else(|| panic!("no {field} in {row}"));
    let key = row["id"].as_str().expect("an item has a key").to_owned();
    (key, (number("n"), number("rank"), number("_version")))
}

fn digest(items: &BTreeMap<String, (u64, u64, u64)>) -> String {
    json!(items).to_string()
}
