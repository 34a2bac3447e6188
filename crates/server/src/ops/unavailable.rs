//! Requests for operations that do not exist, or whose part of the server is missing.

use super::table::{Capabilities, OPERATIONS, closest_name};
use crate::protocol::request::Request;
use crate::session::caller::Caller;
use crate::state::ServerState;
use crate::{Code, RequestError};

/// The longest name that is compared with the known ones: longer than every known name with a few typing errors.
const MAX_NAME: usize = 48;

/// The prefixes of operations that need a part of the server, and what to say without it.
const PARTS: [(&str, Capabilities, &str); 5] = [
    ("auth.", Capabilities::AUTH, "this server has no logins"),
    ("server.revoke", Capabilities::AUTH, "this server has no logins"),
    ("audit.", Capabilities::AUDIT, "this version keeps no audit log"),
    ("procedures.", Capabilities::PROCEDURES, "this version has no procedures"),
    ("server.backup", Capabilities::BACKUP, "this server has no backup directory: set \"backupDir\""),
];

/// Checks whether the caller may use an operation of this name.
pub(super) fn permit(caller: &Caller, request: &Request<'_>) -> Result<(), RequestError> {
    match request.operation.filter(|operation| operation.needs == Capabilities::RULES) {
        Some(operation) => {
            // Permissions are about the topic, fact or pattern also where no rule engine can act on it.
            let topic = ["topic", "key", "pattern"].iter().find_map(|name| request.params.text(name).ok());
            caller.row_filter(operation, None, topic.as_deref().unwrap_or("*")).map(drop)
        }
        None => caller.may_ever(&request.name, "*"),
    }
}

/// The error for an operation that this server does not have.
pub(super) fn error(server: &ServerState, name: &str) -> RequestError {
    let unknown = |text: String| RequestError::new(Code::UnknownOperation, text);
    if name.starts_with("rules.") {
        return RequestError::new(Code::RulesNotAvailable, "this server has no rule engine");
    }
    if name.chars().count() > MAX_NAME {
        let shown: String = name.chars().take(MAX_NAME).collect();
        return unknown(format!("Unknown operation \"{shown}…\""));
    }
    if name.starts_with("identity.") {
        return unknown(format!("Unknown operation \"{name}\": this version has no users of its own"));
    }
    let is_missing = |part: Capabilities| !server.capabilities.contains(part);
    let part = PARTS.iter().find(|(prefix, part, _)| name.starts_with(prefix) && is_missing(*part));
    if let Some((.., reason)) = part {
        return unknown(format!("Unknown operation \"{name}\": {reason}"));
    }
    let served = OPERATIONS.iter().filter(|operation| server.capabilities.contains(operation.needs));
    unknown(format!("Unknown operation \"{name}\"; did you mean \"{}\"?", closest_name(name, served)))
}
