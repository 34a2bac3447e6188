//! The session of a logged-in user.

use serde_json::{Map, Value as Json};

use super::Tier;
use super::credential::Credential;

/// The session of a logged-in user.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Session {
    /// The user id.
    pub user_id: String,
    /// The roles of the user.
    pub roles: Vec<String>,
    /// Further attributes of the user, for the row filters of permissions.
    pub metadata: Map<String, Json>,
    /// When the session expires, in milliseconds since 1970. `None` means never.
    pub expires_at: Option<u64>,
    /// The credential with which the user logged in. `None` if the session was created by the embedding program.
    pub(super) credential: Option<Credential>,
}

/// Sessions are equal if user, roles, metadata and expiry are equal. The credential is ignored.
impl PartialEq for Session {
    fn eq(&self, other: &Self) -> bool {
        let Self { user_id, roles, metadata, expires_at, credential: _ } = self;
        (user_id, roles, metadata, expires_at) == (&other.user_id, &other.roles, &other.metadata, &other.expires_at)
    }
}

impl Session {
    /// Creates a session that has no metadata and never expires.
    pub fn new(user_id: impl Into<String>, roles: impl IntoIterator<Item = impl Into<String>>) -> Self {
        let roles = roles.into_iter().map(Into::into).collect();
        Self { user_id: user_id.into(), roles, ..Self::default() }
    }

    /// Sets [`metadata`](#structfield.metadata).
    #[must_use]
    pub fn metadata(mut self, metadata: Map<String, Json>) -> Self {
        self.metadata = metadata;
        self
    }

    /// Sets [`expires_at`](#structfield.expires_at).
    #[must_use]
    pub fn expires_at(mut self, expires_at: u64) -> Self {
        self.expires_at = Some(expires_at);
        self
    }

    /// Returns whether the session has expired. `now` is in milliseconds since 1970.
    pub fn is_expired(&self, now: u64) -> bool {
        self.expires_at.is_some_and(|expires_at| expires_at <= now)
    }

    /// Returns the highest tier of the roles `reader`, `writer` and `admin`. A session without any of them has the
    /// [default tier](crate::auth::Auth::default_tier) of the server.
    pub fn tier(&self) -> Option<Tier> {
        self.roles.iter().filter_map(|role| Tier::of_role(role)).max()
    }
}
