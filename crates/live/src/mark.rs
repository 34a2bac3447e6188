//! Marks: positions from which a subscription can resume.

use std::fmt;
use std::str::FromStr;

use tidewire_store::{Position, Query};

/// The position of a result of a query, from which a subscription can resume. The text form is opaque to clients.
///
/// ```
/// use tidewire_live::Mark;
///
/// let text = "00000000000000070000000000000001cbf29ce484222325";
/// let mark: Mark = text.parse()?;
/// assert_eq!(mark.position().sequence, 1);
/// assert_eq!(mark.to_string(), text);
/// # Ok::<(), tidewire_live::ParseMarkError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Mark {
    position: Position,
    query: u64,
}

/// The text is not a mark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("expected a position of 48 hexadecimal digits")]
pub struct ParseMarkError;

impl Mark {
    pub(crate) fn new(position: Position, query: u64) -> Self {
        Self { position, query }
    }

    /// Returns the position of the last commit that the result includes.
    pub fn position(&self) -> Position {
        self.position
    }

    /// Returns whether the mark belongs to a query with this hash.
    pub(crate) fn is_of(&self, query: u64) -> bool {
        self.query == query
    }
}

/// Returns a hash of the query, which is stable across processes.
pub(crate) fn hash(query: &Query) -> u64 {
    let canonical = query.canonical();
    canonical.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

impl fmt::Display for Mark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}{:016x}{:016x}", self.position.epoch, self.position.sequence, self.query)
    }
}

impl FromStr for Mark {
    type Err = ParseMarkError;

    fn from_str(text: &str) -> Result<Self, ParseMarkError> {
        if text.len() != 48 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(ParseMarkError);
        }
        let number = |from: usize| u64::from_str_radix(&text[from..from + 16], 16).map_err(|_| ParseMarkError);
        Ok(Self { position: Position { epoch: number(0)?, sequence: number(16)? }, query: number(32)? })
    }
}
