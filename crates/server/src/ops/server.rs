//! `server.*` operations: statistics, connections, revocations and backups.

use std::borrow::Cow;
use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use serde_json::{Value as Json, json};
use tidewire_store::engine::{BackupError, EngineError};
use tidewire_store::{Cause, MaintenanceError, WriteOptions};

use super::store_admin::{encode_bounded, store_stats};
use super::store_writes::write_owner;
use super::table::Capabilities;
use super::{Call, HandlerReply, HandlerResult, ReplyResult, Target, build_listing};
use crate::auth::{Revocations, TooManyRevocations};
use crate::protocol::reply::Data;
use crate::state::ServerState;
use crate::{Code, RequestError, revoked_users};

pub(super) fn stats(call: &Call<'_>) -> HandlerResult {
    call.admit_to(Target::Everything)?;
    let entries = call.server.connection_count() + call.server.store.snapshot().state.names().len();
    build_listing(call, entries, |server| encode_bounded(server, server_stats(server)))
}

pub(super) fn connections(call: &Call<'_>) -> HandlerResult {
    call.admit_to(Target::Everything)?;
    build_listing(call, call.server.connection_count(), |server| {
        let connections = server.all_connections();
        let listed = connections.iter().map(|connection| connection.info().to_json());
        Data::list("[", listed, "]", server.options.max_result_bytes)
    })
}

/// Returns the result of `server.stats`.
pub(crate) fn server_stats(server: &ServerState) -> Json {
    let connections = server.connections_info();
    let authenticated = connections.iter().filter(|connection| connection.user_id.is_some()).count();
    let subscriptions: usize = connections.iter().map(|connection| connection.store_subscriptions).sum();
    json!({
        "name": server.options.name,
        "connectionCount": connections.len(),
        "authEnabled": server.auth.is_some(),
        "rateLimitEnabled": server.rate_limiter.is_some(),
        "rulesEnabled": server.capabilities.contains(Capabilities::RULES),
        "connections": {
            "active": connections.len(),
            "authenticated": authenticated,
            "totalStoreSubscriptions": subscriptions,
            "totalRulesSubscriptions": 0,
        },
        "store": store_stats(server),
        "rules": null,
    })
}

/// Revokes a user immediately, and persists the revocation.
///
/// The reply is sent when the store acknowledges the revocation. If it cannot be stored, the revocation is in effect until the server stops, and
/// the reply is an error.
pub(super) fn revoke(call: &Call<'_>) -> HandlerResult {
    let user_id = limited_text(call.params.text("userId")?, "userId", MAX_USER_ID_BYTES)?;
    let reason = call.params.optional_text("reason")?;
    let reason = reason.map(|reason| limited_text(reason, "reason", MAX_REASON_BYTES)).transpose()?;
    call.admit_to(Target::Everything)?;
    let server = call.server;
    let until = server.revocations.revoke_for_client(&user_id, server.store.now()).map_err(|TooManyRevocations| {
        let max = Revocations::MAX_USERS;
        let message = format!("the limit of {max} revoked users is reached; try again when a revocation has expired");
        RequestError::new(Code::RateLimited, message)
    })?;
    let connections = server.revoke(|session| session.user_id == user_id);
    let by = call.caller.user_id();
    tracing::info!(user = user_id, by, reason, connections, until, "user revoked");
    let is_stored = server.revocations.has_ttl() && revoked_users::is_stored(&server.store);
    let reply = json!({"userId": user_id, "revokedUntil": until, "connections": connections, "stored": is_stored});
    if !is_stored {
        return Ok(reply.into());
    }
    let options = WriteOptions::default().cause(Cause::of(call.connection.number)).owner(write_owner(call));
    let options = options.bytes(call.request.memory());
    let stored = server.store.write_with(options, move |draft| revoked_users::store(draft, &user_id, until));
    Ok(HandlerReply::pending(async move {
        stored.await.map_err(|error| {
            tracing::error!(error = &error as &dyn std::error::Error, "cannot store revocation");
            let error = RequestError::from(error);
            let message = format!(
                "the user is revoked until the server stops, but the revocation was not stored: {}",
                error.message
            );
            RequestError { message: message.into(), ..error }
        })?;
        Ok(reply.into())
    }))
}

/// Limit of a user id. No user id from a signed token is longer than the token itself.
const MAX_USER_ID_BYTES: usize = crate::auth::Jwt::MAX_LEN;
/// Limit of the reason, which is logged.
const MAX_REASON_BYTES: usize = 256;

fn limited_text(text: Cow<'_, str>, name: &str, max: usize) -> Result<String, RequestError> {
    if text.len() <= max {
        return Ok(text.into_owned());
    }
    Err(RequestError::invalid(format!("\"{name}\" must have at most {max} bytes, got {}", text.len())))
}

/// Copies the data into a new directory under `backupDir` while the server is running.
///
/// A backup that exceeds the request timeout continues in the background, and its result is logged.
pub(super) fn backup(call: &Call<'_>) -> HandlerResult {
    let name = call.params.optional_text("name")?;
    if let Some(name) = name.as_deref().filter(|name| !is_directory_name(name)) {
        let shown: String = name.chars().take(MAX_BACKUP_NAME_BYTES).collect();
        return Err(RequestError::invalid(format!(
            "\"name\" must have 1 to {MAX_BACKUP_NAME_BYTES} letters, digits, dots, hyphens or underscores, and must not start \
             with a dot, got \"{shown}\""
        )));
    }
    call.admit_to(Target::Everything)?;
    let Some(parent) = &call.server.options.backup_dir else {
        return Err(RequestError::new(Code::UnknownOperation, "no backup directory is configured"));
    };
    let name = name.map_or_else(|| format!("backup-{}", call.server.store.now()), Cow::into_owned);
    let dir = parent.join(&name);
    let Some(running) = RunningBackup::start(call.server) else {
        return Err(RequestError::new(Code::Conflict, "another backup is running; try again when it has finished"));
    };
    let copying = tokio::task::spawn_blocking(move || run_backup(&running, &name, &dir));
    Ok(HandlerReply::pending(async move { copying.await.map_err(|error| RequestError::internal(&error))? }))
}

const MAX_BACKUP_NAME_BYTES: usize = 64;

fn is_directory_name(name: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_');
    name.len() <= MAX_BACKUP_NAME_BYTES && !name.starts_with('.') && name.bytes().all(is_allowed)
}

/// Guard of the running backup, of which there is at most one. A panic counts as a failed backup.
struct RunningBackup(Arc<ServerState>);

impl RunningBackup {
    /// Returns `None` if another backup is running.
    fn start(server: &Arc<ServerState>) -> Option<Self> {
        let is_first = !server.is_backing_up.swap(true, SeqCst);
        is_first.then(|| Self(Arc::clone(server)))
    }
}

impl Drop for RunningBackup {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.counters.backups_failed.fetch_add(1, Relaxed);
        }
        self.0.is_backing_up.store(false, SeqCst);
    }
}

fn run_backup(RunningBackup(server): &RunningBackup, name: &str, dir: &Path) -> ReplyResult {
    match server.store.backup(dir) {
        Ok(position) => {
            server.counters.backups.fetch_add(1, Relaxed);
            tracing::info!(dir = %dir.display(), %position, "backup finished");
            Ok(json!({"name": name, "position": position.to_string()}).into())
        }
        Err(error) => {
            server.counters.backups_failed.fetch_add(1, Relaxed);
            tracing::warn!(dir = %dir.display(), error = &error as &dyn std::error::Error, "backup failed");
            Err(match error {
                MaintenanceError::Engine(EngineError::NotPersistent) => RequestError::invalid(error),
                MaintenanceError::Backup(error) if is_name_taken(&error) => RequestError::new(
                    Code::AlreadyExists,
                    format!("backup \"{name}\" already exists; choose another name"),
                ),
                MaintenanceError::Closed => RequestError::shutting_down(),
                error => RequestError::internal(&error),
            })
        }
    }
}

/// Returns whether a backup failed because its name is taken by a file or by a directory that is not empty.
fn is_name_taken(error: &BackupError) -> bool {
    match error {
        BackupError::NotEmpty { .. } => true,
        // A file with this name exists.
        BackupError::Io { source, .. } => matches!(source.kind(), ErrorKind::AlreadyExists | ErrorKind::NotADirectory),
        _ => false,
    }
}
