//! Typed access to the values of the configuration tree.
//!
//! Each accessor returns the value if it is valid. Otherwise it reports an error and returns `None`, and reading continues, so that
//! all errors are reported at once.

use std::ops::RangeInclusive;
use std::time::Duration;

use super::error::{ConfigError, ConfigErrors, ConfigProblem};
use super::location::Location;
use super::tree::{Node, Value};

/// The errors and warnings found so far.
#[derive(Default)]
pub(super) struct Report {
    pub(super) errors: Vec<ConfigError>,
    pub(super) warnings: Vec<String>,
}

impl Report {
    pub(super) fn add(&mut self, location: Location, key: &str, problem: ConfigProblem) {
        self.errors.push(ConfigError { location, key: key.to_owned(), problem });
    }

    /// Returns all errors, sorted by location.
    pub(super) fn into_errors(mut self) -> ConfigErrors {
        self.errors.sort_by_key(|error| error.location.rank());
        ConfigErrors::Settings(self.errors)
    }

    /// Reports an error and returns `None`.
    pub(super) fn fail<T>(&mut self, location: Location, key: &str, problem: ConfigProblem) -> Option<T> {
        self.add(location, key, problem);
        None
    }
}

/// Appends a key to the path of its object. Static tokens are secret and errors are logged, so a token is shown as `*`; its location
/// identifies it.
pub(super) fn join_key(path: &str, key: &str) -> String {
    match path {
        "" => key.to_owned(),
        "auth.tokens" => "auth.tokens.*".to_owned(),
        _ => format!("{path}.{key}"),
    }
}

/// Limit of a duration: one year. A larger number is most likely not in milliseconds.
pub(super) const MAX_MS: u64 = 365 * 24 * 3600 * 1000;

/// Formats a warning about a setting. The location of a flag or variable already identifies its setting.
pub(super) fn warning(location: &Location, key: &str, message: &str) -> String {
    match location {
        Location::File { .. } => format!("{location}: `{key}`: {message}"),
        _ => format!("{location}: {message}"),
    }
}

/// A value of the configuration and the full path of its key, such as `heartbeat.intervalMs`.
#[derive(Clone)]
pub(super) struct Entry<'n> {
    pub(super) node: &'n Node,
    pub(super) key: String,
}

impl<'n> Entry<'n> {
    pub(super) fn root(node: &'n Node) -> Self {
        Self { node, key: String::new() }
    }

    pub(super) fn location(&self) -> Location {
        self.node.location()
    }

    /// Reports an error at this value.
    pub(super) fn reject(&self, report: &mut Report, problem: ConfigProblem) {
        report.add(self.location(), &self.key, problem);
    }

    /// Reports an error at this value and returns `None`.
    pub(super) fn fail<T>(&self, report: &mut Report, problem: ConfigProblem) -> Option<T> {
        report.fail(self.location(), &self.key, problem)
    }

    /// Reports that the value is not as expected.
    pub(super) fn mismatch<T>(&self, report: &mut Report, expected: impl Into<String>) -> Option<T> {
        // The value may be a misplaced token, which must not be shown.
        let is_secret = matches!(&*self.key, "auth.tokens" | "auth.tokens.*");
        let found = if is_secret { self.node.type_name().to_owned() } else { self.node.describe() };
        self.fail(report, ConfigProblem::Expected { expected: expected.into(), found })
    }

    /// Reports that a required key of this object is missing.
    pub(super) fn missing<T>(&self, report: &mut Report, key: &'static str, expected: &str) -> Option<T> {
        self.fail(report, ConfigProblem::Missing { key, expected: expected.to_owned() })
    }

    /// Formats a warning about this value.
    pub(super) fn warning(&self, message: &str) -> String {
        warning(&self.location(), &self.key, message)
    }

    /// Returns the members of an object with a fixed set of keys, and reports unknown keys. Null members and comments are omitted.
    pub(super) fn members(&self, report: &mut Report, known: &[&'static str]) -> Vec<(&'n str, Self)> {
        let Value::Object(members) = &self.node.value else {
            self.mismatch::<()>(report, "an object");
            return Vec::new();
        };
        let mut entries = Vec::new();
        for member in members.iter().filter(|member| member.key != "comment") {
            let key = join_key(&self.key, &member.key);
            if !known.contains(&&*member.key) {
                let suggestion = closest(&member.key, known.iter().copied());
                report.add(member.origin.location(), &key, ConfigProblem::UnknownKey { suggestion });
            } else if !member.value.is_null() {
                entries.push((&*member.key, Entry { node: &member.value, key }));
            }
        }
        entries
    }

    /// Returns the members of an object whose keys are names chosen by the user. Null members are omitted, and so is a `comment` that
    /// is a string.
    pub(super) fn named_members(&self, report: &mut Report) -> Vec<(&'n str, Self)> {
        let Value::Object(members) = &self.node.value else {
            self.mismatch::<()>(report, "an object");
            return Vec::new();
        };
        let is_comment = |key: &str, node: &Node| key == "comment" && matches!(node.value, Value::String(_));
        let members =
            members.iter().filter(|member| !member.value.is_null() && !is_comment(&member.key, &member.value));
        members
            .map(|member| (&*member.key, Entry { node: &member.value, key: join_key(&self.key, &member.key) }))
            .collect()
    }

    /// Returns the elements of a list.
    pub(super) fn items(&self, report: &mut Report, expected: &str) -> Option<Vec<Self>> {
        let Value::Array(items) = &self.node.value else { return self.mismatch(report, expected) };
        let item = |(index, node)| Entry { node, key: format!("{}[{index}]", self.key) };
        Some(items.iter().enumerate().map(item).collect())
    }

    /// Returns a list of non-empty strings.
    pub(super) fn texts(&self, report: &mut Report, expected: &str) -> Option<Vec<String>> {
        let items = self.items(report, expected)?;
        let texts: Vec<Option<&str>> = items.iter().map(|item| item.text(report, "a non-empty string")).collect();
        texts.into_iter().map(|text| text.map(str::to_owned)).collect()
    }

    pub(super) fn boolean(&self, report: &mut Report) -> Option<bool> {
        match self.node.value {
            Value::Bool(value) => Some(value),
            _ => self.mismatch(report, "true or false"),
        }
    }

    /// Returns a non-empty string.
    pub(super) fn text(&self, report: &mut Report, expected: &str) -> Option<&'n str> {
        match &self.node.value {
            Value::String(text) if !text.is_empty() => Some(text),
            _ => self.mismatch(report, expected),
        }
    }

    /// Returns a string, or `None` without an error if it is empty.
    pub(super) fn optional_text(&self, report: &mut Report, expected: &str) -> Option<&'n str> {
        match &self.node.value {
            Value::String(text) if text.is_empty() => None,
            _ => self.text(report, expected),
        }
    }

    /// Like [`optional_text`](Self::optional_text), for a value that must not appear in error messages.
    pub(super) fn optional_secret(&self, report: &mut Report) -> Option<&'n str> {
        if let Value::String(text) = &self.node.value {
            return Some(&**text).filter(|text| !text.is_empty());
        }
        let found = self.node.type_name().to_owned();
        self.fail(report, ConfigProblem::Expected { expected: "a string".to_owned(), found })
    }

    /// Returns the value that corresponds to one of the words.
    pub(super) fn one_of<T: Copy>(&self, report: &mut Report, all: &[(&'static str, T)]) -> Option<T> {
        let found = match &self.node.value {
            Value::String(text) => all.iter().find(|(word, _)| word == text),
            _ => None,
        };
        if let Some((_, value)) = found {
            return Some(*value);
        }
        let words: Vec<String> = all.iter().map(|(word, _)| format!("\"{word}\"")).collect();
        self.mismatch(report, format!("one of {}", words.join(", ")))
    }

    /// Returns an integer in a range. `what` describes it in the error: "a port number", "a number of bytes".
    pub(super) fn integer(&self, report: &mut Report, what: &str, range: RangeInclusive<u64>) -> Option<u64> {
        let number = match &self.node.value {
            // TOML and JSON files may have 3.0 instead of 3.
            Value::Number(number) => number.as_u64().or_else(|| number.as_f64().and_then(integer_of)),
            _ => None,
        };
        let expected = || format!("{what} from {} to {}", range.start(), range.end());
        number.filter(|number| range.contains(number)).or_else(|| self.mismatch(report, expected()))
    }

    /// Returns a count.
    pub(super) fn count(&self, report: &mut Report, range: RangeInclusive<u64>) -> Option<usize> {
        usize::try_from(self.integer(report, "an integer", range)?).ok()
    }

    /// Returns a size in bytes, at least 1.
    pub(super) fn bytes(&self, report: &mut Report, max: u64) -> Option<usize> {
        usize::try_from(self.integer(report, "a number of bytes", 1..=max)?).ok()
    }

    /// Returns a duration of at least `min` milliseconds.
    pub(super) fn milliseconds(&self, report: &mut Report, min: u64) -> Option<Duration> {
        self.integer(report, "a number of milliseconds", min..=MAX_MS).map(Duration::from_millis)
    }
}

fn integer_of(number: f64) -> Option<u64> {
    /// Larger floats cannot represent every integer.
    const MAX: f64 = 9_007_199_254_740_992.0;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the range is checked")]
    (number.fract() == 0.0 && (0.0..=MAX).contains(&number)).then_some(number as u64)
}

/// Returns the known name that is closest to a misspelled one, or `None` if none is similar.
pub(super) fn closest<'k>(name: &str, known: impl Iterator<Item = &'k str>) -> Option<&'k str> {
    // Truncated, because the edit distance takes quadratic time. No known name is longer.
    let name: String = name.chars().take(64).collect::<String>().to_lowercase();
    let distances = known.map(|known| (strsim::damerau_levenshtein(&name, &known.to_lowercase()), known));
    let (distance, known) = distances.min_by_key(|(distance, _)| *distance)?;
    (distance <= known.chars().count() / 2).then_some(known)
}
