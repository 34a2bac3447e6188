//! Idempotency keys: replies to writes that may be sent again.
//!
//! A client that does not know whether a write was done sends it again with the same key, and gets the first reply. The reply is
//! a row of an internal bucket, committed with the write itself: after a crash either both exist or neither.

use serde_json::{Map, Value as Json, json};

use crate::catalog::REPLIES;
use crate::{Draft, Field, Row, StoreError, Value};

impl Draft {
    /// Does something once: if this user has done it with this key in the last 24 hours, nothing is done, and the reply is that
    /// of the first time. `request` tells one request from another; the same key with another one is an error. What fails is
    /// not remembered, because nothing was done.
    ///
    /// The memory is [bounded](crate::Limits::max_replies): the oldest replies are forgotten first.
    pub fn once(
        &mut self,
        user: &str,
        key: &str,
        request: &str,
        work: impl FnOnce(&mut Self) -> Result<Json, StoreError>,
    ) -> Result<Json, StoreError> {
        let id = json!([user, key]).to_string();
        let (_, replies) = self.state().any(REPLIES)?;
        if let Some(known) = replies.get(&Value::String((&*id).into())).filter(|row| replies.is_live(row, self.now())) {
            let mut known = known.to_record();
            if known.get("request").and_then(Json::as_str) != Some(request) {
                return Err(StoreError::KeyReused { key: key.to_owned() });
            }
            return Ok(known.swap_remove("reply").unwrap_or_default());
        }
        self.atomically(|draft| {
            let reply = work(draft)?;
            draft.remember(id, request, &reply)?;
            Ok(reply)
        })
    }

    fn remember(&mut self, id: String, request: &str, reply: &Json) -> Result<(), StoreError> {
        const DAY: u64 = 24 * 60 * 60 * 1000;
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
        let (len, limits) = (row.size(), *self.limits());
        if len > limits.max_reply_bytes {
            return Err(StoreError::LongReply { len, max: limits.max_reply_bytes });
        }
        loop {
            let (_, replies) = self.state().any(REPLIES)?;
            let has_room = replies.len() < limits.max_replies.max(1) && replies.bytes() + len <= limits.max_reply_bytes;
            let Some(oldest) = replies.oldest().filter(|_| !has_room).cloned() else { break };
            let Some(key) = oldest.get(&Field::new("id")) else { break };
            self.remove_row(REPLIES, &key)?;
        }
        self.put_row(REPLIES, row).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Limits, State};

    #[test]
    fn what_is_sent_again_is_done_once() {
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
        assert_ne!(draft.once("v", "k", "insert", insert).unwrap(), first, "keys are a user's own");
        // What fails is tried again.
        let fail = |draft: &mut Draft| draft.insert("none", Map::new()).map(|_| Json::Null);
        assert!(draft.once("u", "l", "insert", fail).is_err());
        assert!(draft.once("u", "l", "insert", insert).is_ok());
        // A day later it is another one.
        let (state, _) = draft.finish();
        let mut draft = Draft::new(state, 1000 + 24 * 60 * 60 * 1000);
        assert_ne!(draft.once("u", "k", "insert", insert).unwrap(), first);
    }

    #[test]
    fn the_memory_of_replies_is_bounded() {
        let limits = Limits { max_replies: 3, max_reply_bytes: 1000, ..Limits::default() };
        let mut draft = Draft::new(State::new(), 1000).with_limits(limits);
        let len = |draft: &Draft| draft.state().any(REPLIES).unwrap().1.len();
        for key in ["a", "b", "c", "d"] {
            draft.once("u", key, "r", |_| Ok(json!(key))).unwrap();
        }
        assert_eq!(len(&draft), 3);
        assert_eq!(draft.once("u", "b", "r", |_| Ok(json!("again"))).unwrap(), "b");
        assert_eq!(draft.once("u", "a", "r", |_| Ok(json!("again"))).unwrap(), "again", "the oldest was forgotten");
        draft.once("u", "long", "r", |_| Ok(json!("x".repeat(700)))).unwrap();
        assert!(len(&draft) < 3, "room is counted in bytes, too");
        let refused = draft.once("u", "longer", "r", |_| Ok(json!("x".repeat(1000)))).unwrap_err();
        assert!(matches!(refused, StoreError::LongReply { max: 1000, .. }), "{refused}");
    }
}
