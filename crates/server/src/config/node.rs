//! A value and where it was given, whatever the format of the file.

use serde_json::{Map, Number, Value as Json};

use super::place::{Origin, Place};

/// A value and where it was given.
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
    /// In the order of the file.
    Object(Vec<Member>),
}

#[derive(Clone)]
pub(super) struct Member {
    pub(super) key: String,
    /// Of the key.
    pub(super) origin: Origin,
    pub(super) value: Node,
}

impl Node {
    pub(super) fn place(&self) -> Place {
        self.origin.place()
    }

    pub(super) fn is_null(&self) -> bool {
        matches!(self.value, Value::Null)
    }

    /// The same without its places.
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

    /// What it is, for an error.
    pub(super) fn found(&self) -> String {
        /// Longer texts are not worth repeating.
        const MAX: usize = 60;
        match &self.value {
            Value::Number(number) => number.to_string(),
            Value::String(text) if text.chars().count() <= MAX => Json::from(text.as_str()).to_string(),
            Value::Bool(value) => value.to_string(),
            _ => self.kind().to_owned(),
        }
    }

    /// What it is, for an error, if it may be secret.
    pub(super) fn kind(&self) -> &'static str {
        match &self.value {
            Value::Null => "null",
            Value::Bool(_) => "true or false",
            Value::Number(_) => "a number",
            Value::String(text) if text.is_empty() => "an empty string",
            Value::String(_) => "a string",
            Value::Array(_) => "a list",
            Value::Object(_) => "an object",
        }
    }
}
