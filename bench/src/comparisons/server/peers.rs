//! Peer programs, as `make peers` installs them.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::process::{ServerProcess, spawn};

/// The required package.
pub(super) const WS: &str = "the npm package ws";

/// Returns the folder `peers` in the target folder of cargo. This program is in a subfolder of the target folder.
fn folder() -> PathBuf {
    let program = env::current_exe().expect("this executable has a path");
    let target = program.ancestors().nth(2).expect("the program is two levels below the target folder");
    target.join("peers")
}

/// Returns the path of a file in `bench/peers`.
pub(super) fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("peers").join(name)
}

/// Returns the path of a program that is installed with pip.
pub(super) fn program(name: &str) -> PathBuf {
    folder().join("python/bin").join(name)
}

/// Returns a file that exists if the package is installed.
pub(super) fn ws_package() -> PathBuf {
    folder().join("node_modules/ws/package.json")
}

/// Starts a server on Node that answers every message with this reply.
pub(super) fn node_ws(reply: &str) -> ServerProcess {
    let mut command = Command::new("node");
    command.arg(file("ws.js")).arg(reply).current_dir(folder());
    ServerProcess::new(spawn(command), "listening on ")
}
