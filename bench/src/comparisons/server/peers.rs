//! Peer programs, as `make peers` installs them.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::process::{Served, spawn};

/// What the contender is called when it is left out.
pub(super) const WS: &str = "the npm package ws";

/// Beside what cargo has built: this program is in a folder of it.
fn folder() -> PathBuf {
    let program = env::current_exe().expect("this executable has a path");
    let built = program.ancestors().nth(2).expect("it is in a folder of a folder");
    built.join("peers")
}

/// A file of this package that goes with them.
pub(super) fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("peers").join(name)
}

/// A program that pip has installed.
pub(super) fn program(name: &str) -> PathBuf {
    folder().join("python/bin").join(name)
}

/// What shows that the package is there.
pub(super) fn ws_package() -> PathBuf {
    folder().join("node_modules/ws/package.json")
}

/// Node, which answers every message with this reply.
pub(super) fn node_ws(reply: &str) -> Served {
    let mut command = Command::new("node");
    command.arg(file("ws.js")).arg(reply).current_dir(folder());
    Served::new(spawn(command), "listening on ")
}
