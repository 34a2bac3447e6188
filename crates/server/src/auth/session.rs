//! Somebody who is logged in.

use serde_json::{Map, Value as Json};

use super::Tier;

/// Somebody who is logged in.
#[derive(Debug, Clone, PartialEq, Default)]
#[non_exhaustive]
pub struct Session {
    /// Who it is.
    pub user_id: String,
    /// In which roles.
    pub roles: Vec<String>,
    /// What else is known, for the filters of permissions.
    pub metadata: Map<String, Json>,
    /// Until when, in milliseconds since 1970; none for ever.
    pub expires_at: Option<u64>,
}

impl Session {
    /// Somebody in these roles, for ever.
    pub fn new(user_id: impl Into<String>, roles: impl IntoIterator<Item = impl Into<String>>) -> Self {
        let roles = roles.into_iter().map(Into::into).collect();
        Self { user_id: user_id.into(), roles, ..Self::default() }
    }

    /// Whether it is over.
    pub fn is_expired(&self, now: u64) -> bool {
        self.expires_at.is_some_and(|expires_at| expires_at <= now)
    }

    /// Whether its roles are high enough for an operation. Roles that have no level leave it to the permissions.
    pub fn reaches(&self, tier: Tier) -> bool {
        let highest = self.roles.iter().filter_map(|role| Tier::of_role(role)).max();
        highest.is_none_or(|highest| highest >= tier)
    }
}
