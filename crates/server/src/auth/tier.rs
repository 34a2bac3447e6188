//! Levels of operations and roles.

/// What an operation does, and what a role of that level may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tier {
    /// Looks.
    Read,
    /// Changes records.
    Write,
    /// Changes definitions, or looks into the server.
    Admin,
}

impl Tier {
    /// The level of a role, if it is one of those that have one.
    pub fn of_role(role: &str) -> Option<Self> {
        match role {
            "reader" => Some(Self::Read),
            "writer" => Some(Self::Write),
            "admin" => Some(Self::Admin),
            _ => None,
        }
    }

    /// As it is spoken of.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Admin => "admin",
        }
    }
}
