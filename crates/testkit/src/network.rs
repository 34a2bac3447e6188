//! Tests in a network namespace of their own, where packets can be lost.

use std::os::unix::fs::MetadataExt;
use std::process::Command;

use crate::process::{Process, rerun};

/// Runs one test of this test binary, named with its module path, in a new process that has a network namespace of its own. Returns
/// when it has passed.
///
/// The namespace has only a loopback interface, which is down, and the test is root in it. It calls
/// [`is_rerun`](crate::is_rerun) to know whether it is in that process:
///
/// ```no_run
/// use tidewire_testkit::{is_rerun, rerun_in_own_network, set_loopback};
///
/// // #[test]
/// fn survives_lost_packets() {
///     if !is_rerun() {
///         return rerun_in_own_network("survives_lost_packets");
///     }
///     set_loopback(true);
///     // … connect to 127.0.0.1
///     set_loopback(false);
///     // … packets are lost
/// }
/// ```
///
/// Without root, the kernel must allow unprivileged user namespaces, as most do.
///
/// # Panics
///
/// If the test fails or takes longer than a minute, or if the process cannot have a network namespace, with its output.
#[track_caller]
pub fn rerun_in_own_network(test: &str) {
    let inner = rerun(test);
    let mut command = Command::new("unshare");
    let is_root = std::fs::metadata("/proc/self").is_ok_and(|process| process.uid() == 0);
    if !is_root {
        command.args(["--user", "--map-root-user"]);
    }
    command.arg("--net").arg(inner.get_program()).args(inner.get_args());
    command.envs(inner.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let mut process = Process::spawn(command);
    let status = process.wait();
    let output = process.output();
    assert!(
        !output.contains("unshare:"),
        "cannot create a network namespace: {output}. Run the test as root with CAP_SYS_ADMIN, or allow unprivileged user namespaces \
         (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns)"
    );
    assert!(status.success(), "{test} ended with {status} in its own network:\n{output}");
}

/// Takes the loopback interface of a [network namespace](rerun_in_own_network) up or down. While it is down, packets of open
/// connections are lost, in both directions.
///
/// # Panics
///
/// If `ip` is missing or fails.
#[track_caller]
pub fn set_loopback(is_up: bool) {
    let state = if is_up { "up" } else { "down" };
    let output = Command::new("ip").args(["link", "set", "lo", state]).output().unwrap_or_else(|error| {
        panic!("cannot run ip: {error}. It comes with the Debian package iproute2, which `make test` installs")
    });
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "ip link set lo {state}: {error}. Call it in a test that rerun_in_own_network runs"
    );
}
