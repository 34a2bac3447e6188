//! Roles of this program as its own child process: parts of a workload whose memory or CPU is measured separately, or must not be
//! measured.

use std::env;
use std::process::Command;

use tidewire_testkit::Process;

/// Names the role that a process was started for.
const ROLE: &str = "TIDEWIRE_BENCH_ROLE";

/// A part that a process of its own plays.
pub(crate) struct Role {
    /// No other role has it.
    pub(crate) name: &'static str,
    /// Plays it to its end, with the arguments it was started with.
    pub(crate) play: fn(&[String]),
}

impl Role {
    /// The command that plays it.
    pub(crate) fn command(&self, arguments: &[String]) -> Command {
        let mut command = Command::new(env::current_exe().expect("this executable has a path"));
        command.args(arguments).env(ROLE, self.name);
        command
    }

    /// Plays it in a process that ends with this one.
    pub(crate) fn start(&self, arguments: &[String]) -> Process {
        Process::spawn(self.command(arguments))
    }
}

/// Whether this process was started for one of these roles, and has played it.
pub(crate) fn play<'a>(roles: impl IntoIterator<Item = &'a Role>) -> bool {
    let Ok(name) = env::var(ROLE) else { return false };
    let role = roles.into_iter().find(|role| role.name == name);
    let role = role.unwrap_or_else(|| panic!("{ROLE} is {name}, and there is no such role"));
    (role.play)(&env::args().skip(1).collect::<Vec<_>>());
    true
}
