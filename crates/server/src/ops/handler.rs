//! The path of one request, without its transport: admit, execute, outcome.
//!
//! A transport hands in a connection and a request, and gets the outcome now or as a future. On the way the session, the tier,
//! the permission and the rate limit are checked, the deadline is kept, and the request is counted, timed and logged, exactly
//! once, whatever becomes of it.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use tracing::{Instrument as _, Span, field};

use super::table::{Effect, OperationId, Scope};
use super::{Answer, Call, Handled, Outcome, OutcomeFuture, Progress, limit_rate, unavailable};

use crate::metrics::operations::Ended;
use crate::protocol::request::{Id, Request};
use crate::session::caller::{Caller, Login};
use crate::session::connection::Connection;
use crate::state::ServerState;
use crate::{Code, RequestError};

/// The outcome of a request, now or later.
pub(crate) enum Response {
    Ready(Outcome),
    /// A future that must be polled to its end. Dropping it gives the request up; what it has already done stays done.
    Pending(OutcomeFuture),
}

/// Serves a request of a connection.
///
/// Writes have their place in the order of writes when this returns, so a transport may serve several at once. Any other request
/// must wait until the ones before it have their outcome.
pub(crate) fn handle(server: &Arc<ServerState>, connection: &Arc<Connection>, request: &Request<'_>) -> Response {
    let record = Record::start(connection, request);
    let handled = record.span.in_scope(|| execute(server, connection, request));
    match handled {
        Ok(Answer::Now(data)) => Response::Ready(record.finish(server, connection, Ok(data))),
        Err(error) => Response::Ready(record.finish(server, connection, Err(error))),
        Ok(Answer::Later(future)) => {
            let limit = server.options.request_timeout;
            let span = record.span.clone();
            let pending =
                Pending { server: Arc::clone(server), connection: Arc::clone(connection), record: Some(record) };
            let work = async move {
                match tokio::time::timeout(limit, future).await {
                    Ok(outcome) => pending.finish(outcome),
                    Err(_) => pending.time_out(),
                }
            };
            // A disabled span would only make the future larger.
            Response::Pending(if span.is_disabled() { Box::pin(work) } else { Box::pin(work.instrument(span)) })
        }
    }
}

/// Checks session, tier, parameters, permission and rate limit, in this order, and starts the operation.
fn execute(server: &Arc<ServerState>, connection: &Arc<Connection>, request: &Request<'_>) -> Handled {
    let name = &*request.name;
    // These need no login, and neither do names that begin alike and do not exist.
    let is_open = name.starts_with("auth.") && request.operation.is_none_or(|operation| operation.tier.is_none());
    let mut login = connection.login_if_open()?;
    if !is_open && let Some(login) = login.take_if(|login| login.session.is_expired(server.store.now())) {
        return Err(expire(server, connection, &login));
    }
    let caller = Caller::new(server.auth.clone(), login);
    let needs_permission = !is_open && name != "ping";
    if needs_permission {
        caller.check_tier(request.operation)?;
    }
    let served = request.operation.filter(|operation| server.capabilities.contains(operation.needs));
    let Some((operation, handler)) = served.and_then(|operation| operation.handler.map(|handler| (operation, handler)))
    else {
        // A caller that may not use an operation does not learn whether it exists.
        if needs_permission {
            unavailable::permit(&caller, request)?;
        }
        limit_rate(server, connection, &caller)?;
        return Err(unavailable::error(server, name));
    };
    let params = &request.params;
    let call = Call { operation, params, request, server, connection, caller, progress: Cell::new(Progress::Parsing) };
    let handled = handler(&call);
    if handled.is_err() && call.progress.get() == Progress::Parsing {
        // The parameters are not valid. If the caller may never use the operation, that error comes first.
        if needs_permission && operation.scope != Scope::Connection {
            call.caller.may_ever(name, "*")?;
        }
        limit_rate(server, connection, &call.caller)?;
    }
    handled
}

/// Ends a session that has expired. Returns the error for the first request after that.
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

/// What is recorded of a request when it has ended.
struct Record {
    operation: Option<OperationId>,
    id: Id,
    started: Instant,
    span: Span,
}

impl Record {
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

    fn finish(self, server: &ServerState, connection: &Connection, outcome: Outcome) -> Outcome {
        match &outcome {
            Ok(_) => self.end(server, connection, Ended::Ok),
            Err(error) => self.fail(server, connection, error),
        }
        outcome
    }

    #[cold]
    fn fail(&self, server: &ServerState, connection: &Connection, error: &RequestError) {
        self.end(server, connection, Ended::Failed(error.code));
        let (id, operation, code) = (self.id, self.name(), error.code.as_str());
        if let Some(fault) = &error.fault {
            tracing::error!(%connection, %id, operation, fault, "request failed with an internal error");
        } else {
            tracing::debug!(%connection, %id, operation, code, error = %error.message, "request failed");
        }
    }

    fn end(&self, server: &ServerState, connection: &Connection, ended: Ended) {
        let took = self.started.elapsed();
        server.operations.record(self.operation, ended, took);
        self.span.record("outcome", ended.label());
        if took >= server.options.slow_request {
            server.counters.slow.fetch_add(1, Relaxed);
            let (id, operation, outcome) = (self.id, self.name(), ended.label());
            let millis = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
            tracing::warn!(%connection, %id, operation, outcome, millis, "slow request");
        }
    }

    fn name(&self) -> &'static str {
        self.operation.map_or("unknown", |operation| operation.name)
    }
}

/// A request that has no outcome yet. It is recorded once: with its outcome, or as abandoned if it is dropped before.
struct Pending {
    server: Arc<ServerState>,
    connection: Arc<Connection>,
    record: Option<Record>,
}

impl Pending {
    fn finish(mut self, outcome: Outcome) -> Outcome {
        match self.record.take() {
            Some(record) => record.finish(&self.server, &self.connection, outcome),
            None => outcome,
        }
    }

    fn time_out(self) -> Outcome {
        self.server.counters.timed_out.fetch_add(1, Relaxed);
        let effect = self.record.as_ref().and_then(|record| record.operation).map(|operation| operation.effect);
        let advice = match effect {
            Some(Effect::Write) => "it is unknown whether it will be done",
            _ => "try again",
        };
        let limit = self.server.options.request_timeout.as_millis();
        self.finish(Err(RequestError::new(Code::Timeout, format!("not done within {limit} ms: {advice}"))))
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if let Some(record) = self.record.take() {
            record.end(&self.server, &self.connection, Ended::Abandoned);
        }
    }
}
