//! Close codes: why the server closes a connection, and whether the client should reconnect.

use tidewire_conn::websocket::{CloseCode, Message};

/// Why the server closes a connection: the close code and reason that the client receives.
///
/// The codes of the WebSocket codec (1002, 1007 and 1009) are not included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Disconnect {
    /// The WebSocket close code.
    pub code: u16,
    /// The reason in the close frame.
    pub reason: &'static str,
    /// Whether the client should reconnect.
    pub reconnect: bool,
}

macro_rules! disconnects {
    ($($(#[doc = $doc:literal])* $name:ident $code:literal $reason:literal $reconnect:literal;)*) => {
        impl Disconnect {
            $($(#[doc = $doc])* pub const $name: Self = Self { code: $code, reason: $reason, reconnect: $reconnect };)*

            /// Every disconnect.
            pub const ALL: &[Self] = &[$(Self::$name),*];
        }
    };
}

disconnects! {
    /// The server has stopped.
    SERVER_SHUTDOWN 1000 "server_shutdown" true;
    /// The embedding program has closed the connection.
    NORMAL_CLOSURE 1000 "normal_closure" true;
    /// The client connected while the server was stopping.
    SERVER_SHUTTING_DOWN 1001 "server_shutting_down" true;
    /// The client sent a binary message.
    BINARY_NOT_SUPPORTED 1003 "binary_not_supported" false;
    /// An internal error of the server.
    INTERNAL_ERROR 1011 "internal_error" true;
    /// The memory limit of the server was exceeded, and this connection used the most memory.
    MEMORY_LIMIT 1013 "memory_limit" true;
    /// No pong arrived in time.
    HEARTBEAT_TIMEOUT 4001 "heartbeat_timeout" true;
    /// The session was revoked.
    SESSION_REVOKED 4002 "session_revoked" false;
    /// The limit of connections of the client's address is reached.
    TOO_MANY_CONNECTIONS 4003 "too_many_connections" false;
    /// The client did not read its pushes.
    SLOW_CONSUMER 4008 "slow_consumer" true;
    /// A login is required, and the client did not log in within the login timeout.
    LOGIN_TIMEOUT 4009 "login_timeout" true;
}

impl Disconnect {
    pub(crate) fn close_code(self) -> CloseCode {
        CloseCode::new(self.code)
    }

    /// Returns the close frame.
    pub(crate) fn frame(self) -> Message {
        Message::close(self.close_code(), self.reason)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn manual_lists_every_close_code() {
        let manual = include_str!("../../../../docs/reference/errors.md");
        let (_, table) = manual.split_once("| Code | Reason | When | Reconnect |").expect("a table of close codes");
        let rows = table.lines().skip(2).take_while(|line| line.starts_with('|'));
        let rows = rows.map(|row| row.trim_matches('|').split('|').map(str::trim).collect::<Vec<_>>());
        let documented: Vec<(&str, &str, bool)> = rows
            .map(|cells| (cells[0], cells[1].trim_matches('`'), cells[3].starts_with("yes")))
            .filter(|(_, reason, _)| !reason.is_empty())
            .collect();
        let codes: Vec<String> = Disconnect::ALL.iter().map(|disconnect| disconnect.code.to_string()).collect();
        let known: Vec<(&str, &str, bool)> =
            Disconnect::ALL.iter().zip(&codes).map(|(one, code)| (code.as_str(), one.reason, one.reconnect)).collect();
        assert_eq!(documented, known);
    }
}
