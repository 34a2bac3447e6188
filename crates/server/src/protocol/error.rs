//! Error codes, and the error of a request.

use std::borrow::Cow;

use serde_json::{Value as Json, json};

macro_rules! codes {
    ($($(#[doc = $doc:literal])* $name:ident $text:literal $retry:ident;)*) => {
        /// The error codes of the wire protocol.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Code { $($(#[doc = $doc])* $name),* }

        impl Code {
            /// Every code.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// Returns the code as it is sent to clients.
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$name => $text),* }
            }

            /// Returns whether the same request may succeed later, without a change to the request or the data.
            pub const fn is_worth_retrying(self) -> bool {
                match self { $(Self::$name => codes!(@$retry)),* }
            }
        }
    };
    (@retry) => { true };
    (@final) => { false };
}

codes! {
    /// The message is not a JSON object.
    ParseError "PARSE_ERROR" final;
    /// The message has no valid `id` or `type`.
    InvalidRequest "INVALID_REQUEST" final;
    /// The operation does not exist.
    UnknownOperation "UNKNOWN_OPERATION" final;
    /// A parameter, definition or record is not valid.
    ValidationError "VALIDATION_ERROR" final;
    /// The record or subscription does not exist.
    NotFound "NOT_FOUND" final;
    /// The name or unique value is already in use.
    AlreadyExists "ALREADY_EXISTS" final;
    /// The record has another version, or the idempotency key was used for another request.
    Conflict "CONFLICT" final;
    /// The client is not logged in, or its session has expired.
    Unauthorized "UNAUTHORIZED" final;
    /// The client lacks the permission.
    Forbidden "FORBIDDEN" final;
    /// Too many requests or subscriptions.
    RateLimited "RATE_LIMITED" retry;
    /// The server is overloaded or the client does not read its pushes. The request was not run.
    Backpressure "BACKPRESSURE" retry;
    /// An internal error of the server.
    InternalError "INTERNAL_ERROR" retry;
    /// The bucket is not defined.
    BucketNotDefined "BUCKET_NOT_DEFINED" final;
    /// The query is not defined.
    QueryNotDefined "QUERY_NOT_DEFINED" final;
    /// The server has no rule engine.
    RulesNotAvailable "RULES_NOT_AVAILABLE" final;
    /// The user's sessions were revoked.
    SessionRevoked "SESSION_REVOKED" final;
    /// The request timed out.
    Timeout "TIMEOUT" retry;
    /// The server is shutting down.
    ShuttingDown "SHUTTING_DOWN" retry;
    /// The result is larger than the limit.
    TooLarge "TOO_LARGE" final;
}

/// The error of a request.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{}: {message}", code.as_str())]
#[non_exhaustive]
pub struct RequestError {
    /// The code, for programs.
    pub code: Code,
    /// The message, for people.
    pub message: Cow<'static, str>,
    /// Details for programs, such as the invalid fields.
    pub details: Option<Box<Json>>,
    /// The cause of an internal error. It is logged, but not sent to the client.
    pub(crate) fault: Option<Box<str>>,
}

impl RequestError {
    /// Creates an error without details.
    pub fn new(code: Code, message: impl Into<Cow<'static, str>>) -> Self {
        Self { code, message: message.into(), details: None, fault: None }
    }

    /// Adds details.
    #[must_use]
    pub fn with_details(self, details: Json) -> Self {
        Self { details: Some(Box::new(details)), ..self }
    }

    /// Creates a [`Code::ValidationError`].
    #[expect(clippy::needless_pass_by_value, reason = "callers pass errors and strings by value")]
    pub(crate) fn invalid(message: impl ToString) -> Self {
        Self::new(Code::ValidationError, message.to_string())
    }

    /// Creates a [`Code::InternalError`]. The cause is logged, but not sent to the client.
    pub(crate) fn internal(error: &(dyn std::error::Error + 'static)) -> Self {
        let mut fault = error.to_string();
        for source in std::iter::successors(error.source(), |error| error.source()) {
            fault = format!("{fault}: {source}");
        }
        Self { fault: Some(fault.into()), ..Self::new(Code::InternalError, "Internal server error") }
    }

    /// Creates the error for a result of more than `max` bytes.
    pub(crate) fn too_large(max: usize) -> Self {
        let message = format!("the result is larger than {max} bytes; narrow the filter or read it in pages");
        Self::new(Code::TooLarge, message)
    }

    /// Creates the error for an exceeded rate limit. `retry_after_ms` is the time until the request may be sent again.
    pub(crate) fn rate_limited(reason: &str, retry_after_ms: u64) -> Self {
        let message = format!("{reason}: try again in {retry_after_ms} ms");
        Self::new(Code::RateLimited, message).with_details(json!({"retryAfterMs": retry_after_ms}))
    }

    pub(crate) fn shutting_down() -> Self {
        Self::new(Code::ShuttingDown, "the server is shutting down")
    }

    pub(crate) fn session_expired() -> Self {
        Self::new(Code::Unauthorized, "Session expired")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn manual_says_which_codes_are_worth_retrying() {
        let manual = include_str!("../../../../docs/reference/errors.md");
        let row = |code: &str| {
            let mut rows = manual.lines().filter_map(|line| line.strip_prefix("| ")?.split_once(" | "));
            rows.find_map(|(codes, rest)| {
                codes.split(", ").any(|known| known == code).then(|| rest.starts_with("yes |"))
            })
        };
        for code in Code::ALL {
            assert_eq!(row(code.as_str()), Some(code.is_worth_retrying()), "{}", code.as_str());
        }
    }
}
