//! Limits on records, on definitions and on the whole store.

use std::time::Duration;

use serde_json::{Map, Value as Json};

use crate::RowError;

/// Limits on records, definitions and the whole store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Maximum length of a record as JSON text in bytes, including generated fields. Default: 1 MiB, the limit of a message.
    pub max_record_bytes: usize,
    /// Maximum nesting depth of a record, at most 100. The record itself is the first level. Default: 64, half of what JSON parsers
    /// commonly accept.
    pub max_depth: usize,
    /// Maximum number of members of a record at all levels. The first level is also limited to 65535 members. Default: 10 000.
    pub max_fields: usize,
    /// Maximum length of the name of a bucket or query in bytes. Default: 255, as in file systems.
    pub max_name_bytes: usize,
    /// Maximum number of buckets, and maximum number of named queries. Default: 10 000.
    pub max_definitions: usize,
    /// Maximum length of all records that a transaction returns, as JSON text in bytes. Default: 16 MiB, which is 16 of the largest
    /// records.
    pub max_result_bytes: usize,
    /// Maximum time of all reads of one write. It is limited because all other writes wait meanwhile, and estimated from the examined
    /// records and conditions, so that it does not depend on the load of the machine. Default: 50 ms.
    pub max_transaction_read: Duration,
    /// Maximum memory of the records of all ordinary buckets in bytes, without their indexes: see
    /// [`StoreStats::record_bytes`](crate::StoreStats::record_bytes). A write that grows the store beyond it is rejected; reads,
    /// deletes and writes that do not grow the store still work. System buckets are not counted or limited, so that the program
    /// still works when clients have filled the store. Idempotency replies have separate limits. Default: no limit.
    pub max_store_bytes: usize,
    /// Maximum number of stored replies to writes with an idempotency key, of all users. Above it, the oldest reply of the user with
    /// the most replies is evicted. Default: 100 000.
    pub max_replies: usize,
    /// Maximum memory of the stored replies of all users in bytes. Above it, the oldest reply of the user with the most bytes is
    /// evicted. Default: 64 MiB.
    pub max_reply_bytes: usize,
    /// Maximum number of stored replies of one user. Above it, the oldest reply of the user is evicted. Default: 10 000, a tenth of
    /// the limit for all users. With 300 writes a second, replies are stored for as long as a request may take (30 s).
    pub max_user_replies: usize,
    /// Maximum memory of the stored replies of one user in bytes. Above it, the oldest reply of the user is evicted. A single larger
    /// reply is stored alone. Default: 8 MiB, an eighth of the limit for all users.
    pub max_user_reply_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_record_bytes: 1 << 20,
            max_depth: 64,
            max_fields: 10_000,
            max_name_bytes: 255,
            max_definitions: 10_000,
            max_result_bytes: 16 << 20,
            max_transaction_read: Duration::from_millis(50),
            max_store_bytes: usize::MAX,
            max_replies: 100_000,
            max_reply_bytes: 64 << 20,
            max_user_replies: 10_000,
            max_user_reply_bytes: 8 << 20,
        }
    }
}

impl Limits {
    /// Sets [`max_record_bytes`](#structfield.max_record_bytes).
    #[must_use]
    pub fn max_record_bytes(mut self, max_record_bytes: usize) -> Self {
        self.max_record_bytes = max_record_bytes;
        self
    }

    /// Sets [`max_depth`](#structfield.max_depth).
    #[must_use]
    pub fn max_depth(mut self, max_depth: usize) -> Self {
        self.max_depth = max_depth;
        self
    }

    /// Sets [`max_fields`](#structfield.max_fields).
    #[must_use]
    pub fn max_fields(mut self, max_fields: usize) -> Self {
        self.max_fields = max_fields;
        self
    }

    /// Sets [`max_name_bytes`](#structfield.max_name_bytes).
    #[must_use]
    pub fn max_name_bytes(mut self, max_name_bytes: usize) -> Self {
        self.max_name_bytes = max_name_bytes;
        self
    }

    /// Sets [`max_definitions`](#structfield.max_definitions).
    #[must_use]
    pub fn max_definitions(mut self, max_definitions: usize) -> Self {
        self.max_definitions = max_definitions;
        self
    }

    /// Sets [`max_result_bytes`](#structfield.max_result_bytes).
    #[must_use]
    pub fn max_result_bytes(mut self, max_result_bytes: usize) -> Self {
        self.max_result_bytes = max_result_bytes;
        self
    }

    /// Sets [`max_transaction_read`](#structfield.max_transaction_read).
    #[must_use]
    pub fn max_transaction_read(mut self, max_transaction_read: Duration) -> Self {
        self.max_transaction_read = max_transaction_read;
        self
    }

    /// Sets [`max_store_bytes`](#structfield.max_store_bytes).
    #[must_use]
    pub fn max_store_bytes(mut self, max_store_bytes: usize) -> Self {
        self.max_store_bytes = max_store_bytes;
        self
    }

    /// Sets [`max_replies`](#structfield.max_replies).
    #[must_use]
    pub fn max_replies(mut self, max_replies: usize) -> Self {
        self.max_replies = max_replies;
        self
    }

    /// Sets [`max_reply_bytes`](#structfield.max_reply_bytes).
    #[must_use]
    pub fn max_reply_bytes(mut self, max_reply_bytes: usize) -> Self {
        self.max_reply_bytes = max_reply_bytes;
        self
    }

    /// Sets [`max_user_replies`](#structfield.max_user_replies).
    #[must_use]
    pub fn max_user_replies(mut self, max_user_replies: usize) -> Self {
        self.max_user_replies = max_user_replies;
        self
    }

    /// Sets [`max_user_reply_bytes`](#structfield.max_user_reply_bytes).
    #[must_use]
    pub fn max_user_reply_bytes(mut self, max_user_reply_bytes: usize) -> Self {
        self.max_user_reply_bytes = max_user_reply_bytes;
        self
    }

    /// Maximum of [`max_depth`](#structfield.max_depth). JSON parsers accept 127 levels, and a reply adds some levels around a record.
    const MAX_SUPPORTED_DEPTH: usize = 100;

    /// Checks that a definition is not nested too deeply to be parsed again.
    pub(crate) fn check_depth(members: &Map<String, Json>) -> Result<(), RowError> {
        Self { max_depth: Self::MAX_SUPPORTED_DEPTH, max_fields: usize::MAX, ..Self::default() }.check(members)
    }

    /// Checks the depth and the number of members of a record. Its length is checked when it is encoded.
    pub(crate) fn check(&self, record: &Map<String, Json>) -> Result<(), RowError> {
        self.check_members(record, 1, &mut 0)
    }

    fn check_members(&self, members: &Map<String, Json>, depth: usize, fields: &mut usize) -> Result<(), RowError> {
        *fields += members.len();
        if *fields > self.max_fields {
            return Err(RowError::TooManyMembers { members: *fields, max: self.max_fields });
        }
        self.check_values(members.values(), depth, fields)
    }

    fn check_values<'a>(
        &self,
        values: impl Iterator<Item = &'a Json>,
        depth: usize,
        fields: &mut usize,
    ) -> Result<(), RowError> {
        let max = self.max_depth.min(Self::MAX_SUPPORTED_DEPTH);
        if depth > max {
            return Err(RowError::TooDeep { max });
        }
        for value in values {
            match value {
                Json::Object(members) => self.check_members(members, depth + 1, fields)?,
                Json::Array(elements) => self.check_values(elements.iter(), depth + 1, fields)?,
                _ => {}
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn depth_and_member_limits_are_enforced() {
        let limits = Limits { max_depth: 3, max_fields: 4, ..Limits::default() };
        let check = |json: Json| limits.check(json.as_object().unwrap());
        assert_eq!(check(json!({"a": {"b": [1, 2]}, "c": 1, "d": 1})), Ok(()));
        assert_eq!(check(json!({"a": {"b": [[]]}})), Err(RowError::TooDeep { max: 3 }));
        assert_eq!(check(json!({"a": {"b": {"c": {}}}})), Err(RowError::TooDeep { max: 3 }));
        let wide = json!({"a": {"b": 1, "c": 2}, "d": [{"e": 1}]});
        assert_eq!(check(wide), Err(RowError::TooManyMembers { members: 5, max: 4 }));
    }
}
