//! Notices: server messages that are neither replies nor pushes of a subscription.

use serde_json::{Value as Json, json};
use tidewire_conn::websocket::Message;

/// Returns the first message of every connection.
pub(crate) fn welcome(now: u64, requires_auth: bool) -> Message {
    message(&json!({"type": "welcome", "version": "1.0.0", "serverTime": now, "requiresAuth": requires_auth}))
}

pub(crate) fn ping(now: u64) -> Message {
    message(&json!({"type": "ping", "timestamp": now}))
}

pub(crate) fn shutdown(grace_ms: u64) -> Message {
    message(&json!({"type": "system", "event": "shutdown", "gracePeriodMs": grace_ms}))
}

pub(crate) fn session_revoked() -> Message {
    message(&json!({"type": "system", "event": "session_revoked", "reason": "Session revoked by administrator"}))
}

fn message(value: &Json) -> Message {
    Message::text(value.to_string())
}
