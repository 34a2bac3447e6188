//! Who somebody is, and what they may do. No clock and no socket: `now` is an argument.

mod granted;
mod jwt;
mod pattern;
mod permissions;
mod revocations;
mod row_filter;
mod session;
mod tier;
mod tokens;
mod validator;

pub use granted::{Access, Granted};
pub use jwt::{Jwt, JwtAlgorithm, JwtError, JwtKey, JwtOptions};
pub use permissions::{DefaultAccess, PermissionCheck, Permissions, Rule, RuleError};
pub(crate) use revocations::Revocations;
pub use session::Session;
pub use tier::Tier;
pub use tokens::{StaticToken, StaticTokens, StaticTokensError, TokenExpiry};
pub use validator::{TokenValidator, Validation, ValidatorFailed};
