//! Definitions of buckets and queries, listings and statistics of the store.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde_json::{Map, Value as Json, json};
use tidewire_store::{BucketStats, Query, StoreError};

use super::store_writes::{Idempotency, write};
use super::subscribe::authorize_named;
use super::{Call, HandlerReply, HandlerResult, ReplyResult, Target, build_listing, check_conditions, run_on_pool};
use crate::RequestError;
use crate::protocol::reply::Data;
use crate::protocol::request::Params;
use crate::session::caller::Caller;
use crate::state::ServerState;

pub(super) fn define_bucket(call: &Call<'_>) -> HandlerResult {
    let (name, config) = (name(call.params)?, config(call.params)?);
    let idempotency = Idempotency::parse(call)?;
    call.admit_to(Target::Bucket(&name))?;
    Ok(write(call, idempotency, Vec::new(), move |draft| {
        draft.define_bucket(&name, &config)?;
        Ok(json!({"name": name, "created": true}).into())
    }))
}

pub(super) fn update_bucket(call: &Call<'_>) -> HandlerResult {
    let (name, updates) = (name(call.params)?, Json::Object(call.params.object("updates")?));
    let idempotency = Idempotency::parse(call)?;
    call.admit_to(Target::Bucket(&name))?;
    Ok(write(call, idempotency, Vec::new(), move |draft| {
        draft.update_bucket(&name, &updates)?;
        Ok(json!({"name": name, "updated": true}).into())
    }))
}

pub(super) fn drop_bucket(call: &Call<'_>) -> HandlerResult {
    let name = name(call.params)?;
    let idempotency = Idempotency::parse(call)?;
    call.admit_to(Target::Bucket(&name))?;
    Ok(write(call, idempotency, Vec::new(), move |draft| {
        draft.drop_bucket(&name)?;
        Ok(json!({"name": name, "dropped": true}).into())
    }))
}

pub(super) fn bucket_schema(call: &Call<'_>) -> HandlerResult {
    let name = call.params.text("name")?;
    call.admit_to(Target::Bucket(&name))?;
    let snapshot = call.server.store.snapshot();
    let config = &snapshot.state.bucket(&name)?.definition().config;
    encode_bounded(call.server, json!({"name": name, "config": config})).map(HandlerReply::Ready)
}

pub(super) fn define_query(call: &Call<'_>) -> HandlerResult {
    let (name, config) = (name(call.params)?, config(call.params)?);
    // The store rejects an invalid query.
    if let Ok(template) = Query::template(&config) {
        check_conditions(call.server, &template.filter)?;
    }
    let idempotency = Idempotency::parse(call)?;
    let bucket = config.get("bucket").and_then(Json::as_str);
    call.admit_to(Target::Query { name: &name, bucket })?;
    if call.server.programmatic.contains(&name) {
        return Err(StoreError::QueryExists { query: name }.into());
    }
    Ok(write(call, idempotency, Vec::new(), move |draft| {
        draft.define_query(&name, &config)?;
        Ok(json!({"name": name, "defined": true}).into())
    }))
}

pub(super) fn undefine_query(call: &Call<'_>) -> HandlerResult {
    let name = name(call.params)?;
    let idempotency = Idempotency::parse(call)?;
    let bucket = call.server.bucket_of_query(&name);
    call.admit_to(Target::Query { name: &name, bucket: bucket.as_deref() })?;
    Ok(write(call, idempotency, Vec::new(), move |draft| {
        draft.undefine_query(&name)?;
        Ok(json!({"name": name, "undefined": true}).into())
    }))
}

pub(super) fn list_queries(call: &Call<'_>) -> HandlerResult {
    call.admit_to(Target::Everything)?;
    let caller = call.caller.has_row_filters().then(|| call.caller.clone());
    // On the pool, because definitions may be large.
    Ok(run_on_pool(call, move |server, _| list_all_queries(server, caller.as_ref())))
}

/// Lists all queries. A caller with row filters sees only the queries to which it may subscribe, and only the definitions of those
/// without a row filter, because a definition may contain values of hidden rows.
fn list_all_queries(server: &ServerState, restricted: Option<&Caller>) -> ReplyResult {
    let mut subscriptions = BTreeMap::<String, usize>::new();
    for connection in server.all_connections() {
        for subscription in connection.subscriptions() {
            if let Some(name) = subscription.source.name() {
                *subscriptions.entry(name.to_owned()).or_default() += 1;
            }
        }
    }
    let listed = |name: &str, kind: &str| {
        let count = subscriptions.get(name).copied().unwrap_or_default();
        json!({"name": name, "type": kind, "activeSubscriptions": count})
    };
    let authorize = |name: &str| restricted.map_or(Ok(None), |caller| authorize_named(server, caller, name));
    let snapshot = server.store.snapshot();
    // A programmatic query takes precedence over a stored query with the same name.
    let stored = snapshot.state.queries().filter(|(name, _)| !server.programmatic.contains(name));
    let declarative = stored.filter_map(|(name, config)| {
        let has_hidden_rows = authorize(&name).ok()?.is_some();
        let mut query = listed(&name, "declarative");
        if !has_hidden_rows {
            query["config"] = json!(config);
        }
        Some(query)
    });
    let programmatic = server.options.queries.keys().filter(|name| authorize(name).is_ok());
    let programmatic = programmatic.map(|name| listed(name, "programmatic"));
    Data::list("{\"queries\":[", declarative.chain(programmatic), "]}", server.options.max_result_bytes)
}

pub(super) fn buckets(call: &Call<'_>) -> HandlerResult {
    call.admit_to(Target::Everything)?;
    build_listing(call, call.server.store.snapshot().state.names().len(), |server| {
        let snapshot = server.store.snapshot();
        let names: Vec<&str> = snapshot.state.names().collect();
        encode_bounded(server, json!({"count": names.len(), "names": names}))
    })
}

pub(super) fn stats(call: &Call<'_>) -> HandlerResult {
    call.admit_to(Target::Everything)?;
    build_listing(call, call.server.store.snapshot().state.names().len(), |server| {
        encode_bounded(server, store_stats(server))
    })
}

/// Returns the result of `store.stats`.
pub(super) fn store_stats(server: &ServerState) -> Json {
    let (stats, snapshot) = (server.store.stats(), server.store.snapshot());
    let is_programmatic_only = |name: &&String| snapshot.state.query_config(name).is_err();
    let programmatic = server.options.queries.keys().filter(is_programmatic_only).count();
    let per_bucket = |count: fn(&BucketStats) -> usize| -> Map<String, Json> {
        stats.buckets.iter().map(|bucket| (bucket.name.clone(), Json::from(count(bucket)))).collect()
    };
    let total = |count: fn(&BucketStats) -> usize| stats.buckets.iter().map(count).sum::<usize>();
    let names: Vec<&str> = stats.buckets.iter().map(|bucket| bucket.name.as_str()).collect();
    let sweep_ms = stats.sweep_interval.map_or(0, |interval| interval.as_millis());
    json!({
        "name": server.options.name,
        "buckets": {"count": names.len(), "names": names},
        "records": {"total": total(|bucket| bucket.records), "perBucket": per_bucket(|bucket| bucket.records)},
        "indexes": {"total": total(|bucket| bucket.indexes), "perBucket": per_bucket(|bucket| bucket.indexes)},
        "queries": {"defined": stats.queries + programmatic, "activeSubscriptions": server.subscription_count()},
        "persistence": {"enabled": stats.is_persistent},
        "ttl": {
            "enabled": stats.sweep_interval.is_some(),
            "checkIntervalMs": u64::try_from(sweep_ms).unwrap_or(u64::MAX),
        },
    })
}

/// Encodes the data of a reply. Returns an error if it exceeds the limit of results.
pub(super) fn encode_bounded(server: &ServerState, value: Json) -> ReplyResult {
    Data::from(value).encode_within(server.options.max_result_bytes)
}

fn name(params: &Params<'_>) -> Result<String, RequestError> {
    params.text("name").map(Cow::into_owned)
}

fn config(params: &Params<'_>) -> Result<Json, RequestError> {
    params.object("config").map(Json::Object)
}
