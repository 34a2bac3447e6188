//! Whether a client may use an operation, and why.

use tidewire_store::Filter;

use crate::auth::Tier;
use crate::{Code, RequestError};

/// Whether a client may use an operation on a bucket, and why. It is made for every request, so it borrows and allocates nothing
/// but the row filter.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Decision {
    /// It may, on the rows that match the filter; none for all rows.
    Allowed(Grounds, Option<Filter>),
    Refused(Refusal),
}

/// Why an operation is allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Grounds {
    /// The server has no auth.
    AuthOff,
    /// No login is required, and the tier of clients without one suffices.
    Anonymous,
    /// The operation concerns the connection itself, and needs no permission.
    OwnConnection,
    /// The check of the embedding program allows it.
    Check,
    /// Rules of the session's roles allow it.
    Rules,
    /// No rule applies, and the default is to allow.
    Default,
}

/// Why an operation is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// A login is required.
    NotLoggedIn,
    /// The tier of clients without a login does not suffice.
    AnonymousTier(Tier),
    /// The tier of the session's built-in roles does not suffice. No rule changes that.
    RoleTier(Tier),
    /// The default tier does not suffice, and no rule of the session's roles allows the operation.
    DefaultTier(Tier),
    /// The bucket belongs to the embedding program.
    SystemBucket,
    /// The check of the embedding program refuses it.
    Check,
    /// No rule applies, and the default is to deny.
    Default,
    /// The session may touch some rows only, and the operation concerns all of them.
    AllRows,
}

impl Refusal {
    /// The error for the client. `resource` is the target of the operation.
    pub(crate) fn error(self, operation: &str, resource: &str) -> RequestError {
        let shown: String = resource.chars().take(64).collect();
        match self {
            Self::NotLoggedIn => {
                RequestError::new(Code::Unauthorized, "Authentication required: log in with auth.login")
            }
            Self::AnonymousTier(tier) => {
                let message = format!("this needs a login with {} access: log in with auth.login", tier.name());
                RequestError::new(Code::Unauthorized, message)
            }
            Self::RoleTier(tier) => {
                RequestError::new(Code::Forbidden, format!("this needs a role with {} access", tier.name()))
            }
            Self::DefaultTier(tier) => RequestError::new(
                Code::Forbidden,
                format!("this needs {} access: the role {}, or a permission rule", tier.name(), tier.role()),
            ),
            Self::SystemBucket => RequestError::new(Code::Forbidden, format!("\"{shown}\" is a system bucket")),
            Self::Check | Self::Default | Self::AllRows => {
                RequestError::new(Code::Forbidden, format!("{operation} on \"{shown}\" is not permitted"))
            }
        }
    }
}
