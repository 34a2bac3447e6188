//! Authentication and authorization: tokens, sessions, permissions.
//!
//! [`Auth`] has the options of a server. A [`TokenValidator`] turns the token of a login into a [`Session`]; [`StaticTokens`] and [`Jwt`]
//! are the built-in validators. [`Permissions`] define what the roles of a session may do. This module does no I/O and has no clock: the
//! current time is an argument.

mod credential;
mod grants;
mod jwt;
mod options;
mod pattern;
mod permissions;
mod reloadable;
mod revocations;
mod row_filter;
mod session;
mod strength;
mod tier;
mod tokens;
mod validator;

pub(crate) use grants::Grant;
pub use grants::{Access, Grants};
pub use jwt::{Jwt, JwtAlgorithm, JwtError, JwtKey, JwtKeys, JwtOptions};
pub use options::{Auth, BeforeLogin};
pub use permissions::{DefaultAccess, PermissionCheck, Permissions, Rule, RuleError};
pub(crate) use reloadable::ReloadableValidator;
pub(crate) use revocations::{Revocations, TooManyRevocations};
pub use session::Session;
pub(crate) use strength::{MIN_TOKEN_BITS, strength_bits};
pub use tier::Tier;
pub use tokens::{StaticToken, StaticTokens, StaticTokensError, TokenExpiry};
pub(crate) use tokens::{digest_of, is_sha256};
pub use validator::{TokenValidator, Validation, ValidatorFailed};
