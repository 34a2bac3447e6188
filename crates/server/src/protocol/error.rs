//! What goes wrong with a request, as its sender is told.

use std::borrow::Cow;

use serde_json::Value as Json;

/// The codes of the wire protocol: the one table of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Code {
    /// The message is not a JSON object.
    ParseError,
    /// The message has no proper `id` or `type`.
    InvalidRequest,
    /// There is no such operation.
    UnknownOperation,
    /// A parameter, definition or record is not as it has to be.
    ValidationError,
    /// What the request names is not there.
    NotFound,
    /// It is there already.
    AlreadyExists,
    /// Somebody else was faster, or the request contradicts an earlier one.
    Conflict,
    /// Not logged in, or no longer.
    Unauthorized,
    /// Logged in, and not allowed.
    Forbidden,
    /// Too many requests or subscriptions.
    RateLimited,
    /// The client does not read what it is sent, and the request was not run.
    Backpressure,
    /// A fault of ours.
    InternalError,
    /// There is no such bucket.
    BucketNotDefined,
    /// There is no such query.
    QueryNotDefined,
    /// There is no rule engine.
    RulesNotAvailable,
    /// The user may not log in for a while.
    SessionRevoked,
    /// It took too long.
    Timeout,
    /// The server is about to end.
    ShuttingDown,
    /// The answer is too large.
    TooLarge,
}

impl Code {
    /// As it goes over the wire.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::ParseError => "PARSE_ERROR",
            Self::InvalidRequest => "INVALID_REQUEST",
            Self::UnknownOperation => "UNKNOWN_OPERATION",
            Self::ValidationError => "VALIDATION_ERROR",
            Self::NotFound => "NOT_FOUND",
            Self::AlreadyExists => "ALREADY_EXISTS",
            Self::Conflict => "CONFLICT",
            Self::Unauthorized => "UNAUTHORIZED",
            Self::Forbidden => "FORBIDDEN",
            Self::RateLimited => "RATE_LIMITED",
            Self::Backpressure => "BACKPRESSURE",
            Self::InternalError => "INTERNAL_ERROR",
            Self::BucketNotDefined => "BUCKET_NOT_DEFINED",
            Self::QueryNotDefined => "QUERY_NOT_DEFINED",
            Self::RulesNotAvailable => "RULES_NOT_AVAILABLE",
            Self::SessionRevoked => "SESSION_REVOKED",
            Self::Timeout => "TIMEOUT",
            Self::ShuttingDown => "SHUTTING_DOWN",
            Self::TooLarge => "TOO_LARGE",
        }
    }

    /// Whether the same request may succeed later, without anybody changing it or the data.
    pub const fn is_worth_retrying(self) -> bool {
        matches!(
            self,
            Self::RateLimited | Self::Backpressure | Self::InternalError | Self::Timeout | Self::ShuttingDown
        )
    }
}

/// Why a request failed, as its sender is told.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{}: {message}", code.as_str())]
#[non_exhaustive]
pub struct RequestError {
    /// For programs.
    pub code: Code,
    /// For people.
    pub message: Cow<'static, str>,
    /// For programs that want to know more.
    pub details: Option<Box<Json>>,
    /// What went wrong on our side, for the log alone.
    pub(crate) fault: Option<Box<str>>,
}

impl RequestError {
    /// An error without details.
    pub fn new(code: Code, message: impl Into<Cow<'static, str>>) -> Self {
        Self { code, message: message.into(), details: None, fault: None }
    }

    /// The same with details.
    #[must_use]
    pub fn with_details(self, details: Json) -> Self {
        Self { details: Some(Box::new(details)), ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_manual_says_which_are_worth_retrying() {
        let manual = include_str!("../../../../docs/protocol.md");
        let row = |code: &str| {
            let mut rows = manual.lines().filter_map(|line| line.strip_prefix("| ")?.split_once(" | "));
            rows.find_map(|(codes, rest)| {
                codes.split(", ").any(|known| known == code).then(|| rest.starts_with("yes |"))
            })
        };
        for code in [
            Code::ParseError,
            Code::InvalidRequest,
            Code::UnknownOperation,
            Code::ValidationError,
            Code::NotFound,
            Code::AlreadyExists,
            Code::Conflict,
            Code::Unauthorized,
            Code::Forbidden,
            Code::RateLimited,
            Code::Backpressure,
            Code::InternalError,
            Code::BucketNotDefined,
            Code::QueryNotDefined,
            Code::RulesNotAvailable,
            Code::SessionRevoked,
            Code::Timeout,
            Code::ShuttingDown,
            Code::TooLarge,
        ] {
            assert_eq!(row(code.as_str()), Some(code.is_worth_retrying()), "{}", code.as_str());
        }
    }
}
