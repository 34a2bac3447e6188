//! The system bucket of revoked users, which persists revocations across restarts.
//!
//! Each row is a user. It expires together with the revocation and is then deleted by the sweep of the store. A running server reads
//! only its list in memory.

use serde_json::{Map, Value as Json, json};
use tidewire_store::system::{SystemBucketError, SystemBuckets};
use tidewire_store::{Draft, Store, StoreError};

use crate::auth::Revocations;

const BUCKET: &str = "$revoked_users";

/// The store's field for the expiry of a row, in milliseconds since 1970.
const EXPIRES_AT: &str = "_expiresAt";

pub(crate) fn declare(buckets: SystemBuckets) -> Result<SystemBuckets, SystemBucketError> {
    buckets.declare(BUCKET, &json!({"key": "userId", "schema": {"userId": {"type": "string"}}}))
}

/// Returns whether revocations are persisted: the store is persistent and the bucket is declared.
pub(crate) fn is_stored(store: &Store) -> bool {
    store.stats().is_persistent && store.snapshot().state.system_bucket(BUCKET).is_ok()
}

/// Loads the stored revocations.
pub(crate) fn restore(store: &Store, revocations: &Revocations) {
    let (snapshot, now) = (store.snapshot(), store.now());
    // The embedding program has not declared the bucket.
    let Ok(bucket) = snapshot.state.system_bucket(BUCKET) else { return };
    for record in bucket.rows().map(tidewire_store::Row::to_record) {
        if let (Some(user_id), Some(until)) =
            (record.get("userId").and_then(Json::as_str), record.get(EXPIRES_AT).and_then(Json::as_u64))
        {
            revocations.restore(user_id, until, now);
        }
    }
}

/// Stores a revocation that expires at `until`.
pub(crate) fn store(draft: &mut Draft, user_id: &str, until: u64) -> Result<(), StoreError> {
    let members = [("userId", json!(user_id)), (EXPIRES_AT, json!(until))];
    let record: Map<String, Json> = members.map(|(name, value)| (name.to_owned(), value)).into_iter().collect();
    draft.system(|draft| draft.insert(BUCKET, record)).map(drop)
}
