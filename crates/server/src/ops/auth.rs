//! Login, logout and `auth.whoami`.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use serde_json::{Value as Json, json};

use super::review::review;
use super::{Call, HandlerReply, HandlerResult, ReplyResult};
use crate::auth::Session;
use crate::protocol::reply::Data;
use crate::session::caller::{Caller, Login};
use crate::session::connection::Connection;
use crate::session::login_throttle::{LoginThrottle, Throttled};
use crate::state::ServerState;
use crate::{Code, RateLimit, RequestError};

pub(super) fn login(call: &Call<'_>) -> HandlerResult {
    let token = call.params.text("token").map(Cow::into_owned)?;
    call.admit()?;
    check_throttle(call.server, call.connection)?;
    let (server, connection) = (Arc::clone(call.server), Arc::clone(call.connection));
    Ok(HandlerReply::pending(async move { log_in(&server, &connection, &token).await }))
}

pub(super) fn logout(call: &Call<'_>) -> HandlerResult {
    call.admit()?;
    let (server, connection) = (Arc::clone(call.server), Arc::clone(call.connection));
    // Deferred, because this may run on the worker pool, and only the task that owns the connection may change its login.
    Ok(HandlerReply::pending(async move {
        change_login(&server, &connection, None);
        Ok(Data::text("{\"loggedOut\":true}"))
    }))
}

pub(super) fn whoami(call: &Call<'_>) -> HandlerResult {
    call.admit()?;
    let now = call.server.store.now();
    let Some(login) = call.connection.login().filter(|login| !login.session.is_expired(now)) else {
        return Ok(json!({"authenticated": false}).into());
    };
    let mut whoami = json!({"authenticated": true});
    if let (Some(members), Json::Object(session)) = (whoami.as_object_mut(), session_json(&login.session)) {
        members.extend(session);
    }
    Ok(whoami.into())
}

/// Validates a token and changes the login of the connection. A failed login keeps the previous session, unless the user is revoked.
async fn log_in(server: &Arc<ServerState>, connection: &Arc<Connection>, token: &str) -> ReplyResult {
    let Some(auth) = server.auth.clone() else {
        return Err(RequestError::new(Code::UnknownOperation, "auth is not enabled on this server"));
    };
    let now = server.store.now();
    let validated = auth.validator.validate(token, now).await.map_err(|error| RequestError::internal(&error))?;
    let Some(session) = validated.filter(|session| !session.is_expired(now)) else {
        record_failure(server, connection, "invalid or expired token");
        return Err(RequestError::new(Code::Unauthorized, "Invalid or expired token"));
    };
    let reply = session_json(&session);
    let login = Arc::new(Login::new(session, &auth));
    // The user is revoked, or a concurrent reload has removed the token.
    let is_revoked = || {
        let session = &login.session;
        server.revocations.is_revoked(&session.user_id, now) || !auth.validator.still_accepts(session)
    };
    if !is_revoked() {
        change_login(server, connection, Some(Arc::clone(&login)));
    }
    // Checked again after the login is visible to revocations: a concurrent revocation either ends the session or is seen here.
    if is_revoked() {
        record_failure(server, connection, "user revoked");
        change_login(server, connection, None);
        return Err(RequestError::new(Code::SessionRevoked, "the sessions of this user were revoked"));
    }
    Ok(reply.into())
}

/// Returns the login throttle; `None` if auth is disabled, or for an in-process client, whose logins are not limited.
fn throttle<'a>(server: &'a ServerState, connection: &Connection) -> Option<&'a LoginThrottle> {
    server.login_throttle.as_ref().filter(|_| !connection.is_local())
}

/// Rejects a login from an address with too many failed logins, before the token is validated.
fn check_throttle(server: &ServerState, connection: &Connection) -> Result<(), RequestError> {
    let Some(throttle) = throttle(server, connection) else { return Ok(()) };
    throttle.check(connection.address, server.store.now()).inspect_err(|_| {
        server.counters.logins_throttled.fetch_add(1, Relaxed);
    })
}

/// Counts and logs a failed login. The token is not logged, because it may be a mistyped valid one.
fn record_failure(server: &ServerState, connection: &Connection, reason: &'static str) {
    server.counters.logins_failed.fetch_add(1, Relaxed);
    tracing::debug!(%connection, address = %connection.address, reason, "login failed");
    let Some(throttle) = throttle(server, connection) else { return };
    if let Some(Throttled { network, unlogged }) = throttle.record_failure(connection.address, server.store.now()) {
        let RateLimit { max_requests: failures, window } = throttle.limit;
        let window_ms = u64::try_from(window.as_millis()).unwrap_or(u64::MAX);
        tracing::warn!(address = %network, failures, window_ms, unlogged, "logins throttled");
    }
}

/// Replaces the login of a connection and reviews its subscriptions. Over a socket this runs on the task that polls the subscriptions, so
/// none of them delivers rows that only the previous user may see after the reply. A subscription of an in-process client may be polled
/// concurrently: the lock of its feed orders the poll before or after the review.
fn change_login(server: &ServerState, connection: &Arc<Connection>, login: Option<Arc<Login>>) {
    if login.is_some() || connection.login().is_some() {
        review(connection, &Caller::new(server.auth.clone(), login.clone()));
        connection.set_login(login);
    }
}

fn session_json(session: &Session) -> Json {
    json!({"userId": session.user_id, "roles": session.roles, "expiresAt": session.expires_at})
}
