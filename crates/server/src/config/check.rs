//! Checks values that were given: what is right is returned, what is wrong is reported, and looking goes on.

use std::ops::RangeInclusive;
use std::time::Duration;

use super::error::{ConfigError, Problem};
use super::node::{Node, Value};
use super::place::Place;

/// All that was found.
#[derive(Default)]
pub(super) struct Report {
    pub(super) errors: Vec<ConfigError>,
    pub(super) warnings: Vec<String>,
}

impl Report {
    pub(super) fn add(&mut self, place: Place, key: &str, problem: Problem) {
        self.errors.push(ConfigError { place, key: key.to_owned(), problem });
    }

    /// Reports a problem because of which there is nothing to return.
    pub(super) fn fail<T>(&mut self, place: Place, key: &str, problem: Problem) -> Option<T> {
        self.add(place, key, problem);
        None
    }
}

/// Keys that lead to a value. Tokens are secret, and errors are logged: their places tell them apart.
pub(super) fn joined(path: &str, key: &str) -> String {
    match path {
        "" => key.to_owned(),
        "auth.tokens" => "auth.tokens.*".to_owned(),
        _ => format!("{path}.{key}"),
    }
}

/// The longest time span, a year: whoever wants more has forgotten that it is in milliseconds.
pub(super) const MAX_MS: u64 = 365 * 24 * 3600 * 1000;

/// A value that was given, and the keys that lead to it.
#[derive(Clone)]
pub(super) struct Given<'n> {
    pub(super) node: &'n Node,
    pub(super) key: String,
}

impl<'n> Given<'n> {
    pub(super) fn root(node: &'n Node) -> Self {
        Self { node, key: String::new() }
    }

    pub(super) fn place(&self) -> Place {
        self.node.place()
    }

    /// Reports a problem of it.
    pub(super) fn reject(&self, report: &mut Report, problem: Problem) {
        report.add(self.place(), &self.key, problem);
    }

    /// The same, and there is nothing to return.
    pub(super) fn fail<T>(&self, report: &mut Report, problem: Problem) -> Option<T> {
        report.fail(self.place(), &self.key, problem)
    }

    /// Reports that it is something else than expected.
    pub(super) fn wrong<T>(&self, report: &mut Report, expected: impl Into<String>) -> Option<T> {
        // Whoever takes a token for something else has written it where a value is.
        let is_secret = matches!(&*self.key, "auth.tokens" | "auth.tokens.*");
        let found = if is_secret { self.node.kind().to_owned() } else { self.node.found() };
        self.fail(report, Problem::Expected { expected: expected.into(), found })
    }

    /// Reports that a key of it is missing.
    pub(super) fn missing<T>(&self, report: &mut Report, key: &'static str, expected: &str) -> Option<T> {
        self.fail(report, Problem::Missing { key, expected: expected.to_owned() })
    }

    pub(super) fn warn(&self, report: &mut Report, what: &str) {
        report.warnings.push(format!("{}: {}: {what}", self.place(), self.key));
    }

    /// The members of an object of which all keys are known. Null is as good as nothing.
    pub(super) fn members(&self, report: &mut Report, known: &[&'static str]) -> Vec<(&'n str, Self)> {
        let Value::Object(members) = &self.node.value else {
            self.wrong::<()>(report, "an object");
            return Vec::new();
        };
        let mut given = Vec::new();
        for member in members.iter().filter(|member| member.key != "comment") {
            let key = joined(&self.key, &member.key);
            if !known.contains(&&*member.key) {
                let nearest = nearest(&member.key, known.iter().copied()).unwrap_or_default();
                report.add(member.origin.place(), &key, Problem::UnknownKey { nearest });
            } else if !member.value.is_null() {
                given.push((&*member.key, Given { node: &member.value, key }));
            }
        }
        given
    }

    /// The members of an object whose keys are names. There a `comment` is one only if it is a text.
    pub(super) fn named(&self, report: &mut Report) -> Vec<(&'n str, Self)> {
        let Value::Object(members) = &self.node.value else {
            self.wrong::<()>(report, "an object");
            return Vec::new();
        };
        let is_comment = |key: &str, node: &Node| key == "comment" && matches!(node.value, Value::String(_));
        let given = members.iter().filter(|member| !member.value.is_null() && !is_comment(&member.key, &member.value));
        given.map(|member| (&*member.key, Given { node: &member.value, key: joined(&self.key, &member.key) })).collect()
    }

    /// The elements of a list.
    pub(super) fn items(&self, report: &mut Report, expected: &str) -> Option<Vec<Self>> {
        let Value::Array(items) = &self.node.value else { return self.wrong(report, expected) };
        let item = |(index, node)| Given { node, key: format!("{}[{index}]", self.key) };
        Some(items.iter().enumerate().map(item).collect())
    }

    /// A list of texts, none of which is empty.
    pub(super) fn texts(&self, report: &mut Report, expected: &str) -> Option<Vec<String>> {
        let items = self.items(report, expected)?;
        let texts: Vec<Option<&str>> =
            items.iter().map(|item| item.text(report, "a string that is not empty")).collect();
        texts.into_iter().map(|text| text.map(str::to_owned)).collect()
    }

    pub(super) fn flag(&self, report: &mut Report) -> Option<bool> {
        match self.node.value {
            Value::Bool(value) => Some(value),
            _ => self.wrong(report, "true or false"),
        }
    }

    /// A text that is not empty.
    pub(super) fn text(&self, report: &mut Report, expected: &str) -> Option<&'n str> {
        match &self.node.value {
            Value::String(text) if !text.is_empty() => Some(text),
            _ => self.wrong(report, expected),
        }
    }

    /// A text; an empty one is as good as none.
    pub(super) fn optional_text(&self, report: &mut Report, expected: &str) -> Option<&'n str> {
        match &self.node.value {
            Value::String(text) if text.is_empty() => None,
            _ => self.text(report, expected),
        }
    }

    /// The same of a text that no error may show.
    pub(super) fn optional_secret(&self, report: &mut Report) -> Option<&'n str> {
        if let Value::String(text) = &self.node.value {
            return Some(&**text).filter(|text| !text.is_empty());
        }
        let found = self.node.kind().to_owned();
        self.fail(report, Problem::Expected { expected: "a string".to_owned(), found })
    }

    /// What one of these words stands for.
    pub(super) fn one_of<T: Copy>(&self, report: &mut Report, all: &[(&'static str, T)]) -> Option<T> {
        let found = match &self.node.value {
            Value::String(text) => all.iter().find(|(word, _)| word == text),
            _ => None,
        };
        if let Some((_, value)) = found {
            return Some(*value);
        }
        let words: Vec<String> = all.iter().map(|(word, _)| format!("\"{word}\"")).collect();
        self.wrong(report, format!("one of {}", words.join(", ")))
    }

    /// A whole number. Those who write 3 as 3.0 mean the same.
    pub(super) fn whole(&self, report: &mut Report, range: RangeInclusive<u64>) -> Option<u64> {
        let number = match &self.node.value {
            Value::Number(number) => number.as_u64().or_else(|| number.as_f64().and_then(whole)),
            _ => None,
        };
        let expected = || format!("a whole number from {} to {}", range.start(), range.end());
        number.filter(|number| range.contains(number)).or_else(|| self.wrong(report, expected()))
    }

    /// How many, or how many bytes.
    pub(super) fn count(&self, report: &mut Report, range: RangeInclusive<u64>) -> Option<usize> {
        usize::try_from(self.whole(report, range)?).ok()
    }

    /// A time span of at least so many milliseconds.
    pub(super) fn milliseconds(&self, report: &mut Report, least: u64) -> Option<Duration> {
        self.whole(report, least..=MAX_MS).map(Duration::from_millis)
    }
}

fn whole(number: f64) -> Option<u64> {
    /// Above it floats leave out whole numbers.
    const MAX: f64 = 9_007_199_254_740_992.0;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "its range is checked")]
    (number.fract() == 0.0 && (0.0..=MAX).contains(&number)).then_some(number as u64)
}

/// What somebody might have meant.
pub(super) fn nearest<'k>(given: &str, known: impl Iterator<Item = &'k str>) -> Option<&'k str> {
    // Distances are quadratic, and no key is so long.
    let given: String = given.chars().take(64).collect::<String>().to_lowercase();
    known.min_by_key(|known| strsim::damerau_levenshtein(&given, &known.to_lowercase()))
}
