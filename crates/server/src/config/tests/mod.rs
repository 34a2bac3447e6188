//! Tests of whole configurations through the public API.

mod auth;
mod definitions;
mod errors;
mod reference_docs;
mod sources;
mod warnings;

use std::collections::HashMap;
use std::ffi::OsString;
use std::path::PathBuf;

use serde_json::Value as Json;

use super::{Command, Config, ConfigErrors};
use crate::auth::{Auth, Session};

/// Returns the session of a token.
fn session(auth: &Auth, token: &str, now: u64) -> Option<Session> {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(auth.validator.validate(token, now)).unwrap()
}

/// A directory with configuration files, and environment variables.
struct Fixture {
    dir: tempfile::TempDir,
    variables: HashMap<String, OsString>,
}

impl Fixture {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap(), variables: HashMap::new() }
    }

    fn file(&self, name: &str, text: impl AsRef<[u8]>) -> String {
        let path: PathBuf = self.dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    }

    fn variable(mut self, name: &str, value: impl Into<OsString>) -> Self {
        self.variables.insert(name.to_owned(), value.into());
        self
    }

    fn command(&self, args: &[&str]) -> Result<Command, ConfigErrors> {
        let args = ["tidewire"].iter().chain(args);
        Command::load(args, |name| self.variables.get(name).cloned())
    }

    /// Loads the configuration of a server.
    fn load(&self, args: &[&str]) -> Result<Config, ConfigErrors> {
        match self.command(args)? {
            Command::Serve(config) | Command::Check(config) => Ok(*config),
            command => panic!("not a server: {command:?}"),
        }
    }

    /// Returns the error lines of a file, without its directory.
    fn errors_of(&self, name: &str, text: impl AsRef<[u8]>) -> Vec<String> {
        let file = self.file(name, text);
        self.errors(&["--config", &file])
    }

    /// Returns the error lines of arguments.
    fn errors(&self, args: &[&str]) -> Vec<String> {
        let errors = self.command(args).expect_err("the settings are invalid");
        assert_eq!(errors.exit_code(), 2);
        let text = errors.to_string().replace(&format!("{}/", self.dir.path().display()), "");
        text.lines().map(str::to_owned).collect()
    }

    fn config(&self, json: &Json) -> Config {
        let file = self.file("c.json", json.to_string());
        self.load(&["--config", &file]).unwrap_or_else(|errors| panic!("{json}: {errors}"))
    }
}
