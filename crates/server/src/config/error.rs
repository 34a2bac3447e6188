//! What is wrong with a configuration.

use std::error::Error;
use std::fmt;
use std::io;

use tidewire_store::{DefinitionError, QueryError};

use super::place::Place;
use crate::{JwtError, RuleError, StartError, StaticTokensError};

/// Why there is no configuration.
#[derive(Debug)]
#[non_exhaustive]
pub enum ConfigErrors {
    /// Nothing is wrong: help or the version was asked for, and this is it.
    Asked(String),
    /// The flags are wrong, and what else is was not looked at.
    Flags(String),
    /// All that is wrong with the settings; at least one.
    Settings(Vec<ConfigError>),
}

impl ConfigErrors {
    /// What the process ends with: 0 if something was asked for, else 2.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Asked(_) => 0,
            Self::Flags(_) | Self::Settings(_) => 2,
        }
    }
}

impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Asked(text) | Self::Flags(text) => f.write_str(text.trim_end()),
            Self::Settings(errors) => {
                for (place, error) in errors.iter().enumerate() {
                    write!(f, "{}{error}", if place == 0 { "" } else { "\n" })?;
                }
                Ok(())
            }
        }
    }
}

impl std::error::Error for ConfigErrors {}

/// One thing that is wrong, and where.
#[derive(Debug)]
#[non_exhaustive]
pub struct ConfigError {
    /// Where it is.
    pub place: Place,
    /// Which key it is about, with those that lead to it; empty if it is about none.
    pub key: String,
    /// What is wrong.
    pub problem: Problem,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { place, key, problem } = self;
        match place {
            // A flag and a variable have one key, and their users know it by their names.
            Place::File { .. } if !key.is_empty() => write!(f, "{place}: {key}: {problem}"),
            _ => write!(f, "{place}: {problem}"),
        }
    }
}

impl std::error::Error for ConfigError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.problem.source()
    }
}

/// What is wrong with a setting.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// A file cannot be read.
    #[error("the file {file} cannot be read: {source}")]
    Unreadable {
        /// Its name.
        file: String,
        /// What the system said.
        source: io::Error,
    },
    /// A file is too large to be a configuration.
    #[error("the file {file} has more than {max} bytes, which is too large for a configuration")]
    TooLarge {
        /// Its name.
        file: String,
        /// The bytes it may have.
        max: u64,
    },
    /// A text is not UTF-8.
    #[error("the text is not UTF-8")]
    NotUtf8,
    /// The name of a file does not say what it is.
    #[error("the file \"{file}\" must be called .json or .toml, which says how it is read")]
    Extension {
        /// Its name.
        file: String,
    },
    /// A file is not what its name says.
    #[error("this is not valid {format}: {what}")]
    Syntax {
        /// What it should be.
        format: &'static str,
        /// What is wrong.
        what: String,
    },
    /// A key is there twice.
    #[error("the key is there twice, first in line {first}")]
    Duplicate {
        /// The line of the first.
        first: usize,
    },
    /// There is no such key.
    #[error("there is no such key; the nearest one is \"{nearest}\"")]
    UnknownKey {
        /// What might have been meant.
        nearest: &'static str,
    },
    /// It is not what it has to be.
    #[error("expected {expected}, found {found}")]
    Expected {
        /// What it has to be.
        expected: String,
        /// What it is.
        found: String,
    },
    /// A key that has to be there is not.
    #[error("the key \"{key}\" is missing: expected {expected}")]
    Missing {
        /// Which.
        key: &'static str,
        /// What it has to be.
        expected: String,
    },
    /// Two keys exclude each other.
    #[error("{one} and {other} are alternatives: only one of them may be given")]
    Alternatives {
        /// The first.
        one: &'static str,
        /// The second.
        other: &'static str,
    },
    /// The definition of a bucket cannot be used.
    #[error(transparent)]
    Bucket(#[from] DefinitionError),
    /// The definition of a query cannot be used.
    #[error(transparent)]
    Query(#[from] QueryError),
    /// Certificate and key cannot be used.
    #[error("{}", chain(_0))]
    Tls(#[source] StartError),
    /// A rule of the permissions cannot be used.
    #[error(transparent)]
    Rule(#[from] RuleError),
    /// The tokens cannot be used.
    #[error(transparent)]
    Tokens(#[from] StaticTokensError),
    /// Signed tokens could not be verified.
    #[error(transparent)]
    Jwt(#[from] JwtError),
    /// A variable that is named has no value.
    #[error("the environment has no variable {name}, or it is empty or not UTF-8")]
    Variable {
        /// What it is called.
        name: String,
    },
    /// An engine that there is not.
    #[error("this version has no redis engine: use \"embedded\", which keeps the data in a directory, or \"memory\"")]
    NoRedis,
    /// There is no built-in identity.
    #[error("this version has no built-in identity: give \"tokens\" or \"jwt\" in \"auth\", or leave it out")]
    NoIdentity,
    /// Auth is asked for, and nobody could log in.
    #[error("nobody could log in: give \"tokens\" or \"jwt\" as well")]
    NoSource,
}

/// An error with all that caused it: whoever reads it has one line.
fn chain(error: &dyn Error) -> String {
    let own = error.to_string();
    error.source().map_or_else(|| own.clone(), |cause| format!("{own}: {}", chain(cause)))
}
