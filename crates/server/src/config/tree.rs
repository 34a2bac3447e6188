//! The parsed configuration: a tree of JSON values with their origins. JSON, TOML, flags and variables are all parsed into it.

use serde_json::{Map, Number, Value as Json};

use super::location::{Location, Origin};

/// A value and its origin.
#[derive(Clone)]
pub(super) struct Node {
    pub(super) value: Value,
    pub(super) origin: Origin,
}

#[derive(Clone)]
pub(super) enum Value {
    Null,
    Bool(bool),
    Number(Number),
    String(String),
    Array(Vec<Node>),
    /// In the order of the file. Duplicate keys are kept.
    Object(Vec<Member>),
}

#[derive(Clone)]
pub(super) struct Member {
    pub(super) key: String,
    /// The origin of the key, not of the value.
    pub(super) origin: Origin,
    pub(super) value: Node,
}

impl Node {
    pub(super) fn location(&self) -> Location {
        self.origin.location()
    }

    pub(super) fn is_null(&self) -> bool {
        matches!(self.value, Value::Null)
    }

    /// Returns the value as plain JSON, without origins.
    pub(super) fn json(&self) -> Json {
        match &self.value {
            Value::Null => Json::Null,
            Value::Bool(value) => Json::Bool(*value),
            Value::Number(number) => Json::Number(number.clone()),
            Value::String(text) => Json::String(text.clone()),
            Value::Array(items) => items.iter().map(Self::json).collect(),
            Value::Object(members) => Json::Object(
                members.iter().map(|member| (member.key.clone(), member.value.json())).collect::<Map<_, _>>(),
            ),
        }
    }

    /// Describes the value for an error message: scalars by value; long strings, lists and objects by type.
    pub(super) fn describe(&self) -> String {
        const MAX_QUOTED_CHARS: usize = 60;
        match &self.value {
            Value::Number(number) => number.to_string(),
            Value::String(text) if text.chars().count() <= MAX_QUOTED_CHARS => Json::from(text.as_str()).to_string(),
            Value::Bool(value) => value.to_string(),
            _ => self.type_name().to_owned(),
        }
    }

    /// Describes the value by its type only, for values that may be secret.
    pub(super) fn type_name(&self) -> &'static str {
        match &self.value {
            Value::Null => "null",
            Value::Bool(_) => "a boolean",
            Value::Number(_) => "a number",
            Value::String(text) if text.is_empty() => "an empty string",
            Value::String(_) => "a string",
            Value::Array(_) => "a list",
            Value::Object(_) => "an object",
        }
    }
}
