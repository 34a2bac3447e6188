//! Validation of a record against the schema of its bucket.
//!
//! All issues are reported, in the order of the schema. Their number is limited, because an array can have many invalid elements.

use std::fmt::Write;

use serde_json::{Map, Value as Json};

use crate::Value;
use crate::schema::BucketDefinition;
use crate::schema::{FieldRule, Format, Kind};

/// A violation of the schema by a record.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Issue {
    /// The path of the field: `a.b`, `tags[0]`. Empty for the record itself.
    pub field: String,
    /// A description of the violation.
    pub message: String,
    /// The name of the violated rule.
    pub code: &'static str,
}

/// A record does not match the schema of its bucket.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("Validation failed for bucket \"{bucket}\": {}", list(issues))]
#[non_exhaustive]
pub struct ValidationError {
    /// The bucket.
    pub bucket: String,
    /// The violations, at most [`MAX_ISSUES`](Self::MAX_ISSUES) of them.
    pub issues: Vec<Issue>,
}

impl ValidationError {
    /// Limit of the reported issues.
    pub const MAX_ISSUES: usize = 100;
}

fn list(issues: &[Issue]) -> String {
    let mut text = String::new();
    for Issue { field, message, .. } in issues {
        let separator = if text.is_empty() { "" } else { "; " };
        let colon = if field.is_empty() { "" } else { ": " };
        // Writing to a string does not fail.
        let _ = write!(text, "{separator}{field}{colon}{message}");
    }
    text
}

impl BucketDefinition {
    /// Validates a record of the bucket with this name.
    pub fn validate(&self, bucket: &str, record: &Map<String, Json>) -> Result<(), ValidationError> {
        let mut issues = Vec::new();
        for (name, rule) in &self.fields {
            validate_field(rule, record.get(name), name, &mut issues);
        }
        if issues.is_empty() { Ok(()) } else { Err(ValidationError { bucket: bucket.to_owned(), issues }) }
    }
}

/// Validates a field, its members and its elements.
pub(crate) fn validate_field(rule: &FieldRule, value: Option<&Json>, at: &str, issues: &mut Vec<Issue>) {
    let mut issue = |code: &'static str, message: String| {
        if issues.len() < ValidationError::MAX_ISSUES {
            issues.push(Issue { field: at.to_owned(), message, code });
        }
    };
    let Some(value) = value.filter(|value| !value.is_null()) else {
        if rule.required {
            issue("required", "is required".to_owned());
        }
        return;
    };
    if !has_kind(rule.kind, value) {
        let article = if matches!(rule.kind, Kind::Object | Kind::Array) { "an" } else { "a" };
        return issue("type", format!("must be {article} {}", rule.kind));
    }
    if let Some(allowed) = &rule.allowed
        && !allowed.iter().any(|other| is_same(value, other))
    {
        issue("enum", format!("must be one of {}", abbreviate(allowed)));
    }
    if let Json::String(text) = value {
        let length = text.encode_utf16().count();
        if let Some(min) = rule.min_length.filter(|min| length < *min) {
            issue("minLength", format!("must have at least {min} characters"));
        }
        if let Some(max) = rule.max_length.filter(|max| length > *max) {
            issue("maxLength", format!("must have at most {max} characters"));
        }
        if let Some(pattern) = rule.pattern.as_ref().filter(|pattern| !pattern.is_match(text)) {
            issue("pattern", format!("must match {pattern}"));
        }
        if let Some(format) = rule.format.filter(|format| !has_format(*format, text)) {
            issue("format", format!("must be a valid {format}"));
        }
    }
    if let Some(number) = value.as_f64() {
        if let Some(min) = rule.min.filter(|min| number < *min) {
            issue("min", format!("must be at least {min}"));
        }
        if let Some(max) = rule.max.filter(|max| number > *max) {
            issue("max", format!("must be at most {max}"));
        }
    }
    if let Json::Object(members) = value {
        for (name, rule) in &rule.properties {
            validate_field(rule, members.get(name), &format!("{at}.{name}"), issues);
        }
    } else if let (Json::Array(elements), Some(rule)) = (value, &rule.items) {
        for (index, element) in elements.iter().enumerate() {
            if issues.len() == ValidationError::MAX_ISSUES {
                break;
            }
            validate_field(rule, Some(element), &format!("{at}[{index}]"), issues);
        }
    }
}

/// Lists the first values and the number of others.
fn abbreviate(values: &[Json]) -> String {
    const MAX_SHOWN: usize = 20;
    let shown: Vec<String> = values.iter().take(MAX_SHOWN).map(Json::to_string).collect();
    let others = values.len().saturating_sub(MAX_SHOWN);
    if others == 0 { shown.join(", ") } else { format!("{} or {others} others", shown.join(", ")) }
}

fn has_kind(kind: Kind, value: &Json) -> bool {
    match kind {
        Kind::String => value.is_string(),
        Kind::Number => value.is_number(),
        Kind::Boolean => value.is_boolean(),
        Kind::Object => value.is_object(),
        Kind::Array => value.is_array(),
        Kind::Date => value.is_string() || value.is_number(),
    }
}

fn is_same(one: &Json, two: &Json) -> bool {
    Value::of_json(one).zip(Value::of_json(two)).is_some_and(|(one, two)| one.strictly_equals(&two))
}

fn has_format(format: Format, text: &str) -> bool {
    match format {
        Format::Email => is_email(text),
        Format::Url => url::Url::parse(text).is_ok(),
        Format::IsoDate => is_iso_date(text),
    }
}

/// Returns whether the text matches `^[^\s@]+@[^\s@]+\.[^\s@]+$`.
fn is_email(text: &str) -> bool {
    if text.contains(char::is_whitespace) {
        return false;
    }
    let Some((name, host)) = text.split_once('@') else { return false };
    // A dot that is neither the first nor the last character.
    let has_dot = host.char_indices().any(|(at, c)| c == '.' && at > 0 && at + 1 < host.len());
    !name.is_empty() && !host.contains('@') && has_dot
}

/// Returns whether the text is a valid date, or a date and time whose UTC date equals the written date.
fn is_iso_date(text: &str) -> bool {
    let (date, time) = match text.split_once('T') {
        Some((date, time)) => (date, Some(time)),
        None => (text, None),
    };
    is_date(date) && time.is_none_or(is_time_of_same_day)
}

/// Parses a number of exactly `count` digits.
fn parse_digits(text: &str, count: usize) -> Option<u32> {
    (text.len() == count && text.bytes().all(|byte| byte.is_ascii_digit())).then(|| text.parse().ok())?
}

fn is_date(date: &str) -> bool {
    let mut parts = date.split('-');
    let (Some(year), Some(month), Some(day), None) = (
        parts.next().and_then(|year| parse_digits(year, 4)),
        parts.next().and_then(|month| parse_digits(month, 2)),
        parts.next().and_then(|day| parse_digits(day, 2)),
        parts.next(),
    ) else {
        return false;
    };
    let is_leap = year.is_multiple_of(4) && !year.is_multiple_of(100) || year.is_multiple_of(400);
    let days = match month {
        2 if is_leap => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        1..=12 => 31,
        _ => 0,
    };
    (1..=days).contains(&day)
}

/// Returns whether the text is `hh:mm`, `hh:mm:ss` or `hh:mm:ss.fff`, in UTC or with an offset that does not change the date. A
/// time without an offset is in UTC.
fn is_time_of_same_day(time: &str) -> bool {
    let (clock, offset) = match time.find(['Z', '+', '-']) {
        Some(at) => time.split_at(at),
        None => (time, "Z"),
    };
    let (clock, fraction) = clock.split_once('.').map_or((clock, None), |(clock, fraction)| (clock, Some(fraction)));
    let mut parts = clock.split(':').map(|part| parse_digits(part, 2));
    let (Some(Some(hour)), Some(Some(minute)), second, None) = (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return false;
    };
    let second = match second {
        None if fraction.is_some() => return false,
        None => 0,
        Some(Some(second)) => second,
        Some(None) => return false,
    };
    let is_fraction =
        fraction.is_none_or(|fraction| !fraction.is_empty() && fraction.bytes().all(|byte| byte.is_ascii_digit()));
    if hour > 23 || minute > 59 || second > 59 || !is_fraction {
        return false;
    }
    let minutes = match offset.split_at_checked(1) {
        Some(("Z", "")) => 0,
        Some((sign, zone)) => {
            let Some((hours, minutes)) = zone.split_once(':') else { return false };
            let (Some(hours @ 0..=23), Some(minutes @ 0..=59)) = (parse_digits(hours, 2), parse_digits(minutes, 2))
            else {
                return false;
            };
            let offset = i64::from(hours * 60 + minutes);
            if sign == "+" { -offset } else { offset }
        }
        None => return false,
    };
    (0..24 * 60).contains(&(i64::from(hour * 60 + minute) + minutes))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn issues(rule: &Json, value: Json) -> Vec<(String, &'static str)> {
        let definition = json!({"key": "id", "schema": {"id": {"type": "string"}, "f": rule}});
        let definition = BucketDefinition::parse(&definition).unwrap();
        let mut record = Map::new();
        record.insert("f".to_owned(), value);
        let found = definition.validate("b", &record).err().map_or(Vec::new(), |error| error.issues);
        found.into_iter().map(|issue| (issue.field, issue.code)).collect()
    }

    fn codes(rule: &Json, value: Json) -> Vec<&'static str> {
        issues(rule, value).into_iter().map(|(_, code)| code).collect()
    }

    #[test]
    fn all_issues_are_reported_in_schema_order() {
        let definition = BucketDefinition::parse(&json!({
            "key": "id",
            "schema": {
                "id": {"type": "string", "required": true},
                "name": {"type": "string", "minLength": 3, "pattern": "^[a-z]"},
                "age": {"type": "number", "min": 18},
                "tags": {"type": "array", "items": {"type": "string"}},
                "home": {"type": "object", "properties": {"zip": {"type": "string", "required": true}}},
            },
        }))
        .unwrap();
        let record = json!({"name": "X", "age": 1, "tags": ["a", 1], "home": {}, "unknown": [true]});
        let error = definition.validate("people", record.as_object().unwrap()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "Validation failed for bucket \"people\": id: is required; name: must have at least 3 characters; \
             name: must match ^[a-z]; age: must be at least 18; tags[1]: must be a string; home.zip: is required"
        );
        let codes: Vec<_> = error.issues.iter().map(|issue| issue.code).collect();
        assert_eq!(codes, ["required", "minLength", "pattern", "min", "type", "required"]);
    }

    #[test]
    fn wrong_type_is_the_only_issue_of_a_field() {
        let rule = json!({"type": "string", "minLength": 3, "enum": ["abc"]});
        assert_eq!(codes(&rule, json!(1)), ["type"]);
        assert_eq!(codes(&rule, json!("x")), ["enum", "minLength"]);
        assert_eq!(codes(&rule, json!(null)), [""; 0]);
        assert_eq!(codes(&json!({"type": "date"}), json!(true)), ["type"]);
        assert_eq!(codes(&json!({"type": "object"}), json!([])), ["type"]);
        assert_eq!(codes(&json!({"type": "number", "enum": [1]}), json!(1.0)), [""; 0]);
        assert_eq!(codes(&json!({"type": "number", "enum": ["1"]}), json!(1)), ["enum"]);
        // Lengths are in UTF-16 code units.
        assert_eq!(codes(&json!({"type": "string", "maxLength": 2}), json!("🌊")), [""; 0]);
        assert_eq!(codes(&json!({"type": "string", "maxLength": 1}), json!("🌊")), ["maxLength"]);
    }

    #[test]
    fn formats_are_validated() {
        for (format, good, bad) in [
            (
                "email",
                &["a@b.c", "a.b@c.d.e", "ä@b.c", "a@b..c"][..],
                &["", "a", "a@b", "a@.c", "@b.c", "a b@c.d", "a@b@c.d", "a@b."][..],
            ),
            ("url", &["http://tide.example/a?b#c", "mailto:a@b.c", "ws://[::1]:80"], &["", "tide", "/a", "http://"]),
            (
                "iso-date",
                &[
                    "2024-02-29",
                    "2023-12-31T23:59:59.999Z",
                    "2023-01-01T12:00",
                    "2023-01-01T12:00:00+02:00",
                    "2023-01-01T12:00:00-05:30",
                ],
                &[
                    "",
                    "2023-02-29",
                    "2023-13-01",
                    "2023-00-10",
                    "2023-1-1",
                    "2023-01-01T24:00:00Z",
                    "2023-01-01T12",
                    "2023-01-01T01:00:00+02:00",
                    "2023-01-01T23:00:00-02:00",
                    "2023-01-01T12:00:00.Z",
                    "2023-01-01T12:00:00+2",
                    "2023-01-01 12:00",
                    "2023-01-01Tä",
                ],
            ),
        ] {
            let rule = json!({"type": "string", "format": format});
            for text in good {
                assert_eq!(codes(&rule, json!(text)), [""; 0], "{format} {text}");
            }
            for text in bad {
                assert_eq!(codes(&rule, json!(text)), ["format"], "{format} {text}");
            }
        }
    }
}
