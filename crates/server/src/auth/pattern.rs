//! Patterns for the names of operations and topics.

/// `*`, `prefix.*`, or a whole name. Anything else is a whole name that nothing has; [`Pattern::is_proper`] tells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Pattern {
    Everything,
    /// What begins with this, its dot included.
    Under(Box<str>),
    Exactly(Box<str>),
}

impl Pattern {
    pub(super) fn new(text: &str) -> Self {
        match text.strip_suffix('*') {
            Some("") => Self::Everything,
            Some(prefix) if prefix.ends_with('.') => Self::Under(prefix.into()),
            _ => Self::Exactly(text.into()),
        }
    }

    pub(super) fn matches(&self, name: &str) -> bool {
        match self {
            Self::Everything => true,
            Self::Under(prefix) => name.starts_with(&**prefix),
            Self::Exactly(own) => name == &**own,
        }
    }

    /// Whether a name could be like that.
    pub(super) fn is_proper(&self) -> bool {
        match self {
            Self::Everything => true,
            Self::Under(prefix) => prefix.len() > 1 && is_plain(prefix),
            Self::Exactly(name) => !name.is_empty() && is_plain(name),
        }
    }

    pub(super) fn text(&self) -> String {
        match self {
            Self::Everything => "*".to_owned(),
            Self::Under(prefix) => format!("{prefix}*"),
            Self::Exactly(name) => name.clone().into(),
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
    fn a_pattern_is_everything_a_prefix_or_a_name() {
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
    fn what_is_none_can_be_told() {
        for text in ["*", "a.*", "a.b.*", "a", "a.b"] {
            assert!(Pattern::new(text).is_proper(), "{text}");
            assert_eq!(Pattern::new(text).text(), text);
        }
        for text in ["", ".*", "a*", "**", "*.a", "a.*.b", "a.**", " a", "a b.*", "* "] {
            assert!(!Pattern::new(text).is_proper(), "{text}");
            assert_eq!(Pattern::new(text).text(), text);
        }
    }
}
