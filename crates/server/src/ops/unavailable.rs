//! Requests for operations that do not exist or are not enabled.

use super::table::{Capabilities, OPERATIONS, suggestion};
use crate::protocol::request::Request;
use crate::session::caller::Caller;
use crate::state::ServerState;
use crate::{Code, RequestError};

/// Longer names get no suggestion. All known names are shorter, even with a few typing errors.
const MAX_NAME_CHARS: usize = 48;

/// Prefixes of operations that need a capability, and the reason if the server lacks it.
const MISSING_CAPABILITIES: [(&str, Capabilities, &str); 5] = [
    ("auth.", Capabilities::AUTH, "auth is not enabled on this server"),
    ("server.revoke", Capabilities::AUTH, "auth is not enabled on this server"),
    ("audit.", Capabilities::AUDIT, "this version has no audit log"),
    ("procedures.", Capabilities::PROCEDURES, "this version has no procedures"),
    ("server.backup", Capabilities::BACKUP, "no backup directory is configured; set \"backupDir\""),
];

/// Checks the permission for an operation with this name.
pub(super) fn authorize(caller: &Caller, request: &Request<'_>) -> Result<(), RequestError> {
    match request.operation.filter(|operation| operation.needs == Capabilities::RULES) {
        Some(operation) => {
            // Permissions apply to the topic, fact or pattern even without a rule engine.
            let topic = ["topic", "key", "pattern"].iter().find_map(|name| request.params.text(name).ok());
            caller.authorize(operation, None, topic.as_deref().unwrap_or("*")).map(drop)
        }
        None => caller.may_ever(&request.name, "*"),
    }
}

/// Returns the error for an operation that does not exist or is not enabled.
pub(super) fn error(server: &ServerState, name: &str) -> RequestError {
    let unknown = |text: String| RequestError::new(Code::UnknownOperation, text);
    if name.starts_with("rules.") {
        return RequestError::new(Code::RulesNotAvailable, "this server has no rule engine");
    }
    if name.chars().count() > MAX_NAME_CHARS {
        let shown: String = name.chars().take(MAX_NAME_CHARS).collect();
        return unknown(format!("Unknown operation \"{shown}…\""));
    }
    if name.starts_with("identity.") {
        return unknown(format!("Unknown operation \"{name}\": this version has no user management"));
    }
    let is_missing = |capability: Capabilities| !server.capabilities.contains(capability);
    let mut missing = MISSING_CAPABILITIES.iter();
    if let Some((.., reason)) = missing.find(|(prefix, needed, _)| name.starts_with(prefix) && is_missing(*needed)) {
        return unknown(format!("Unknown operation \"{name}\": {reason}"));
    }
    let served = OPERATIONS.iter().filter(|operation| server.capabilities.contains(operation.needs));
    unknown(format!("Unknown operation \"{name}\"{}", suggestion(name, served)))
}
