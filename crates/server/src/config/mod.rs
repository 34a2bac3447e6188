//! The configuration: flags, environment and file become settings, or a list of all that is wrong with them.
//!
//! Whatever its source, a value becomes a `Node` that knows where it was given, and one check is for all of them:
//! so a wrong flag is told like a wrong key, and a value that another one overrides is checked as well.

mod auth;
mod check;
mod comments;
mod definitions;
mod error;
mod file;
mod flags;
mod json;
mod later;
mod layers;
mod node;
mod permissions;
mod place;
mod settings;
#[cfg(test)]
mod tests;
mod toml;

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use tidewire_store::Durability;

pub use self::definitions::{
    Applied, Definition, DefinitionError, DefinitionKind, Difference, Outcome, Reason, RefusedDefinition, apply,
};
pub use self::error::{ConfigError, ConfigErrors, Problem};
pub use self::place::Place;

use self::check::{Given, Report};
use self::flags::CommandLine;
use self::layers::Layers;
use self::settings::Settings;
use crate::ServerOptions;

/// What flags, environment and file say.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Config {
    /// The settings of the server, its auth included.
    pub server: ServerOptions,
    /// What keeps the data.
    pub engine: Engine,
    /// How long clients have to leave when the server is to end. Default: 5 s.
    pub shutdown_grace: Duration,
    /// Buckets that are to be there, in the order of the file.
    pub buckets: Vec<Definition>,
    /// Queries that are to be there, in the order of the file.
    pub queries: Vec<Definition>,
    /// What is allowed, and perhaps not meant.
    pub warnings: Vec<String>,
    /// Whether that is all that was asked for: the server is not to start.
    pub check: bool,
}

/// What keeps the data.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Engine {
    /// Nothing: it is gone when the process ends.
    Memory,
    /// Files in a directory. The default.
    Embedded {
        /// The directory. Default: `./data`.
        dir: PathBuf,
        /// When a write is answered. Default: when it is on the disk.
        durability: Durability,
    },
}

impl Config {
    /// Reads the flags, of which the first is the name of the program, the variables that `environment` has, and the file that
    /// they name.
    ///
    /// ```
    /// use tidewire::config::Config;
    ///
    /// let config = Config::load(["tidewire", "--port", "9000"], |name| std::env::var_os(name))?;
    /// assert_eq!(config.server.port, 9000);
    /// # Ok::<(), tidewire::config::ConfigErrors>(())
    /// ```
    pub fn load<A>(args: A, environment: impl Fn(&str) -> Option<OsString>) -> Result<Self, ConfigErrors>
    where
        A: IntoIterator<Item: Into<OsString> + Clone>,
    {
        let flags = CommandLine::try_parse_from(args).map_err(|error| {
            let text = error.render().to_string();
            if error.use_stderr() { ConfigErrors::Flags(text) } else { ConfigErrors::Asked(text) }
        })?;
        let mut report = Report::default();
        let Layers { file, check, settings: layers } = Layers::of(&flags.into_flags(), &environment, &mut report);
        let file = file.and_then(|(name, named)| file::read(&name, &named, &mut report));
        let mut settings = Settings::default();
        for root in file.iter().chain(&layers) {
            settings.read(&Given::root(root), &environment, &mut report);
        }
        let config = settings.finish(check, &mut report);
        if report.errors.is_empty() {
            return Ok(config);
        }
        report.errors.sort_by_key(|error| error.place.rank());
        Err(ConfigErrors::Settings(report.errors))
    }
}
