//! The path of a request, independent of its transport.
//!
//! A transport passes a connection and a request, and receives the result immediately or as a future. The handler checks the
//! session, the tier, the permission and the rate limit, enforces the request timeout, and counts, times and logs the request
//! exactly once, even if it is abandoned.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use tracing::{Instrument as _, Span, field};

use super::table::{Effect, OperationId, Scope};
use super::{Call, HandlerReply, HandlerResult, Progress, ReplyResult, limit_rate, unavailable};

use crate::metrics::operations::RequestOutcome;
use crate::protocol::request::{Id, Request};
use crate::session::caller::{Caller, Login};
use crate::session::connection::Connection;
use crate::state::ServerState;
use crate::{Code, RequestError};

/// Handles a request of a connection.
///
/// The order of writes is fixed when this returns, so a transport may handle several writes concurrently. Any other request must
/// wait until all earlier requests of the connection are done.
pub(crate) fn handle(server: &Arc<ServerState>, connection: &Arc<Connection>, request: &Request<'_>) -> HandlerResult {
    let record = RequestRecord::start(connection, request);
    let handled = record.span.in_scope(|| execute(server, connection, request));
    match handled {
        Ok(HandlerReply::Ready(data)) => record.finish(server, connection, Ok(data)).map(HandlerReply::Ready),
        Err(error) => record.finish(server, connection, Err(error)).map(HandlerReply::Ready),
        Ok(HandlerReply::Pending(future)) => {
            let limit = server.options.request_timeout;
            let span = record.span.clone();
            let pending =
                PendingRequest { server: Arc::clone(server), connection: Arc::clone(connection), record: Some(record) };
            let work = async move {
                match tokio::time::timeout(limit, future).await {
                    Ok(outcome) => pending.finish(outcome),
                    Err(_) => pending.time_out(),
                }
            };
            // Not instrumented if the span is disabled, which keeps the future small.
            Ok(HandlerReply::Pending(if span.is_disabled() { Box::pin(work) } else { Box::pin(work.instrument(span)) }))
        }
    }
}

/// Checks session, tier, parameters, permission and rate limit, in this order, and starts the operation.
fn execute(server: &Arc<ServerState>, connection: &Arc<Connection>, request: &Request<'_>) -> HandlerResult {
    let name = &*request.name;
    // These operations need no login. Unknown names with the same prefix are treated alike.
    let needs_no_login =
        name.starts_with("auth.") && request.operation.is_none_or(|operation| operation.tier.is_none());
    let mut login = connection.login_if_open()?;
    if !needs_no_login && let Some(login) = login.take_if(|login| login.session.is_expired(server.store.now())) {
        return Err(expire(server, connection, &login));
    }
    let caller = Caller::new(server.auth.clone(), login);
    let needs_permission = !needs_no_login && name != "ping";
    if needs_permission {
        caller.check_tier(request.operation)?;
    }
    let served = request.operation.filter(|operation| server.capabilities.contains(operation.needs));
    let Some((operation, handler)) = served.and_then(|operation| operation.handler.map(|handler| (operation, handler)))
    else {
        // Permissions are checked first, so that an unauthorized caller does not learn whether the operation exists.
        if needs_permission {
            unavailable::authorize(&caller, request)?;
        }
        limit_rate(server, connection, &caller)?;
        return Err(unavailable::error(server, name));
    };
    let params = &request.params;
    let call = Call { operation, params, request, server, connection, caller, progress: Cell::new(Progress::Parsing) };
    let handled = handler(&call);
    if handled.is_err() && call.progress.get() == Progress::Parsing {
        // The parameters are invalid. If the caller may not use the operation at all, that error takes precedence.
        if needs_permission && operation.scope != Scope::Connection {
            call.caller.may_ever(name, "*")?;
        }
        limit_rate(server, connection, &call.caller)?;
    }
    handled
}

/// Ends an expired session. Returns the error for the request that found it expired.
fn expire(server: &ServerState, connection: &Connection, login: &Login) -> RequestError {
    tracing::debug!(%connection, user = login.session.user_id, "session expired");
    let error = RequestError::session_expired();
    connection.set_login(None);
    if server.requires_auth() {
        for subscription in connection.subscriptions() {
            subscription.end(error.clone());
        }
    }
    error
}

/// Records the metrics and log lines of a request when it ends.
struct RequestRecord {
    operation: Option<OperationId>,
    id: Id,
    started: Instant,
    span: Span,
}

impl RequestRecord {
    fn start(connection: &Connection, request: &Request<'_>) -> Self {
        let operation = request.operation;
        let span = tracing::debug_span!(
            target: "tidewire::request",
            "request",
            operation = operation.map_or("unknown", |operation| operation.name),
            %connection,
            id = %request.id,
            user = connection.login().map(|login| field::display(login.session.user_id.clone())),
            traceparent = request.params.traceparent().map(field::display),
            outcome = field::Empty,
        );
        Self { operation, id: request.id, started: Instant::now(), span }
    }

    fn finish(self, server: &ServerState, connection: &Connection, outcome: ReplyResult) -> ReplyResult {
        match &outcome {
            Ok(_) => self.end(server, connection, RequestOutcome::Ok),
            Err(error) => self.fail(server, connection, error),
        }
        outcome
    }

    #[cold]
    fn fail(&self, server: &ServerState, connection: &Connection, error: &RequestError) {
        self.end(server, connection, RequestOutcome::Failed(error.code));
        let (id, operation, code) = (self.id, self.name(), error.code.as_str());
        if let Some(fault) = &error.fault {
            tracing::error!(%connection, %id, operation, fault, "request failed with an internal error");
        } else {
            tracing::debug!(%connection, %id, operation, code, error = %error.message, "request failed");
        }
    }

    fn end(&self, server: &ServerState, connection: &Connection, outcome: RequestOutcome) {
        let elapsed = self.started.elapsed();
        server.operations.record(self.operation, outcome, elapsed);
        self.span.record("outcome", outcome.label());
        if elapsed >= server.options.slow_request {
            server.counters.slow.fetch_add(1, Relaxed);
            let (id, operation, outcome) = (self.id, self.name(), outcome.label());
            let millis = u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX);
            tracing::warn!(%connection, %id, operation, outcome, millis, "slow request");
        }
    }

    fn name(&self) -> &'static str {
        self.operation.map_or("unknown", |operation| operation.name)
    }
}

/// A pending request. It is recorded once: with its outcome, or as abandoned if it is dropped.
struct PendingRequest {
    server: Arc<ServerState>,
    connection: Arc<Connection>,
    record: Option<RequestRecord>,
}

impl PendingRequest {
    fn finish(mut self, outcome: ReplyResult) -> ReplyResult {
        match self.record.take() {
            Some(record) => record.finish(&self.server, &self.connection, outcome),
            None => outcome,
        }
    }

    fn time_out(self) -> ReplyResult {
        self.server.counters.timed_out.fetch_add(1, Relaxed);
        let effect = self.record.as_ref().and_then(|record| record.operation).map(|operation| operation.effect);
        let advice = match effect {
            Some(Effect::Write) => "the write may still be applied",
            _ => "try again",
        };
        let limit = self.server.options.request_timeout.as_millis();
        self.finish(Err(RequestError::new(Code::Timeout, format!("the request timed out after {limit} ms; {advice}"))))
    }
}

impl Drop for PendingRequest {
    fn drop(&mut self) {
        if let Some(record) = self.record.take() {
            record.end(&self.server, &self.connection, RequestOutcome::Abandoned);
        }
    }
}
