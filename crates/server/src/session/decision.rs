//! Permission decisions and their reasons.

use tidewire_store::Filter;

use crate::auth::Tier;
use crate::{Code, RequestError};

/// Whether a client may use an operation on a bucket, and why. It is created for every request, so only the row filter allocates.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Decision {
    /// Allowed on the rows that match the filter; `None` for all rows.
    Allowed(AllowReason, Option<Filter>),
    Denied(Denial),
}

/// Why an operation is allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AllowReason {
    /// Auth is disabled.
    AuthOff,
    /// No login is required, and the anonymous tier is sufficient.
    Anonymous,
    /// The operation affects only the connection itself and needs no permission.
    OwnConnection,
    /// The check of the embedding program allows it.
    Check,
    /// Rules of the session's roles allow it.
    Rules,
    /// No rule applies, and the default is to allow.
    Default,
}

/// Why an operation is denied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Denial {
    /// A login is required.
    NotLoggedIn,
    /// The anonymous tier is too low.
    AnonymousTier(Tier),
    /// The tier of the session's built-in roles is too low. Rules cannot raise it.
    RoleTier(Tier),
    /// The default tier is too low, and no rule of the session's roles allows the operation.
    DefaultTier(Tier),
    /// The bucket is a system bucket.
    SystemBucket,
    /// The check of the embedding program denies it.
    Check,
    /// No rule applies, and the default is to deny.
    Default,
    /// The session has a row filter, and the operation affects all rows.
    AllRows,
}

impl Denial {
    /// Returns the error for the client. `resource` is the target of the operation.
    pub(crate) fn error(self, operation: &str, resource: &str) -> RequestError {
        let shown: String = resource.chars().take(64).collect();
        match self {
            Self::NotLoggedIn => {
                RequestError::new(Code::Unauthorized, "Authentication required: log in with auth.login")
            }
            Self::AnonymousTier(tier) => {
                let message = format!("this operation requires {} access: log in with auth.login", tier.name());
                RequestError::new(Code::Unauthorized, message)
            }
            Self::RoleTier(tier) => RequestError::new(
                Code::Forbidden,
                format!("this operation requires a role with {} access", tier.name()),
            ),
            Self::DefaultTier(tier) => RequestError::new(
                Code::Forbidden,
                format!(
                    "this operation requires {} access: the role {} or a permission rule",
                    tier.name(),
                    tier.role()
                ),
            ),
            Self::SystemBucket => RequestError::new(Code::Forbidden, format!("\"{shown}\" is a system bucket")),
            Self::Check | Self::Default | Self::AllRows => {
                RequestError::new(Code::Forbidden, format!("{operation} on \"{shown}\" is not permitted"))
            }
        }
    }
}
