//! The program that a server runs.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::path::PathBuf;
use std::process::Command;

use crate::certificates::Certificates;
use crate::port::Port;
use crate::process::Process;
use crate::wait::{PATIENCE, wait_until};

/// The environment variable that chooses the program of servers.
const PROGRAM_ENV: &str = "TIDEWIRE_TEST_SERVER";

/// The program of a [`RedisServer`](crate::RedisServer).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ServerProgram {
    /// `redis-server` on the PATH.
    Redis,
    /// `valkey-server` on the PATH.
    Valkey,
    /// The path of a program that takes the arguments and the configuration of `redis-server`.
    Path(PathBuf),
}

impl ServerProgram {
    /// Returns the program that the environment variable `TIDEWIRE_TEST_SERVER` names: `redis`, `valkey`, or an absolute path.
    /// Without the variable it is [`Redis`](Self::Redis).
    ///
    /// # Panics
    ///
    /// If the variable has another value.
    #[track_caller]
    pub fn from_env() -> Self {
        let value = env::var_os(PROGRAM_ENV).unwrap_or_else(|| "redis".into());
        Self::parse(&value).unwrap_or_else(|| {
            panic!(
                "expected `redis`, `valkey` or the absolute path of a program in {PROGRAM_ENV}, got `{}`. \
                 Without the variable, tests run with redis-server",
                value.display()
            )
        })
    }

    fn parse(value: &OsStr) -> Option<Self> {
        match value.to_str() {
            Some("redis") => Some(Self::Redis),
            Some("valkey") => Some(Self::Valkey),
            _ => Some(PathBuf::from(value)).filter(|path| path.is_absolute()).map(Self::Path),
        }
    }

    /// Returns whether the program was built with TLS. It starts the program to find out.
    ///
    /// # Panics
    ///
    /// If the program is missing, or ends for another reason.
    #[track_caller]
    pub fn supports_tls(&self) -> bool {
        let dir = tempfile::Builder::new().prefix("tidewire-tls-").tempdir().expect("a temporary directory");
        let (port, certificates) = (Port::reserve(), Certificates::generate(dir.path()));
        let mut command = self.command();
        command
            .current_dir(dir.path())
            .args(["--port", "0", "--save", "", "--tls-port"])
            .arg(port.number().to_string());
        command.arg("--tls-cert-file").arg(certificates.server).arg("--tls-key-file").arg(certificates.server_key);
        command.arg("--tls-ca-cert-file").arg(certificates.authority);
        let mut process = self.spawn(command);
        let mut is_supported = None;
        wait_until("the server accepts connections for TLS, or ends", PATIENCE, || {
            is_supported = if std::net::TcpStream::connect(port.addr()).is_ok() {
                Some(true)
            } else if process.try_wait().is_some() {
                // Waits for the end of its output.
                process.wait();
                let output = process.output();
                // A program without TLS has no listener for it, or does not know the setting.
                let without_tls = ["Failed finding TLS support", "Bad directive"];
                assert!(
                    without_tls.iter().any(|text| output.contains(text)),
                    "{self} did not start with TLS:\n{output}"
                );
                Some(false)
            } else {
                None
            };
            is_supported.is_some()
        });
        is_supported == Some(true)
    }

    pub(crate) fn command(&self) -> Command {
        Command::new(self.name())
    }

    /// Starts a command made by `command`.
    #[track_caller]
    pub(crate) fn spawn(&self, command: Command) -> Process {
        Process::try_spawn(command)
            .unwrap_or_else(|error| panic!("cannot start {self}: {error}. {}", self.install_hint()))
    }

    fn name(&self) -> OsString {
        match self {
            Self::Redis => "redis-server".into(),
            Self::Valkey => "valkey-server".into(),
            Self::Path(path) => path.into(),
        }
    }

    fn install_hint(&self) -> &'static str {
        match self {
            Self::Redis => {
                "It comes with the Debian package redis-server, which `make test` installs; on another system install Redis so that \
                 it is on the PATH"
            }
            Self::Valkey => {
                "Install Valkey so that it is on the PATH. `make valkey` downloads it for the tests of the Redis client"
            }
            Self::Path(_) => {
                "Expected the path of a redis-server or a valkey-server in TIDEWIRE_TEST_SERVER or in the options"
            }
        }
    }
}

impl fmt::Display for ServerProgram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.name().display().fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_names_and_absolute_paths() {
        let parse = |value: &str| ServerProgram::parse(OsStr::new(value));
        assert_eq!(parse("redis"), Some(ServerProgram::Redis));
        assert_eq!(parse("valkey"), Some(ServerProgram::Valkey));
        assert_eq!(parse("/opt/valkey-server"), Some(ServerProgram::Path("/opt/valkey-server".into())));
        for unknown in ["", "Redis", "keydb", "./valkey-server", "valkey-server"] {
            assert_eq!(parse(unknown), None, "{unknown}");
        }
    }
}
