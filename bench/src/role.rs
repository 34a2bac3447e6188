//! Roles: parts of a workload that run in a child process of this program, so that their memory and CPU are measured separately or
//! not at all.

use std::env;
use std::process::Command;

use tidewire_testkit::Process;

/// The environment variable with the role of a child process.
const ROLE: &str = "TIDEWIRE_BENCH_ROLE";

/// A function that runs in a child process.
pub(crate) struct Role {
    /// The unique name of the role.
    pub(crate) name: &'static str,
    /// The function. Its arguments are those of the child process.
    pub(crate) run: fn(&[String]),
}

impl Role {
    /// Returns the command that starts the child process.
    pub(crate) fn command(&self, arguments: &[String]) -> Command {
        let mut command = Command::new(env::current_exe().expect("this executable has a path"));
        command.args(arguments).env(ROLE, self.name);
        command
    }

    /// Starts the child process, which is killed when the returned handle is dropped.
    pub(crate) fn start(&self, arguments: &[String]) -> Process {
        Process::spawn(self.command(arguments))
    }
}

/// Runs the role that this process was started for. Returns `false` if it was not started for a role.
pub(crate) fn run_if_requested<'a>(roles: impl IntoIterator<Item = &'a Role>) -> bool {
    let Ok(name) = env::var(ROLE) else { return false };
    let role = roles.into_iter().find(|role| role.name == name);
    let role = role.unwrap_or_else(|| panic!("unknown role in {ROLE}: {name}"));
    (role.run)(&env::args().skip(1).collect::<Vec<_>>());
    true
}
