//! Whole configurations, through the public API.

mod applying;
mod auth;
mod errors;
mod manual;
mod sources;
mod warnings;

use std::collections::HashMap;
use std::ffi::OsString;
use std::path::PathBuf;

use serde_json::Value as Json;

use super::{Config, ConfigErrors};
use crate::{Auth, Session};

/// Whose a token is.
fn session(auth: &Auth, token: &str, now: u64) -> Option<Session> {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(auth.validator.validate(token, now)).unwrap()
}

/// A directory with files, and an environment.
struct World {
    dir: tempfile::TempDir,
    variables: HashMap<String, OsString>,
}

impl World {
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

    fn load(&self, args: &[&str]) -> Result<Config, ConfigErrors> {
        let args = ["tidewire"].iter().chain(args);
        Config::load(args, |name| self.variables.get(name).cloned())
    }

    /// What is said of a file, without the directory that it is in.
    fn wrong(&self, name: &str, text: impl AsRef<[u8]>) -> Vec<String> {
        let file = self.file(name, text);
        self.lines(&["--config", &file])
    }

    /// What is said of flags.
    fn lines(&self, args: &[&str]) -> Vec<String> {
        let errors = self.load(args).expect_err("something is wrong");
        assert_eq!(errors.exit_code(), 2);
        let text = errors.to_string().replace(&format!("{}/", self.dir.path().display()), "");
        text.lines().map(str::to_owned).collect()
    }

    fn config(&self, json: &Json) -> Config {
        let file = self.file("c.json", json.to_string());
        self.load(&["--config", &file]).unwrap_or_else(|errors| panic!("{json}: {errors}"))
    }
}
