//! Authentication and authorization: tokens, sessions, permissions. Free of I/O and clocks; the current time is an argument.

mod grants;
mod jwt;
mod pattern;
mod permissions;
mod revocations;
mod row_filter;
mod session;
mod tier;
mod tokens;
mod validator;

pub use grants::{Access, Grants};
pub use jwt::{Jwt, JwtAlgorithm, JwtError, JwtKey, JwtOptions};
pub use permissions::{DefaultAccess, PermissionCheck, Permissions, Rule, RuleError};
pub(crate) use revocations::Revocations;
pub use session::Session;
pub use tier::Tier;
pub use tokens::{StaticToken, StaticTokens, StaticTokensError, TokenExpiry};
pub use validator::{TokenValidator, Validation, ValidatorFailed};
