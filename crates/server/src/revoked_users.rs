//! The system bucket of revoked users, so that a revocation survives a restart.
//!
//! A row is a user, and expires with the revocation; the sweep of the store then removes it. While the server runs it looks at the
//! list in memory only.

use serde_json::{Map, Value as Json, json};
use tidewire_store::system::{SystemBucketError, SystemBuckets};
use tidewire_store::{Draft, Store, StoreError};

use crate::auth::Revocations;

const BUCKET: &str = "$revoked_users";

/// The field that the store itself knows: when a row expires, in milliseconds since 1970.
const EXPIRES_AT: &str = "_expiresAt";

pub(crate) fn declare(buckets: SystemBuckets) -> Result<SystemBuckets, SystemBucketError> {
    buckets.declare(BUCKET, &json!({"key": "userId", "schema": {"userId": {"type": "string"}}}))
}

/// Whether revocations are stored: the bucket is declared, and the store outlives the process.
pub(crate) fn is_stored(store: &Store) -> bool {
    store.stats().is_persistent && store.snapshot().state.system_bucket(BUCKET).is_ok()
}

/// Adds the stored revocations to the list.
pub(crate) fn restore(store: &Store, revocations: &Revocations) {
    let (snapshot, now) = (store.snapshot(), store.now());
    // A store without the bucket has none: the embedding program has not declared it.
    let Ok(bucket) = snapshot.state.system_bucket(BUCKET) else { return };
    for record in bucket.rows().map(tidewire_store::Row::to_record) {
        if let (Some(user_id), Some(until)) =
            (record.get("userId").and_then(Json::as_str), record.get(EXPIRES_AT).and_then(Json::as_u64))
        {
            revocations.restore(user_id, until, now);
        }
    }
}

/// Stores that a user is revoked until this time.
pub(crate) fn store(draft: &mut Draft, user_id: &str, until: u64) -> Result<(), StoreError> {
    let members = [("userId", json!(user_id)), (EXPIRES_AT, json!(until))];
    let record: Map<String, Json> = members.map(|(name, value)| (name.to_owned(), value)).into_iter().collect();
    draft.system(|draft| draft.insert(BUCKET, record)).map(drop)
}
