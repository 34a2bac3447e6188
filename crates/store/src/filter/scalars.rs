//! Lists of values, prepared for many lookups.

use super::Scalar;
use crate::Value;
use crate::query::IndexKey;

/// Values, one of which a field may equal.
#[derive(Debug, Clone, PartialEq)]
pub struct Scalars {
    /// As they were given.
    list: Vec<Scalar>,
    /// Those that something can equal, sorted, each once: a long list is searched by them.
    keys: Vec<IndexKey>,
}

impl Scalars {
    /// Up to this many are compared one by one, which is sooner done than making a key.
    const MAX_LINEAR_SEARCH: usize = 8;

    /// These values.
    pub fn new(list: Vec<Scalar>) -> Self {
        let mut keys: Vec<IndexKey> =
            list.iter().filter_map(Scalar::value).map(|value| IndexKey::of(Some(&value))).collect();
        keys.sort_unstable();
        keys.dedup();
        Self { list, keys }
    }

    /// As they were given.
    pub fn list(&self) -> &[Scalar] {
        &self.list
    }

    /// The keys of those that something can equal, sorted, each once.
    pub fn keys(&self) -> &[IndexKey] {
        &self.keys
    }

    /// Whether a value equals one of them; an absent one does not.
    pub fn contains(&self, value: Option<&Value<'_>>) -> bool {
        if self.list.len() <= Self::MAX_LINEAR_SEARCH {
            return self.list.iter().any(|scalar| scalar.equals(value));
        }
        match value {
            // To an index these are null, or all alike.
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
    fn a_long_list_has_what_its_parts_have() {
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
