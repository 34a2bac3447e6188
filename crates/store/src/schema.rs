//! Definitions of buckets: keys, schemas, indexes and time to live, parsed from JSON.

use std::collections::BTreeSet;
use std::fmt;

use regex::Regex;
use serde_json::{Map, Value as Json};

pub use crate::bucket::NotUnique;
pub use crate::check::{Issue, ValidationError};
pub use crate::error::Referrer;

use crate::check;

/// The definition of a bucket.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct BucketDefinition {
    /// The original JSON.
    pub config: Json,
    /// The key field.
    pub key: String,
    /// The fields of the schema and their rules, in their original order.
    pub fields: Vec<(String, FieldRule)>,
    /// The declared indexes, each over one or several fields.
    pub indexes: Vec<Vec<String>>,
    /// Whether records are paged in key order instead of insertion order.
    pub ordered: bool,
    /// Whether records are stored on disk. The definition is always stored.
    pub persistent: bool,
    /// The time to live of records, in milliseconds.
    pub ttl: Option<u64>,
    /// Maximum number of records. Above it, the record with the earliest creation time is evicted.
    pub max_size: Option<usize>,
}

/// The rules of a field.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct FieldRule {
    /// The type.
    pub kind: Kind,
    /// Whether the field must be present and not null.
    pub required: bool,
    /// The value of an absent field.
    pub default: Option<Json>,
    /// The generator of the value of an absent field.
    pub generated: Option<Generated>,
    /// The allowed values.
    pub allowed: Option<Vec<Json>>,
    /// The minimum length of a string, in UTF-16 code units.
    pub min_length: Option<usize>,
    /// The maximum length of a string, in UTF-16 code units.
    pub max_length: Option<usize>,
    /// A regular expression that must match a part of a string.
    pub pattern: Option<Regex>,
    /// The format of a string.
    pub format: Option<Format>,
    /// The minimum of a number.
    pub min: Option<f64>,
    /// The maximum of a number.
    pub max: Option<f64>,
    /// Whether the values of all records must be distinct.
    pub unique: bool,
    /// The reference, if the values are keys of records.
    pub reference: Option<Reference>,
    /// The rules of the members of an object.
    pub properties: Vec<(String, FieldRule)>,
    /// The rule of the elements of an array.
    pub items: Option<Box<FieldRule>>,
}

/// The type of a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Kind {
    /// A string.
    String,
    /// A number.
    Number,
    /// True or false.
    Boolean,
    /// An object.
    Object,
    /// An array.
    Array,
    /// A date: a string or a number.
    Date,
}

impl Kind {
    const ALL: [(&'static str, Self); 6] = [
        ("string", Self::String),
        ("number", Self::Number),
        ("boolean", Self::Boolean),
        ("object", Self::Object),
        ("array", Self::Array),
        ("date", Self::Date),
    ];
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(name_of(&Self::ALL, *self))
    }
}

/// A generator of values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Generated {
    /// A random UUID.
    Uuid,
    /// The letter `c`, followed by 32 random hexadecimal digits.
    Cuid,
    /// The next number of the bucket, starting at one.
    Autoincrement,
    /// The time, in milliseconds.
    Timestamp,
}

impl Generated {
    const ALL: [(&'static str, Self); 4] = [
        ("uuid", Self::Uuid),
        ("cuid", Self::Cuid),
        ("autoincrement", Self::Autoincrement),
        ("timestamp", Self::Timestamp),
    ];
}

/// A format of strings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Format {
    /// An email address: text with an `@`, and a dot in the part after it.
    Email,
    /// A URL as defined by the WHATWG.
    Url,
    /// An ISO 8601 date, or date and time.
    IsoDate,
}

impl Format {
    const ALL: [(&'static str, Self); 3] = [("email", Self::Email), ("url", Self::Url), ("iso-date", Self::IsoDate)];
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(name_of(&Self::ALL, *self))
    }
}

/// A reference to a record of this or another bucket, by its key.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Reference {
    /// The referenced bucket.
    pub bucket: String,
    /// The action when the referenced record is deleted.
    pub on_delete: OnDelete,
}

/// The action when a referenced record is deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnDelete {
    /// The deletion is rejected.
    Restrict,
    /// The referring records are deleted too.
    Cascade,
    /// The referring fields are set to null.
    SetNull,
}

impl OnDelete {
    const ALL: [(&'static str, Self); 3] =
        [("restrict", Self::Restrict), ("cascade", Self::Cascade), ("set_null", Self::SetNull)];
}

fn name_of<T: PartialEq + Copy>(all: &[(&'static str, T)], value: T) -> &'static str {
    all.iter().find(|(_, other)| *other == value).map_or("", |(name, _)| name)
}

/// An error in the definition of a bucket.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DefinitionError {
    /// An option is missing or has an invalid value.
    #[error("{at} must be {expected}")]
    Expected {
        /// The path of the option.
        at: String,
        /// The expected value.
        expected: String,
    },
    /// The option does not exist.
    #[error("unknown option {option} in {at}")]
    UnknownOption {
        /// The path of the object that has the option.
        at: String,
        /// The name of the option.
        option: String,
    },
    /// A key or index names a field that is not in the schema.
    #[error("unknown field {field} in {at}: the schema does not define it")]
    UnknownField {
        /// The option: `key` or `indexes`.
        at: String,
        /// The name of the field.
        field: String,
    },
    /// A pattern is not a regular expression that can be matched in linear time.
    #[error("invalid pattern of {at}: {problem}")]
    Pattern {
        /// The path of the field.
        at: String,
        /// The error of the regular expression.
        problem: String,
    },
    /// The default of a field fails the validation of the field.
    #[error("invalid default of {at}: {problem}")]
    Default {
        /// The path of the field.
        at: String,
        /// The failed rule.
        problem: String,
    },
    /// The schema is nested too deeply.
    #[error("{at} is nested more than {max} levels deep")]
    TooDeep {
        /// The path of the field.
        at: String,
        /// The limit.
        max: usize,
    },
}

impl BucketDefinition {
    /// Limit of the nesting depth of a schema.
    pub const MAX_DEPTH: usize = 10;

    /// Parses a definition.
    pub fn parse(json: &Json) -> Result<Self, DefinitionError> {
        const OPTIONS: [&str; 7] = ["key", "schema", "indexes", "etsType", "persistent", "ttl", "maxSize"];
        let at = "the definition";
        let members = object(json, at)?;
        check_options(members, &OPTIONS, at)?;
        let key = text(members, "key", at)?.ok_or_else(|| expected("key", "the name of a field"))?;
        let schema = members.get("schema").ok_or_else(|| expected("schema", "an object of fields"))?;
        let fields = rules(object(schema, "schema")?, "", 1)?;
        let is_field = |name: &str| fields.iter().any(|(field, _)| field == name);
        if !is_field(&key) {
            return Err(DefinitionError::UnknownField { at: "key".to_owned(), field: key });
        }
        if fields.iter().any(|(name, rule)| *name == key && matches!(rule.kind, Kind::Object | Kind::Array)) {
            return Err(expected("key", "a field that is not an object or array"));
        }
        let indexes = indexes(members.get("indexes"))?;
        if let Some(field) = indexes.iter().flatten().find(|field| !is_field(field)) {
            return Err(DefinitionError::UnknownField { at: "indexes".to_owned(), field: field.clone() });
        }
        let ets_type = text(members, "etsType", at)?;
        let max_size = integer(members, "maxSize", at)?;
        if max_size == Some(0) {
            return Err(expected("maxSize", "at least 1"));
        }
        Ok(Self {
            config: json.clone(),
            key,
            fields,
            indexes,
            ordered: ets_type.as_deref() == Some("ordered_set"),
            persistent: flag(members, "persistent", at)?.unwrap_or(true),
            ttl: present(members, "ttl").map(duration).transpose()?,
            max_size,
        })
    }

    /// Returns the definition with added fields and indexes, or another time to live. `updates` is an object with the optional members
    /// `addFields`, `addIndexes` and `ttl`. A `ttl` of null removes the time to live.
    pub fn updated(&self, updates: &Json) -> Result<Self, DefinitionError> {
        let at = "the update";
        let updates = object(updates, at)?;
        check_options(updates, &["addFields", "addIndexes", "ttl"], at)?;
        let mut config = object(&self.config, at)?.clone();
        if let Some(added) = present(updates, "addFields") {
            let added = object(added, "addFields")?;
            if let Some(field) = added.keys().find(|field| self.rule(field).is_some()) {
                return Err(expected(&format!("addFields.{field}"), "a field that the bucket does not have yet"));
            }
            if let Some(Json::Object(schema)) = config.get_mut("schema") {
                schema.extend(added.clone());
            }
        }
        if let Some(added) = present(updates, "addIndexes") {
            let wrong = || expected("addIndexes", "a list of field names, or of lists of field names");
            let added = added.as_array().ok_or_else(wrong)?;
            match config.get_mut("indexes") {
                Some(Json::Array(indexes)) => indexes.extend(added.iter().cloned()),
                _ => drop(config.insert("indexes".to_owned(), Json::Array(added.clone()))),
            }
        }
        match updates.get("ttl") {
            None => {}
            Some(Json::Null) => drop(config.shift_remove("ttl")),
            Some(ttl) => drop(config.insert("ttl".to_owned(), ttl.clone())),
        }
        Self::parse(&Json::Object(config))
    }

    /// Returns the rules of a field.
    pub fn rule(&self, field: &str) -> Option<&FieldRule> {
        self.fields.iter().find(|(name, _)| name == field).map(|(_, rule)| rule)
    }

    /// Returns the number of indexes: the declared ones, and one for each unique field without a declared index.
    pub(crate) fn index_count(&self) -> usize {
        let listed: BTreeSet<&[String]> = self.indexes.iter().map(Vec::as_slice).collect();
        let unique = self.fields.iter().filter(|(_, rule)| rule.unique);
        listed.len() + unique.filter(|(name, _)| !listed.contains(std::slice::from_ref(name))).count()
    }
}

fn expected(at: &str, expected: &str) -> DefinitionError {
    DefinitionError::Expected { at: at.to_owned(), expected: expected.to_owned() }
}

fn object<'a>(json: &'a Json, at: &str) -> Result<&'a Map<String, Json>, DefinitionError> {
    json.as_object().ok_or_else(|| expected(at, "an object"))
}

fn check_options(members: &Map<String, Json>, options: &[&str], at: &str) -> Result<(), DefinitionError> {
    match members.keys().find(|option| !options.contains(&option.as_str())) {
        None => Ok(()),
        Some(option) => Err(DefinitionError::UnknownOption { at: at.to_owned(), option: option.clone() }),
    }
}

/// Returns an option. Null is the same as absent.
fn present<'a>(members: &'a Map<String, Json>, option: &str) -> Option<&'a Json> {
    members.get(option).filter(|value| !value.is_null())
}

fn option<T>(
    members: &Map<String, Json>,
    option: &str,
    at: &str,
    expected_value: &str,
    read: impl Fn(&Json) -> Option<T>,
) -> Result<Option<T>, DefinitionError> {
    let Some(json) = present(members, option) else { return Ok(None) };
    read(json).map(Some).ok_or_else(|| expected(&format!("{option} of {at}"), expected_value))
}

fn text(members: &Map<String, Json>, name: &str, at: &str) -> Result<Option<String>, DefinitionError> {
    option(members, name, at, "a string", |json| json.as_str().map(str::to_owned))
}

fn flag(members: &Map<String, Json>, name: &str, at: &str) -> Result<Option<bool>, DefinitionError> {
    option(members, name, at, "true or false", Json::as_bool)
}

fn number(members: &Map<String, Json>, name: &str, at: &str) -> Result<Option<f64>, DefinitionError> {
    option(members, name, at, "a number", Json::as_f64)
}

fn integer(members: &Map<String, Json>, name: &str, at: &str) -> Result<Option<usize>, DefinitionError> {
    option(members, name, at, "a non-negative integer", |json| usize::try_from(json.as_u64()?).ok())
}

fn one_of<T: Copy>(
    members: &Map<String, Json>,
    name: &str,
    at: &str,
    all: &[(&'static str, T)],
) -> Result<Option<T>, DefinitionError> {
    let names: Vec<&str> = all.iter().map(|(name, _)| *name).collect();
    option(members, name, at, &format!("one of {}", names.join(", ")), |json| {
        let given = json.as_str()?;
        all.iter().find(|(name, _)| *name == given).map(|(_, value)| *value)
    })
}

fn indexes(json: Option<&Json>) -> Result<Vec<Vec<String>>, DefinitionError> {
    let Some(json) = json.filter(|json| !json.is_null()) else { return Ok(Vec::new()) };
    let wrong = || expected("indexes", "a list of field names, or of lists of field names");
    let name = |json: &Json| json.as_str().map(str::to_owned);
    let mut indexes: Vec<Vec<String>> = Vec::new();
    for index in json.as_array().ok_or_else(wrong)? {
        let fields = match index {
            Json::String(field) => Some(vec![field.clone()]),
            Json::Array(fields) if !fields.is_empty() => fields.iter().map(name).collect(),
            _ => None,
        };
        let fields = fields.ok_or_else(wrong)?;
        if !indexes.contains(&fields) {
            indexes.push(fields);
        }
    }
    Ok(indexes)
}

/// Parses a duration: milliseconds, or a number with a unit.
fn duration(json: &Json) -> Result<u64, DefinitionError> {
    let wrong =
        || expected("ttl", "a positive number of milliseconds, or a string such as \"30s\", \"5m\", \"1h\" or \"7d\"");
    let milliseconds = match json {
        Json::Number(number) => number.as_f64(),
        Json::String(text) => {
            let unit = text.chars().next_back().ok_or_else(wrong)?;
            let factor = match unit {
                's' => 1_000.0,
                'm' => 60_000.0,
                'h' => 3_600_000.0,
                'd' => 86_400_000.0,
                _ => return Err(wrong()),
            };
            text.strip_suffix(unit).and_then(|number| number.parse::<f64>().ok()).map(|number| number * factor)
        }
        _ => None,
    };
    // The limit of ten thousand years avoids overflows of timestamps.
    let milliseconds = milliseconds.filter(|span| *span >= 1.0 && *span < 3.2e14).ok_or_else(wrong)?;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the range is checked above")]
    let whole = milliseconds as u64;
    Ok(whole)
}

fn rules(schema: &Map<String, Json>, prefix: &str, depth: usize) -> Result<Vec<(String, FieldRule)>, DefinitionError> {
    let rules = schema.iter().map(|(name, json)| {
        let at = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
        Ok((name.clone(), FieldRule::parse(json, &at, depth)?))
    });
    rules.collect()
}

/// Compiles a regular expression, with a limit on its memory.
fn compile(pattern: &str) -> Result<Regex, regex::Error> {
    regex::RegexBuilder::new(pattern).size_limit(1 << 20).dfa_size_limit(1 << 20).build()
}

impl FieldRule {
    fn parse(json: &Json, at: &str, depth: usize) -> Result<Self, DefinitionError> {
        const OPTIONS: [&str; 16] = [
            "type",
            "required",
            "default",
            "generated",
            "enum",
            "minLength",
            "maxLength",
            "pattern",
            "format",
            "min",
            "max",
            "unique",
            "ref",
            "onDelete",
            "properties",
            "items",
        ];
        if depth > BucketDefinition::MAX_DEPTH {
            return Err(DefinitionError::TooDeep { at: at.to_owned(), max: BucketDefinition::MAX_DEPTH });
        }
        let members = object(json, at)?;
        check_options(members, &OPTIONS, at)?;
        let kind = one_of(members, "type", at, &Kind::ALL)?;
        let pattern = text(members, "pattern", at)?.map(|pattern| compile(&pattern)).transpose();
        let on_delete = one_of(members, "onDelete", at, &OnDelete::ALL)?;
        let rule = Self {
            kind: kind
                .ok_or_else(|| expected(&format!("type of {at}"), "string, number, boolean, object, array or date"))?,
            required: flag(members, "required", at)?.unwrap_or(false),
            default: members.get("default").cloned(),
            generated: one_of(members, "generated", at, &Generated::ALL)?,
            allowed: option(members, "enum", at, "a list of values", |json| json.as_array().cloned())?,
            min_length: integer(members, "minLength", at)?,
            max_length: integer(members, "maxLength", at)?,
            pattern: pattern
                .map_err(|error| DefinitionError::Pattern { at: at.to_owned(), problem: error.to_string() })?,
            format: one_of(members, "format", at, &Format::ALL)?,
            min: number(members, "min", at)?,
            max: number(members, "max", at)?,
            unique: flag(members, "unique", at)?.unwrap_or(false),
            reference: text(members, "ref", at)?
                .map(|bucket| Reference { bucket, on_delete: on_delete.unwrap_or(OnDelete::Restrict) }),
            properties: match present(members, "properties") {
                Some(properties) => rules(object(properties, &format!("properties of {at}"))?, at, depth + 1)?,
                None => Vec::new(),
            },
            items: match present(members, "items") {
                Some(items) => Some(Box::new(Self::parse(items, &format!("{at}[]"), depth + 1)?)),
                None => None,
            },
        };
        let mut issues = Vec::new();
        if let Some(default) = &rule.default {
            check::validate_field(&rule, Some(default), at, &mut issues);
        }
        match issues.first() {
            None => Ok(rule),
            Some(issue) => Err(DefinitionError::Default { at: at.to_owned(), problem: issue.message.clone() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse(json: &Json) -> Result<BucketDefinition, DefinitionError> {
        BucketDefinition::parse(json)
    }

    #[test]
    fn all_options_are_parsed() {
        let definition = parse(&json!({
            "key": "id",
            "schema": {
                "id": {"type": "string", "generated": "uuid"},
                "email": {"type": "string", "unique": true, "format": "email"},
                "age": {"type": "number", "min": 0, "max": 150, "default": 0},
                "role": {"type": "string", "enum": ["admin", "user"]},
                "team": {"type": "string", "ref": "teams", "onDelete": "set_null"},
                "address": {"type": "object", "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}}},
                "tags": {"type": "array", "items": {"type": "string", "maxLength": 10}},
            },
            "indexes": ["role", ["role", "age"], "role"],
            "etsType": "ordered_set",
            "ttl": "1.5h",
            "maxSize": 100,
        }))
        .unwrap();
        assert_eq!(definition.indexes, [vec!["role"], vec!["role", "age"]]);
        assert_eq!(definition.index_count(), 3);
        assert_eq!((definition.ordered, definition.persistent), (true, true));
        assert_eq!((definition.ttl, definition.max_size), (Some(5_400_000), Some(100)));
        assert_eq!(definition.rule("team").unwrap().reference.as_ref().unwrap().on_delete, OnDelete::SetNull);
        assert!(definition.rule("nothing").is_none());
    }

    #[test]
    fn invalid_definition_is_rejected_with_a_specific_error() {
        let field = |rule: Json| json!({"key": "id", "schema": {"id": rule}});
        let with = |name: &str, value: Json| {
            let mut definition = field(json!({"type": "string"}));
            definition[name] = value;
            definition
        };
        let mut deep = json!({"type": "string"});
        for _ in 0..10 {
            deep = json!({"type": "array", "items": deep});
        }
        for (definition, error) in [
            (json!(1), "the definition must be an object"),
            (json!({"schema": {}}), "key must be the name of a field"),
            (json!({"key": "id"}), "schema must be an object of fields"),
            (json!({"key": "id", "schema": {}}), "unknown field id in key: the schema does not define it"),
            (with("indexes", json!(["x"])), "unknown field x in indexes: the schema does not define it"),
            (with("indexes", json!([[]])), "indexes must be a list of field names, or of lists of field names"),
            (with("colour", json!(1)), "unknown option colour in the definition"),
            (with("maxSize", json!(0)), "maxSize must be at least 1"),
            (with("maxSize", json!(1.5)), "maxSize of the definition must be a non-negative integer"),
            (field(json!({})), "type of id must be string, number, boolean, object, array or date"),
            (field(json!({"type": "text"})), "type of id must be one of string, number, boolean, object, array, date"),
            (field(json!({"type": "string", "requird": true})), "unknown option requird in id"),
            (field(json!({"type": "number", "default": "x"})), "invalid default of id: must be a number"),
            (field(deep), "id[][][][][][][][][][] is nested more than 10 levels deep"),
        ] {
            assert_eq!(parse(&definition).unwrap_err().to_string(), error, "{definition}");
        }
        for ttl in [json!(0), json!("5"), json!("x5s"), json!(""), json!("1e300d"), json!(-1), json!([])] {
            assert!(parse(&with("ttl", ttl.clone())).unwrap_err().to_string().starts_with("ttl must be"), "{ttl}");
        }
        // Look-around is not supported, because matching must take linear time.
        let refused = parse(&field(json!({"type": "string", "pattern": "(?=x)"}))).unwrap_err();
        assert!(matches!(refused, DefinitionError::Pattern { .. }), "{refused}");
    }
}
