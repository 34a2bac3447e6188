//! The `tidewire revoke` command.

use std::fmt;

use super::cli::RemoteFlags;
use super::entry::Report;
use super::error::ConfigProblem;
use super::location::Origin;
use super::overrides::{Environment, variable_text};
use super::server_url::ServerUrl;

/// The variable with the token. There is no flag, because other users of the machine can see flags in the process list.
const TOKEN: &str = "TIDEWIRE_TOKEN";
const URL: &str = "TIDEWIRE_URL";
const DEFAULT_URL: &str = "ws://127.0.0.1:8080/";

/// The command to revoke a user on a running server.
#[derive(Clone)]
#[non_exhaustive]
pub struct RevokeCommand {
    /// The user to revoke.
    pub user_id: String,
    /// The reason, for the log of the server.
    pub reason: Option<String>,
    /// The server.
    pub url: ServerUrl,
    token: String,
}

impl RevokeCommand {
    /// Returns the token of an administrator.
    pub fn token(&self) -> &str {
        &self.token
    }

    /// Reads the command from its flags and the environment. Returns `None` after reporting an error.
    pub(super) fn read(
        user_id: String,
        reason: Option<String>,
        remote: &RemoteFlags,
        environment: Environment<'_>,
        report: &mut Report,
    ) -> Option<Self> {
        let expected = |expected: &str, found: String| ConfigProblem::Expected { expected: expected.to_owned(), found };
        let variable = |name: &str| Origin::Variable(name.to_owned());
        let flag = remote.url.clone().map(|url| (url, Origin::Flag("--url".to_owned())));
        let from_environment = || Some((variable_text(URL, environment, report)?, variable(URL)));
        let (text, origin) = flag.or_else(from_environment).unwrap_or_else(|| (DEFAULT_URL.to_owned(), variable(URL)));
        let url = ServerUrl::parse(&text).or_else(|| {
            let found = serde_json::Value::from(text).to_string();
            report.fail(origin.location(), "", expected("a URL such as \"ws://127.0.0.1:8080/\"", found))
        });
        let token = variable_text(TOKEN, environment, report).or_else(|| {
            let problem = expected("the token of a user with the tier admin", "nothing".to_owned());
            report.fail(variable(TOKEN).location(), "", problem)
        });
        Some(Self { user_id, reason, url: url?, token: token? })
    }
}

/// Hides the token.
impl fmt::Debug for RevokeCommand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { user_id, reason, url, token: _ } = self;
        let mut debug = f.debug_struct("RevokeCommand");
        debug.field("user_id", user_id).field("reason", reason).field("url", url).finish_non_exhaustive()
    }
}
