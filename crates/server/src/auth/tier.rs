//! The tiers of operations and roles.

/// The tier of an operation, and of the roles that may use it. A higher tier includes the lower ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tier {
    /// Reads records.
    Read,
    /// Writes records.
    Write,
    /// Changes definitions, or inspects and manages the server.
    Admin,
}

impl Tier {
    /// All tiers, from the lowest to the highest.
    pub(crate) const ALL: [Self; 3] = [Self::Read, Self::Write, Self::Admin];

    /// Returns the tier of a built-in role: `reader`, `writer` or `admin`. Other roles have none.
    pub fn of_role(role: &str) -> Option<Self> {
        match role {
            "reader" => Some(Self::Read),
            "writer" => Some(Self::Write),
            "admin" => Some(Self::Admin),
            _ => None,
        }
    }

    /// Returns the built-in role with this tier.
    pub(crate) const fn role(self) -> &'static str {
        match self {
            Self::Read => "reader",
            Self::Write => "writer",
            Self::Admin => "admin",
        }
    }

    /// Returns the name of the tier, as in error messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Admin => "admin",
        }
    }
}
