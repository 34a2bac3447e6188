//! What the store says went wrong, in the codes of the protocol.

use serde_json::{Value as Json, json};
use tidewire_live::LiveError;
use tidewire_store::{Problem, StoreError, TransactionError, WriteError};

use crate::{Code, RequestError};

impl From<StoreError> for RequestError {
    fn from(error: StoreError) -> Self {
        let message = error.to_string();
        let details = match &error {
            StoreError::Validation(error) => {
                let issue = |issue: &tidewire_store::Issue| json!({"field": issue.field, "message": issue.message, "code": issue.code});
                Some(error.issues.iter().map(issue).collect())
            }
            StoreError::NotUnique { bucket, source } => {
                Some(json!({"bucket": bucket, "field": source.field, "value": source.value}))
            }
            StoreError::Conflict { bucket, key, current } => {
                Some(json!({"bucket": bucket, "key": key, "version": current}))
            }
            StoreError::Transaction(error) => return Self::from(error.clone()),
            _ => None,
        };
        let code = match error {
            StoreError::BucketNotDefined { .. } => Code::BucketNotDefined,
            StoreError::QueryNotDefined { .. } => Code::QueryNotDefined,
            StoreError::BucketExists { .. } | StoreError::QueryExists { .. } | StoreError::NotUnique { .. } => {
                Code::AlreadyExists
            }
            StoreError::NotFound { .. } => Code::NotFound,
            StoreError::Conflict { .. } | StoreError::KeyReused { .. } => Code::Conflict,
            StoreError::Forbidden { .. } => Code::Forbidden,
            StoreError::LongReply { .. } => Code::TooLarge,
            // All that is left is wrong with what was sent.
            _ => Code::ValidationError,
        };
        Self { details: details.map(Box::<Json>::new), ..Self::new(code, message) }
    }
}

/// The message says which operation it was, and the details are those of the operation alone.
impl From<TransactionError> for RequestError {
    fn from(error: TransactionError) -> Self {
        let message = error.to_string().into();
        match *error.problem {
            Problem::Store(inner) => Self { message, ..Self::from(inner) },
            Problem::Exists { bucket, key } => {
                Self::new(Code::Conflict, message).with_details(json!({"bucket": bucket, "key": key}))
            }
            Problem::LongResults { .. } => Self::new(Code::TooLarge, message),
            _ => Self::new(Code::ValidationError, message),
        }
    }
}

impl From<WriteError> for RequestError {
    fn from(error: WriteError) -> Self {
        match error {
            WriteError::Refused(error) => Self::from(error),
            WriteError::TooLarge { .. } => Self::new(Code::TooLarge, error.to_string()),
            WriteError::Closed => Self::new(Code::ShuttingDown, "the server is shutting down"),
            error => Self::internal(&error),
        }
    }
}

impl From<LiveError> for RequestError {
    fn from(error: LiveError) -> Self {
        match error {
            LiveError::Store(error) => Self::from(error),
            LiveError::TooMany { .. } => Self::new(Code::RateLimited, error.to_string()),
            LiveError::Closed => Self::new(Code::ShuttingDown, "the server is shutting down"),
            LiveError::NotSubscribed { .. } => Self::new(Code::NotFound, "the subscription has ended"),
            LiveError::Matcher(error) => Self::new(Code::ValidationError, error.to_string()),
            error => Self::internal(&error),
        }
    }
}

impl RequestError {
    /// A fault of ours: the log will have it, and the sender nothing that it could not use.
    pub(crate) fn internal(error: &(dyn std::error::Error + 'static)) -> Self {
        let mut fault = error.to_string();
        for source in std::iter::successors(error.source(), |error| error.source()) {
            fault = format!("{fault}: {source}");
        }
        Self { fault: Some(fault.into()), ..Self::new(Code::InternalError, "Internal server error") }
    }

    /// The answer is longer than answers may be.
    pub(crate) fn too_large(max: usize) -> Self {
        let message = format!("the result has more than {max} bytes: ask for less, or page by page");
        Self::new(Code::TooLarge, message)
    }
}
