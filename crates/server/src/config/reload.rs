//! Detects changed settings that a reload does not apply.

use std::collections::BTreeMap;
use std::fmt;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use super::tree::{Node, Value};

/// The settings that [`Server::reload`](crate::Server::reload) applies.
const RELOADABLE_KEYS: [&str; 3] = ["auth.tokens", "auth.jwt", "tls"];

/// Hashes of the settings of a file that a reload does not apply, by key. Hashes, because some settings are secret.
#[derive(Clone, Default)]
pub(super) struct FixedSettings(BTreeMap<String, u64>);

impl FixedSettings {
    pub(super) fn from_file(file: &Node) -> Self {
        let mut fixed = Self::default();
        for (key, value) in members(file) {
            if key == "auth" {
                members(value).for_each(|(inner, value)| fixed.add(format!("auth.{inner}"), value));
            } else {
                fixed.add(key.to_owned(), value);
            }
        }
        fixed
    }

    fn add(&mut self, key: String, value: &Node) {
        if !RELOADABLE_KEYS.contains(&&*key) {
            let mut hasher = DefaultHasher::new();
            value.json().to_string().hash(&mut hasher);
            self.0.insert(key, hasher.finish());
        }
    }

    /// Returns the keys whose values differ, in alphabetical order.
    pub(super) fn differences(&self, other: &Self) -> Vec<String> {
        let differs = |key: &&String| self.0.get(*key) != other.0.get(*key);
        let mut keys: Vec<String> = self.0.keys().chain(other.0.keys()).filter(differs).cloned().collect();
        keys.sort();
        keys.dedup();
        keys
    }
}

/// Returns the settings of an object. `null` means the default and is omitted.
fn members(node: &Node) -> impl Iterator<Item = (&str, &Node)> {
    let members = if let Value::Object(members) = &node.value { &members[..] } else { &[] };
    let is_set = |(key, value): &(&str, &Node)| *key != "comment" && !value.is_null();
    members.iter().map(|member| (&*member.key, &member.value)).filter(is_set)
}

/// Hides the hashes.
impl fmt::Debug for FixedSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("..")
    }
}
