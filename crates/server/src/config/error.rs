//! Configuration errors.

use std::error::Error;
use std::fmt;
use std::io;

use tidewire_store::query::QueryError;
use tidewire_store::schema::DefinitionError;

use super::location::Location;
use crate::StartError;
use crate::auth::{JwtError, RuleError, StaticTokensError};

/// Why a [`Command`](super::Command) could not be loaded.
#[derive(Debug)]
#[non_exhaustive]
pub enum ConfigErrors {
    /// Not an error: the text to print for `--help` or `--version`.
    Help(String),
    /// The command line is invalid. The settings were not read.
    Usage(String),
    /// All errors of the settings, at least one, sorted by location.
    Settings(Vec<ConfigError>),
}

impl ConfigErrors {
    /// Returns the exit code of the process: 0 for help and version, otherwise 2.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Help(_) => 0,
            Self::Usage(_) | Self::Settings(_) => 2,
        }
    }
}

impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Help(text) | Self::Usage(text) => f.write_str(text.trim_end()),
            Self::Settings(errors) => {
                for (index, error) in errors.iter().enumerate() {
                    write!(f, "{}{error}", if index == 0 { "" } else { "\n" })?;
                }
                Ok(())
            }
        }
    }
}

impl std::error::Error for ConfigErrors {}

/// An error of one setting.
#[derive(Debug)]
#[non_exhaustive]
pub struct ConfigError {
    /// Where the setting was given.
    pub location: Location,
    /// The full path of the key, such as `heartbeat.intervalMs`; empty if the error is not about a key.
    pub key: String,
    /// The problem.
    pub problem: ConfigProblem,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { location, key, problem } = self;
        write!(f, "{location}: ")?;
        // The location of a flag or variable already identifies its setting.
        if key.is_empty() || !matches!(location, Location::File { .. }) {
            return problem.fmt(f);
        }
        match problem {
            ConfigProblem::Expected { expected, found } => write!(f, "expected {expected} for `{key}`, got {found}"),
            ConfigProblem::UnknownKey { suggestion } => {
                write!(f, "unknown key `{key}`")?;
                suggestion.map_or(Ok(()), |suggestion| write!(f, "; did you mean `{suggestion}`?"))
            }
            ConfigProblem::Duplicate { first } => write!(f, "duplicate key `{key}`, first defined on line {first}"),
            _ => write!(f, "`{key}`: {problem}"),
        }
    }
}

impl std::error::Error for ConfigError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.problem.source()
    }
}

/// The problem of a setting.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigProblem {
    /// A file cannot be read.
    #[error("cannot read the file {file}: {source}")]
    Unreadable {
        /// The path.
        file: String,
        /// The error of the system.
        source: io::Error,
    },
    /// The configuration file is too large.
    #[error("the file {file} is larger than the limit of {max} bytes")]
    TooLarge {
        /// The path.
        file: String,
        /// The limit in bytes.
        max: u64,
    },
    /// A text is not UTF-8.
    #[error("invalid UTF-8")]
    NotUtf8,
    /// The extension of the file is neither `.json` nor `.toml`.
    #[error("unknown format of the file \"{file}\"; expected the extension .json or .toml")]
    Extension {
        /// The path.
        file: String,
    },
    /// The file has a syntax error.
    #[error("invalid {format}: {message}")]
    Syntax {
        /// The expected format: JSON or TOML.
        format: &'static str,
        /// The syntax error.
        message: String,
    },
    /// An object has a duplicate key.
    #[error("duplicate key, first defined on line {first}")]
    Duplicate {
        /// The line of the first occurrence.
        first: usize,
    },
    /// The key does not exist.
    #[error("unknown key")]
    UnknownKey {
        /// A similar key.
        suggestion: Option<&'static str>,
    },
    /// The value has the wrong type or is out of range.
    #[error("expected {expected}, got {found}")]
    Expected {
        /// The values that are valid.
        expected: String,
        /// The value that was given.
        found: String,
    },
    /// A required key is missing.
    #[error("the key `{key}` is missing; expected {expected}")]
    Missing {
        /// The missing key.
        key: &'static str,
        /// The values that are valid.
        expected: String,
    },
    /// Two mutually exclusive keys are set.
    #[error("`{one}` and `{other}` cannot be combined; set only one of them")]
    Exclusive {
        /// The first key.
        one: &'static str,
        /// The second key.
        other: &'static str,
    },
    /// The definition of a bucket is invalid.
    #[error(transparent)]
    Bucket(#[from] DefinitionError),
    /// The definition of a query is invalid.
    #[error(transparent)]
    Query(#[from] QueryError),
    /// The TLS certificate or its key is invalid.
    #[error("{}", format_with_sources(_0))]
    Tls(#[source] StartError),
    /// A permission rule is invalid.
    #[error(transparent)]
    Rule(#[from] RuleError),
    /// The static tokens are invalid.
    #[error(transparent)]
    Tokens(#[from] StaticTokensError),
    /// The JWT settings are invalid.
    #[error(transparent)]
    Jwt(#[from] JwtError),
    /// An environment variable that a setting refers to has no value.
    #[error("the environment variable {name} is unset, empty or not UTF-8")]
    MissingVariable {
        /// The name of the variable.
        name: String,
    },
    /// The Redis engine is not supported.
    #[error("this version has no Redis engine; use \"embedded\", which stores the data in a directory, or \"memory\"")]
    RedisUnsupported,
    /// The built-in identity is not supported.
    #[error("this version has no built-in identity; configure `auth.tokens` or `auth.jwt` instead, or remove it")]
    IdentityUnsupported,
    /// Auth is configured without tokens.
    #[error("auth requires a source of tokens; add `tokens` or `jwt`")]
    NoTokenSource,
    /// `proxyProtocol` is set, but `trustedProxies` is empty.
    #[error("the PROXY protocol requires `trustedProxies`: the addresses of the proxies that send the header")]
    NoTrustedProxies,
    /// `backup` and `restore` require a data directory, which the memory engine does not have.
    #[error("the engine \"memory\" has no data directory; backup and restore require the engine \"embedded\"")]
    NoDataDir,
}

/// Formats an error and its sources on one line.
fn format_with_sources(error: &dyn Error) -> String {
    let own = error.to_string();
    error.source().map_or_else(|| own.clone(), |source| format!("{own}: {}", format_with_sources(source)))
}
