//! Error codes, and the error with which a request is answered.

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

            /// The code as it is sent.
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$name => $text),* }
            }

            /// Whether the same request may succeed later, without a change to it or to the data.
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
    /// The server has no such operation.
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
    /// The session may not do this.
    Forbidden "FORBIDDEN" final;
    /// Too many requests or subscriptions.
    RateLimited "RATE_LIMITED" retry;
    /// The client does not read its pushes, and the request was not run.
    Backpressure "BACKPRESSURE" retry;
    /// A fault of the server.
    InternalError "INTERNAL_ERROR" retry;
    /// The bucket is not defined.
    BucketNotDefined "BUCKET_NOT_DEFINED" final;
    /// The query is not defined.
    QueryNotDefined "QUERY_NOT_DEFINED" final;
    /// The server has no rule engine.
    RulesNotAvailable "RULES_NOT_AVAILABLE" final;
    /// The sessions of the user were revoked.
    SessionRevoked "SESSION_REVOKED" final;
    /// The request did not finish within its deadline.
    Timeout "TIMEOUT" retry;
    /// The server is shutting down.
    ShuttingDown "SHUTTING_DOWN" retry;
    /// The result is larger than results may be.
    TooLarge "TOO_LARGE" final;
}

/// The error with which a request is answered.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{}: {message}", code.as_str())]
#[non_exhaustive]
pub struct RequestError {
    /// The code, for programs.
    pub code: Code,
    /// The message, for people.
    pub message: Cow<'static, str>,
    /// More about the error, for programs.
    pub details: Option<Box<Json>>,
    /// The cause of an internal error. It is logged and not sent.
    pub(crate) fault: Option<Box<str>>,
}

impl RequestError {
    /// An error without details.
    pub fn new(code: Code, message: impl Into<Cow<'static, str>>) -> Self {
        Self { code, message: message.into(), details: None, fault: None }
    }

    /// Adds details.
    #[must_use]
    pub fn with_details(self, details: Json) -> Self {
        Self { details: Some(Box::new(details)), ..self }
    }

    /// A parameter, definition or record is not valid.
    #[expect(clippy::needless_pass_by_value, reason = "errors and texts are handed over")]
    pub(crate) fn invalid(message: impl ToString) -> Self {
        Self::new(Code::ValidationError, message.to_string())
    }

    /// A fault of the server: the cause is logged, and the client learns only that there was one.
    pub(crate) fn internal(error: &(dyn std::error::Error + 'static)) -> Self {
        let mut fault = error.to_string();
        for source in std::iter::successors(error.source(), |error| error.source()) {
            fault = format!("{fault}: {source}");
        }
        Self { fault: Some(fault.into()), ..Self::new(Code::InternalError, "Internal server error") }
    }

    /// The result is larger than results may be.
    pub(crate) fn too_large(max: usize) -> Self {
        let message = format!("the result is larger than {max} bytes: narrow the filter, or read it in pages");
        Self::new(Code::TooLarge, message)
    }

    /// A limit of a rate was exceeded: which one, and after how many milliseconds the request may be sent again.
    pub(crate) fn rate_limited(what: &str, retry_after: u64) -> Self {
        let message = format!("{what}: try again in {retry_after} ms");
        Self::new(Code::RateLimited, message).with_details(json!({"retryAfterMs": retry_after}))
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
    fn the_manual_says_which_codes_are_worth_retrying() {
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
