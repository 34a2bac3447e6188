//! Conversion of store and live query errors to wire errors.

use serde_json::{Value as Json, json};
use tidewire_live::{LiveError, SubscriptionEnd};
use tidewire_store::query::Exceeded;
use tidewire_store::transaction::{OperationError, TransactionError};
use tidewire_store::{StoreError, WriteError};

use crate::{Code, RequestError};

impl From<Exceeded> for RequestError {
    fn from(exceeded: Exceeded) -> Self {
        match exceeded {
            Exceeded::Result { max } => Self::too_large(max),
            Exceeded::Memory { max } => {
                let message = format!(
                    "sorting or grouping needs more than {max} bytes of memory; narrow the filter, set a limit, or define an \
                     index with this order"
                );
                Self::new(Code::TooLarge, message)
            }
            other => Self::new(Code::Timeout, other.to_string()),
        }
    }
}

impl From<StoreError> for RequestError {
    fn from(error: StoreError) -> Self {
        let message = error.to_string();
        let details = match &error {
            StoreError::Validation(error) => {
                let issue = |issue: &tidewire_store::schema::Issue| json!({"field": issue.field, "message": issue.message, "code": issue.code});
                Some(error.issues.iter().map(issue).collect())
            }
            StoreError::NotUnique { bucket, source } => {
                Some(json!({"bucket": bucket, "field": source.field, "value": source.value}))
            }
            StoreError::Conflict { bucket, key, current } => {
                Some(json!({"bucket": bucket, "key": key, "version": current}))
            }
            StoreError::Transaction(error) => return Self::from(error.clone()),
            StoreError::Exceeded(exceeded) => return Self::from(*exceeded),
            // The message identifies the record; code and details are those of its error.
            StoreError::Record { source, .. } => {
                return Self { message: message.into(), ..Self::from((**source).clone()) };
            }
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
            StoreError::LongReply { .. } | StoreError::LongRead { .. } | StoreError::StoreFull { .. } => Code::TooLarge,
            // All other errors are invalid parameters.
            _ => Code::ValidationError,
        };
        Self { details: details.map(Box::<Json>::new), ..Self::new(code, message) }
    }
}

/// The message identifies the failed operation; code and details are those of its error.
impl From<TransactionError> for RequestError {
    fn from(error: TransactionError) -> Self {
        let message = error.to_string().into();
        match *error.problem {
            OperationError::Store(inner) => Self { message, ..Self::from(inner) },
            OperationError::Exists { bucket, key } => {
                Self::new(Code::Conflict, message).with_details(json!({"bucket": bucket, "key": key}))
            }
            OperationError::LongResults { .. } => Self::new(Code::TooLarge, message),
            _ => Self::new(Code::ValidationError, message),
        }
    }
}

impl From<WriteError> for RequestError {
    fn from(error: WriteError) -> Self {
        match error {
            WriteError::Refused(error) => Self::from(error),
            WriteError::TooLarge { .. } => Self::new(Code::TooLarge, error.to_string()),
            WriteError::Closed => Self::shutting_down(),
            error => Self::internal(&error),
        }
    }
}

impl From<SubscriptionEnd> for RequestError {
    fn from(end: SubscriptionEnd) -> Self {
        match end {
            SubscriptionEnd::BucketDropped => Self::new(Code::BucketNotDefined, "the bucket was dropped"),
            SubscriptionEnd::QueryUndefined => Self::new(Code::QueryNotDefined, "the query was removed"),
            SubscriptionEnd::ResultTooLarge => Self::new(Code::TooLarge, end.to_string()),
            SubscriptionEnd::TooCostly | SubscriptionEnd::TooLarge => Self::new(Code::RateLimited, end.to_string()),
            SubscriptionEnd::NotEvaluated => Self::new(Code::Timeout, end.to_string()),
            _ => Self::shutting_down(),
        }
    }
}

impl From<LiveError> for RequestError {
    fn from(error: LiveError) -> Self {
        match error {
            LiveError::Store(error) => Self::from(error),
            LiveError::TooMany { .. } | LiveError::TooLarge { .. } | LiveError::Busy => {
                Self::new(Code::RateLimited, error.to_string())
            }
            LiveError::ResultTooLarge { max } => Self::too_large(max),
            LiveError::Deadline | LiveError::TooManyCommits => Self::new(Code::Timeout, error.to_string()),
            LiveError::Ended(end) => Self::from(end),
            LiveError::Closed => Self::shutting_down(),
            LiveError::Matcher(error) => Self::invalid(error),
            error => Self::internal(&error),
        }
    }
}
