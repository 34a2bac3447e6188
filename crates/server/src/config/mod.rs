//! The configuration of the program: command line, environment variables and configuration file.
//!
//! Every source is parsed into a tree of `Node`s with their origins, and the same checks apply to all sources. So an invalid flag is
//! reported like an invalid key of the file, and an overridden value is checked as well. All errors are reported at once.

mod access;
mod auth;
mod cli;
mod comments;
mod definitions;
mod edge;
mod entry;
mod error;
mod file;
mod json;
mod location;
mod login;
mod overrides;
mod permissions;
mod reload;
mod revoke;
mod server_url;
mod settings;
#[cfg(test)]
mod tests;
mod toml;
mod tree;
mod unsupported;

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use tidewire_store::engine::Durability;

pub use self::definitions::{
    AppliedDefinition, Definition, DefinitionError, DefinitionKind, DefinitionOutcome, Difference, RejectReason,
    RejectedDefinition, apply,
};
pub use self::error::{ConfigError, ConfigErrors, ConfigProblem};
pub use self::location::Location;
pub use self::revoke::RevokeCommand;
pub use self::server_url::ServerUrl;

use self::cli::{CheckAccessArgs, CommandLine, Flags, StorageFlags, Subcommands};
use self::entry::{Entry, Report};
use self::overrides::Overrides;
use self::reload::FixedSettings;
use self::settings::Settings;
use crate::auth::Session;
use crate::{Explanation, ServerOptions};

/// A command of the program, with its settings.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Command {
    /// Run the server.
    Serve(Box<Config>),
    /// Print the warnings and the access report of a valid configuration, and exit.
    Check(Box<Config>),
    /// Explain whether a client may use an operation.
    CheckAccess(Box<Explanation>),
    /// Copy the data directory of a stopped server.
    Backup {
        /// The data directory to copy.
        data_dir: PathBuf,
        /// The directory to create.
        to: PathBuf,
    },
    /// Create a data directory from a backup.
    Restore {
        /// The directory of the backup.
        from: PathBuf,
        /// The data directory to create.
        data_dir: PathBuf,
    },
    /// Revoke a user on a running server.
    Revoke(RevokeCommand),
}

/// The settings of the program.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Config {
    /// The options of the server, including auth.
    pub server: ServerOptions,
    /// The storage engine.
    pub engine: Engine,
    /// The maximum size of a record in bytes. Default: `max_payload_bytes`, so that a client can store what it can send, but at least
    /// 1 MiB, the default of the store.
    pub max_record_bytes: usize,
    /// The memory limit of all records in bytes. Default: half of the memory of the machine, or of the limit of its control group if
    /// that is lower, but at least 256 MiB.
    pub max_store_bytes: usize,
    /// The grace period of a shutdown, in which clients may finish and disconnect. Default: 5 s, shorter than the kill timeout of
    /// common service managers.
    pub shutdown_grace: Duration,
    /// Buckets to define at startup, in the order of the file.
    pub buckets: Vec<Definition>,
    /// Named queries to define at startup, in the order of the file.
    pub queries: Vec<Definition>,
    /// The roles of static tokens and permission rules, without duplicates, in the order of the file.
    pub roles: Vec<String>,
    /// Settings that are valid but probably unintended.
    pub warnings: Vec<String>,
    /// The settings of the file that require a restart.
    fixed: FixedSettings,
}

impl Config {
    /// Returns the keys of the file that differ in a newer configuration and require a restart, because
    /// [`Server::reload`](crate::Server::reload) does not apply them.
    pub fn restart_keys(&self, newer: &Self) -> Vec<String> {
        self.fixed.differences(&newer.fixed)
    }
}

/// The storage engine.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Engine {
    /// Keeps the data in memory only. It is lost when the process ends.
    Memory,
    /// Stores the data in a directory. The default, because data should survive a restart.
    Embedded {
        /// The data directory. Default: `./data`.
        dir: PathBuf,
        /// When a write is acknowledged. Default: after fsync, so that no acknowledged write is lost.
        durability: Durability,
    },
}

impl Command {
    /// Parses the arguments, of which the first is the name of the program, and reads the environment variables and the configuration
    /// file.
    ///
    /// ```
    /// use tidewire::config::Command;
    ///
    /// let command = Command::load(["tidewire", "--port", "9000"], |name| std::env::var_os(name))?;
    /// let Command::Serve(config) = command else { unreachable!("serve is the default") };
    /// assert_eq!(config.server.port, 9000);
    /// # Ok::<(), tidewire::config::ConfigErrors>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Returns all errors of the settings, each with its location, or the text of `--help`.
    pub fn load<A>(args: A, environment: impl Fn(&str) -> Option<OsString>) -> Result<Self, ConfigErrors>
    where
        A: IntoIterator<Item: Into<OsString> + Clone>,
    {
        let command_line = CommandLine::try_parse_from(args).map_err(|error| {
            let text = error.render().to_string();
            if error.use_stderr() { ConfigErrors::Usage(text) } else { ConfigErrors::Help(text) }
        })?;
        let mut report = Report::default();
        if let Some(Subcommands::Revoke { user_id, reason, remote }) = command_line.command {
            let command = RevokeCommand::read(user_id, reason, &remote, &environment, &mut report);
            return command.map(Self::Revoke).ok_or(ConfigErrors::Settings(report.errors));
        }
        let (flags, is_server) = match &command_line.command {
            None | Some(Subcommands::Revoke { .. }) => (&command_line.flags, true),
            Some(Subcommands::Serve(flags)) => (&**flags, true),
            Some(Subcommands::Backup { storage, .. } | Subcommands::Restore { storage, .. }) => {
                (&Flags { storage: storage.clone(), ..Flags::default() }, false)
            }
            Some(Subcommands::CheckAccess(args)) => {
                let storage = StorageFlags { config: args.config.clone(), data_dir: None };
                (&Flags { storage, ..Flags::default() }, true)
            }
        };
        let Overrides { file, check, trees } = Overrides::new(flags, &environment, &mut report);
        let file = file.and_then(|(name, named_by)| file::read(&name, &named_by, &mut report));
        let mut settings = Settings::default();
        let fixed = file.as_ref().map(FixedSettings::from_file).unwrap_or_default();
        for root in file.iter().chain(&trees) {
            if is_server {
                settings.read(&Entry::root(root), &environment, &mut report);
            } else {
                settings.read_storage(&Entry::root(root), &mut report);
            }
        }
        let command = match command_line.command {
            Some(Subcommands::Backup { to, .. }) => Self::Backup { data_dir: settings.data_dir(&mut report), to },
            Some(Subcommands::Restore { from, .. }) => Self::Restore { from, data_dir: settings.data_dir(&mut report) },
            Some(Subcommands::CheckAccess(args)) => {
                let config = settings.finish(fixed, &mut report);
                if report.errors.is_empty() {
                    return args.explain(&config.server);
                }
                return Err(report.into_errors());
            }
            _ if check => Self::Check(Box::new(settings.finish(fixed, &mut report))),
            _ => Self::Serve(Box::new(settings.finish(fixed, &mut report))),
        };
        if report.errors.is_empty() {
            return Ok(command);
        }
        Err(report.into_errors())
    }
}

impl CheckAccessArgs {
    fn explain(self, server: &ServerOptions) -> Result<Command, ConfigErrors> {
        let is_session = !self.roles.is_empty() || self.user.is_some() || self.metadata.is_some();
        let session =
            Session::new(self.user.unwrap_or_default(), self.roles).metadata(self.metadata.unwrap_or_default());
        let explained = server.explain(is_session.then_some(&session), &self.operation, self.bucket.as_deref());
        match explained {
            Ok(explanation) => Ok(Command::CheckAccess(Box::new(explanation))),
            Err(error) => Err(ConfigErrors::Usage(format!("error: {}", error.message))),
        }
    }
}
