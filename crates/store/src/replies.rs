//! Idempotency keys: stored replies to writes.
//!
//! A client that does not know whether a write succeeded retries it with the same key, and gets the first reply. The reply is a row
//! of an internal bucket, committed with the write itself: after a crash either both exist or neither.
//!
//! The stored replies are limited, for each user and in total. If the reply was evicted, a retry runs the write again. A user that
//! reaches its quota loses its own oldest replies, never those of another user. The limits in total evict the oldest reply of the
//! user with the most replies or bytes.

use std::sync::{Arc, LazyLock};

use serde_json::{Map, Value as Json, json};

use crate::catalog::REPLIES;
use crate::{Change, Draft, Field, Row, StoreError, Value};

static ID: LazyLock<Field> = LazyLock::new(|| Field::new("id"));
static EXPIRES_AT: LazyLock<Field> = LazyLock::new(|| Field::new("_expiresAt"));

/// Returns the user of a stored reply.
pub(crate) fn user_of(row: &Row) -> Arc<str> {
    let Some(Value::String(id)) = row.get(&ID) else { return "".into() };
    // A row with a malformed id belongs to the user with the empty name.
    serde_json::from_str::<(String, String)>(&id).map_or_else(|_| "".into(), |(user, _)| user.into())
}

/// Returns whether a change of a commit evicts a reply that has not expired.
pub(crate) fn is_eviction(change: &Change, at: u64) -> bool {
    let Change { bucket, old: Some(old), new: None, .. } = change else { return false };
    **bucket == *REPLIES
        && old.text_of(&EXPIRES_AT).and_then(|text| text.parse().ok()).is_some_and(|time: u64| time > at)
}

impl Draft {
    /// Runs `work` and stores its reply for 24 hours. If this user has a stored reply for this key, returns it instead. `request`
    /// identifies the request; the same key with another request is an error. A failed write has no effect, and can be retried with
    /// the same key.
    ///
    /// The stored replies are bounded, so a reply can be evicted earlier: see
    /// [`Limits::max_user_replies`](crate::Limits::max_user_replies) and [`Limits::max_replies`](crate::Limits::max_replies).
    pub fn once(
        &mut self,
        user: &str,
        key: &str,
        request: &str,
        work: impl FnOnce(&mut Self) -> Result<Json, StoreError>,
    ) -> Result<Json, StoreError> {
        let id = json!([user, key]).to_string();
        let (_, replies) = self.state().any_bucket(REPLIES)?;
        if let Some(known) = replies.get(&Value::String((&*id).into())).filter(|row| replies.is_live(row, self.now())) {
            let mut known = known.to_record();
            if known.get("request").and_then(Json::as_str) != Some(request) {
                return Err(StoreError::KeyReused { key: key.to_owned() });
            }
            return Ok(known.swap_remove("reply").unwrap_or_default());
        }
        self.atomically(|draft| {
            let reply = work(draft)?;
            draft.store_reply(user, id, request, &reply)?;
            Ok(reply)
        })
    }

    fn store_reply(&mut self, user: &str, id: String, request: &str, reply: &Json) -> Result<(), StoreError> {
        const DAY: u64 = 24 * 60 * 60 * 1000;
        // Replacing an expired reply would keep its ordinal, and the eviction order would treat the new reply as old.
        self.remove_row(REPLIES, &Value::String((&*id).into()))?;
        let record: Map<String, Json> = [
            ("id", Json::String(id)),
            ("request", json!(request)),
            ("reply", reply.clone()),
            ("_createdAt", json!(self.now())),
            ("_expiresAt", json!(self.now().saturating_add(DAY))),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .into_iter()
        .collect();
        let row = Row::new(&record)?;
        let (len, max) = (row.size(), self.limits().max_reply_bytes);
        if len > max {
            return Err(StoreError::LongReply { len, max });
        }
        while let Some(evicted) = self.reply_to_evict(user, len)? {
            let Some(key) = evicted.get(&ID) else { break };
            self.remove_row(REPLIES, &key)?;
        }
        self.put_row(REPLIES, row).map(drop)
    }

    /// Returns the reply that must be evicted before this user can store a reply of `len` bytes, if any.
    fn reply_to_evict(&self, user: &str, len: usize) -> Result<Option<Row>, StoreError> {
        let (_, replies) = self.state().any_bucket(REPLIES)?;
        let (limits, usage) = (self.limits(), replies.usage(user));
        let is_over_quota = usage.records >= limits.max_user_replies || usage.bytes + len > limits.max_user_reply_bytes;
        let evicted = if is_over_quota && usage.oldest.is_some() {
            usage.oldest
        } else if replies.len() >= limits.max_replies.max(1) {
            replies.oldest_by_records()
        } else if replies.bytes() + len > limits.max_reply_bytes {
            replies.oldest_by_bytes()
        } else {
            None
        };
        Ok(evicted.and_then(|ordinal| replies.row(ordinal)).cloned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Limits, State};

    #[test]
    fn retry_with_the_same_key_runs_once() {
        let mut draft = Draft::new(State::new(), 1000);
        draft
            .define_bucket(
                "b",
                &json!({"key": "id", "schema": {"id": {"type": "number", "generated": "autoincrement"}}}),
            )
            .unwrap();
        let insert = |draft: &mut Draft| draft.insert("b", Map::new()).map(|row| Json::Object(row.to_record()));
        let first = draft.once("u", "k", "insert", insert).unwrap();
        assert_eq!(draft.once("u", "k", "insert", insert).unwrap(), first);
        assert_eq!(draft.state().bucket("b").unwrap().len(), 1);
        assert_eq!(draft.once("u", "k", "other", insert), Err(StoreError::KeyReused { key: "k".to_owned() }));
        assert_ne!(draft.once("v", "k", "insert", insert).unwrap(), first, "another user has its own keys");
        // A failed write can be retried with the same key.
        let fail = |draft: &mut Draft| draft.insert("none", Map::new()).map(|_| Json::Null);
        assert!(draft.once("u", "l", "insert", fail).is_err());
        assert!(draft.once("u", "l", "insert", insert).is_ok());
        // The reply expires after a day.
        let (state, _) = draft.finish();
        let mut draft = Draft::new(state, 1000 + 24 * 60 * 60 * 1000);
        assert_ne!(draft.once("u", "k", "insert", insert).unwrap(), first);
    }

    #[test]
    fn user_above_its_quota_loses_its_own_oldest_replies() {
        let limits = Limits { max_user_replies: 3, max_user_reply_bytes: 1000, ..Limits::default() };
        let mut draft = Draft::new(State::new(), 1000).with_limits(limits);
        let usage = |draft: &Draft, user: &str| draft.state().any_bucket(REPLIES).unwrap().1.usage(user);
        draft.once("v", "k", "r", |_| Ok(json!("first"))).unwrap();
        for key in ["a", "b", "c", "d"] {
            draft.once("u", key, "r", |_| Ok(json!(key))).unwrap();
        }
        assert_eq!(usage(&draft, "u").records, 3);
        assert_eq!(draft.once("u", "b", "r", |_| Ok(json!("again"))).unwrap(), "b");
        assert_eq!(draft.once("u", "a", "r", |_| Ok(json!("again"))).unwrap(), "again", "the oldest was evicted");
        // A reply above the quota is stored alone.
        draft.once("u", "long", "r", |_| Ok(json!("x".repeat(2000)))).unwrap();
        assert_eq!(usage(&draft, "u").records, 1);
        assert_eq!(draft.once("u", "long", "r", |_| Ok(json!("again"))).unwrap(), "x".repeat(2000));
        draft.once("u", "e", "r", |_| Ok(json!("e"))).unwrap();
        assert_eq!(usage(&draft, "u").records, 1);
        assert_eq!(draft.once("v", "k", "r", |_| Ok(json!("second"))).unwrap(), "first");
        // A reply that replaces an expired one counts as new.
        let (state, _) = draft.finish();
        let mut draft = Draft::new(state, 1000 + 24 * 60 * 60 * 1000).with_limits(limits);
        draft.once("v", "l", "r", |_| Ok(json!("l"))).unwrap();
        draft.once("v", "k", "r", |_| Ok(json!("second"))).unwrap();
        draft.once("v", "m", "r", |_| Ok(json!("m"))).unwrap();
        draft.once("v", "n", "r", |_| Ok(json!("n"))).unwrap();
        assert_eq!(draft.once("v", "k", "r", |_| Ok(json!("third"))).unwrap(), "second");
    }

    #[test]
    fn users_with_equal_usage_lose_the_oldest_reply_first() {
        let limits = Limits { max_replies: 3, ..Limits::default() };
        let mut draft = Draft::new(State::new(), 1000).with_limits(limits);
        for user in ["b", "z", "a", "c"] {
            draft.once(user, "k", "r", |_| Ok(json!(user))).unwrap();
        }
        for user in ["z", "a", "c"] {
            assert_eq!(draft.once(user, "k", "r", |_| Ok(json!("again"))).unwrap(), user);
        }
    }

    #[test]
    fn reply_limits_are_enforced_in_total() {
        let limits = Limits { max_replies: 3, max_reply_bytes: 1000, ..Limits::default() };
        let mut draft = Draft::new(State::new(), 1000).with_limits(limits);
        let len = |draft: &Draft| draft.state().any_bucket(REPLIES).unwrap().1.len();
        for key in ["a", "b", "c", "d"] {
            draft.once("u", key, "r", |_| Ok(json!(key))).unwrap();
        }
        assert_eq!(len(&draft), 3);
        assert_eq!(draft.once("u", "b", "r", |_| Ok(json!("again"))).unwrap(), "b");
        assert_eq!(draft.once("u", "a", "r", |_| Ok(json!("again"))).unwrap(), "again", "the oldest was evicted");
        draft.once("u", "long", "r", |_| Ok(json!("x".repeat(700)))).unwrap();
        assert!(len(&draft) < 3, "the limit of bytes evicts replies");
        let refused = draft.once("u", "longer", "r", |_| Ok(json!("x".repeat(1000)))).unwrap_err();
        assert!(matches!(refused, StoreError::LongReply { max: 1000, .. }), "{refused}");
    }
}
