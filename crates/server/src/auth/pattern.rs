//! Patterns for the names of operations and topics.

/// A pattern: `*`, `prefix.*`, or an exact name. Any other text is treated as an exact name, but is not [valid](Pattern::is_valid).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Pattern {
    All,
    /// Names with this prefix, which ends with a dot.
    Prefix(Box<str>),
    Exact(Box<str>),
}

impl Pattern {
    pub(super) fn new(text: &str) -> Self {
        match text.strip_suffix('*') {
            Some("") => Self::All,
            Some(prefix) if prefix.ends_with('.') => Self::Prefix(prefix.into()),
            _ => Self::Exact(text.into()),
        }
    }

    pub(super) fn matches(&self, name: &str) -> bool {
        match self {
            Self::All => true,
            Self::Prefix(prefix) => name.starts_with(&**prefix),
            Self::Exact(own) => name == &**own,
        }
    }

    /// Returns whether the pattern can match a name at all.
    pub(super) fn is_valid(&self) -> bool {
        match self {
            Self::All => true,
            Self::Prefix(prefix) => prefix.len() > 1 && is_plain(prefix),
            Self::Exact(name) => !name.is_empty() && is_plain(name),
        }
    }

    pub(super) fn text(&self) -> String {
        match self {
            Self::All => "*".to_owned(),
            Self::Prefix(prefix) => format!("{prefix}*"),
            Self::Exact(name) => name.clone().into(),
        }
    }
}

fn is_plain(name: &str) -> bool {
    !name.contains(|c: char| c == '*' || c.is_whitespace())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pattern_matches_wildcard_prefix_or_name() {
        for (pattern, name, expected) in [
            ("*", "store.get", true),
            ("*", "", true),
            ("store.*", "store.get", true),
            ("store.*", "store.a.b", true),
            ("store.*", "store", false),
            ("store.*", "storeget", false),
            ("store.*", "restore.get", false),
            ("store.get", "store.get", true),
            ("store.get", "store.getBucketSchema", false),
            ("store.get", "Store.get", false),
            ("store.ge*", "store.get", false),
            ("*.get", "store.get", false),
        ] {
            assert_eq!(Pattern::new(pattern).matches(name), expected, "{pattern} {name}");
        }
    }

    #[test]
    fn invalid_patterns_are_detected() {
        for text in ["*", "a.*", "a.b.*", "a", "a.b"] {
            assert!(Pattern::new(text).is_valid(), "{text}");
            assert_eq!(Pattern::new(text).text(), text);
        }
        for text in ["", ".*", "a*", "**", "*.a", "a.*.b", "a.**", " a", "a b.*", "* "] {
            assert!(!Pattern::new(text).is_valid(), "{text}");
            assert_eq!(Pattern::new(text).text(), text);
        }
    }
}
