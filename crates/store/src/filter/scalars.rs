//! The operands of `$in` and `$nin`, prepared for lookups.

use super::Scalar;
use crate::Value;
use crate::query::IndexKey;

/// A list of values, with sorted keys for lookups.
#[derive(Debug, Clone, PartialEq)]
pub struct Scalars {
    /// The values in their original order.
    list: Vec<Scalar>,
    /// The sorted keys of the values, without duplicates, arrays and objects. A long list is searched by key.
    keys: Vec<IndexKey>,
}

impl Scalars {
    /// Maximum length of a list that is searched linearly, which is faster than creating a key.
    const MAX_LINEAR_SEARCH: usize = 8;

    /// Creates a list.
    pub fn new(list: Vec<Scalar>) -> Self {
        let mut keys: Vec<IndexKey> =
            list.iter().filter_map(Scalar::value).map(|value| IndexKey::of(Some(&value))).collect();
        keys.sort_unstable();
        keys.dedup();
        Self { list, keys }
    }

    /// Returns the values in their original order.
    pub fn list(&self) -> &[Scalar] {
        &self.list
    }

    /// Returns the sorted keys of the values, without duplicates, arrays and objects.
    pub fn keys(&self) -> &[IndexKey] {
        &self.keys
    }

    /// Returns whether the list has an equal value. An absent value equals none.
    pub fn contains(&self, value: Option<&Value<'_>>) -> bool {
        if self.list.len() <= Self::MAX_LINEAR_SEARCH {
            return self.list.iter().any(|scalar| scalar.equals(value));
        }
        match value {
            // Index keys do not distinguish these from null or from each other.
            None | Some(Value::Array(_) | Value::Object(_)) => false,
            Some(value) => self.keys.binary_search(&IndexKey::of(Some(value))).is_ok(),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value as Json, json};

    use super::*;

    #[test]
    fn long_and_short_lists_find_the_same_values() {
        let all = [
            json!(null),
            json!(true),
            json!(0),
            json!(-0.0),
            json!(2.5),
            json!("2.5"),
            json!(""),
            json!("a\0"),
            json!([]),
            json!({}),
            json!(7),
            json!(7.0),
            json!("b"),
        ];
        let list = |values: &[Json]| Scalars::new(values.iter().map(|value| Scalar::new(value.clone())).collect());
        let (few, many) = (list(&all[..Scalars::MAX_LINEAR_SEARCH]), list(&all));
        let texts =
            ["null", "true", "false", "0", "-0", "2.5", "\"2.5\"", "\"\"", "\"a\"", "[]", "{}", "7", "\"b\"", "8"];
        for text in texts {
            let value = Value::of_text(text);
            let one_by_one = |values: &[Json]| values.iter().any(|one| Scalar::new(one.clone()).equals(Some(&value)));
            assert_eq!(few.contains(Some(&value)), one_by_one(&all[..Scalars::MAX_LINEAR_SEARCH]), "{text}");
            assert_eq!(many.contains(Some(&value)), one_by_one(&all), "{text}");
        }
        assert!(!few.contains(None) && !many.contains(None));
        assert_eq!(many.keys().len(), 9);
    }
}
