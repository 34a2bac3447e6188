//! `auth.explain`: explains permissions.

use std::sync::Arc;

use serde_json::Value as Json;

use super::{Call, HandlerReply, HandlerResult, Target};
use crate::auth::Session;
use crate::protocol::reply::Data;
use crate::protocol::request::Params;
use crate::session::caller::{Caller, Login};
use crate::session::explanation::operation_named;
use crate::{Code, RequestError};

/// Limit of the roles in a request. Each role is compared with every rule.
const MAX_ROLES: usize = 100;

/// Explains whether a client may use an operation. The client is a connection, a session described by the request, or anonymous.
pub(super) fn explain(call: &Call<'_>) -> HandlerResult {
    let params = call.params;
    let operation = operation_named(&params.text("operation")?)?;
    let bucket = params.optional_text("bucket")?;
    let connection = params.optional_text("connectionId")?;
    let session = session(params)?;
    if connection.is_some() && session.is_some() {
        let message = "\"connectionId\" cannot be combined with \"userId\", \"roles\" or \"metadata\"";
        return Err(RequestError::invalid(message));
    }
    call.admit_to(Target::Everything)?;
    let server = call.server;
    let login = match (connection, session) {
        (Some(id), _) => {
            let connections = server.all_connections();
            let Some(connection) = connections.iter().find(|connection| connection.to_string() == *id) else {
                let shown: String = id.chars().take(64).collect();
                return Err(RequestError::new(Code::NotFound, format!("connection \"{shown}\" does not exist")));
            };
            // An expired session counts as no login: the next request of the connection ends it.
            connection.login().filter(|login| !login.session.is_expired(server.store.now()))
        }
        (None, Some(session)) => server.auth.as_ref().map(|auth| Arc::new(Login::new(session, auth))),
        (None, None) => None,
    };
    let explanation = Caller::new(server.auth.clone(), login).explain(operation, bucket.as_deref());
    Data::from(explanation.to_json()).encode_within(server.options.max_result_bytes).map(HandlerReply::Ready)
}

/// Returns the session that a request describes, if any.
fn session(params: &Params<'_>) -> Result<Option<Session>, RequestError> {
    let user_id = params.optional_text("userId")?;
    let roles = params.non_null("roles").map(|_| roles(params)).transpose()?;
    let metadata = params.non_null("metadata").map(|_| params.object("metadata")).transpose()?;
    if user_id.is_none() && roles.is_none() && metadata.is_none() {
        return Ok(None);
    }
    let session =
        Session::new(user_id.unwrap_or_default(), roles.unwrap_or_default()).metadata(metadata.unwrap_or_default());
    Ok(Some(session))
}

fn roles(params: &Params<'_>) -> Result<Vec<String>, RequestError> {
    let roles = params.array("roles")?;
    if roles.len() > MAX_ROLES {
        let message = format!("\"roles\" has {} elements; at most {MAX_ROLES} are allowed", roles.len());
        return Err(RequestError::invalid(message));
    }
    let role = |(index, role)| match role {
        Json::String(role) => Ok(role),
        _ => Err(RequestError::invalid(format!("\"roles[{index}]\" must be a string"))),
    };
    roles.into_iter().enumerate().map(role).collect()
}
