//! Conversion of filters to JSON, the inverse of parsing.

use serde_json::{Map, Value as Json, json};

use super::{Comparison, Filter, Operand, Scalar, Scalars, Test};

impl Filter {
    /// Returns JSON that describes the filter, with the values of its parameters.
    ///
    /// ```
    /// use serde_json::json;
    /// use tidewire_store::Filter;
    /// use tidewire_store::query::Parameters;
    ///
    /// let params = json!({"who": "mara"});
    /// let filter = json!({"owner": "{{ params.who }}", "tons": {"$gt": 5}});
    /// let filter = Filter::parse_with(&filter, &Parameters::from(params.as_object().unwrap()))?;
    /// assert_eq!(filter.to_json(), json!({"owner": "mara", "tons": {"$gt": 5}}));
    /// # Ok::<(), tidewire_store::query::FilterError>(())
    /// ```
    pub fn to_json(&self) -> Json {
        Json::Object(self.to_members())
    }

    fn to_members(&self) -> Map<String, Json> {
        match self {
            Self::All(filters) => {
                let mut merged = Map::new();
                for members in filters.iter().map(Self::to_members) {
                    if members.keys().any(|name| merged.contains_key(name)) {
                        // Two conditions on one field cannot be members of one object.
                        return Map::from_iter([("$and".to_owned(), filters.iter().map(Self::to_json).collect())]);
                    }
                    merged.extend(members);
                }
                merged
            }
            Self::Any(filters) => Map::from_iter([("$or".to_owned(), filters.iter().map(Self::to_json).collect())]),
            Self::Test(field, test) => Map::from_iter([(field.name().to_owned(), test.to_json())]),
        }
    }
}

impl Test {
    fn to_json(&self) -> Json {
        let (operator, operand) = match self {
            // An object could be mistaken for an operator.
            Self::Equal(Scalar(Operand::Other(json))) => ("$eq", (**json).clone()),
            Self::Equal(scalar) => return scalar.to_json(),
            Self::NotEqual(scalar) => ("$neq", scalar.to_json()),
            Self::Order(Comparison::Greater, scalar) => ("$gt", scalar.to_json()),
            Self::Order(Comparison::GreaterOrEqual, scalar) => ("$gte", scalar.to_json()),
            Self::Order(Comparison::Less, scalar) => ("$lt", scalar.to_json()),
            Self::Order(Comparison::LessOrEqual, scalar) => ("$lte", scalar.to_json()),
            Self::In(scalars) => ("$in", scalars.to_json()),
            Self::NotIn(scalars) => ("$nin", scalars.to_json()),
            Self::Contains(part) => ("$contains", json!(part)),
            Self::StartsWith(part) => ("$startsWith", json!(part)),
            Self::EndsWith(part) => ("$endsWith", json!(part)),
            Self::Exists(wanted) => ("$exists", json!(wanted)),
            Self::Between(low, high) => ("$between", json!([low.to_json(), high.to_json()])),
        };
        json!({operator: operand})
    }
}

impl Scalars {
    fn to_json(&self) -> Json {
        self.list().iter().map(Scalar::to_json).collect()
    }
}

impl Scalar {
    fn to_json(&self) -> Json {
        match &self.0 {
            Operand::Null => Json::Null,
            Operand::Bool(flag) => json!(flag),
            Operand::Number(number) => Json::Number(number.clone()),
            Operand::String(text) => json!(text),
            Operand::Other(json) => (**json).clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Query;

    #[test]
    fn filter_survives_a_round_trip() {
        for json in [
            json!({}),
            json!({"a": 1, "b": null, "c": "{{ x }}"}),
            json!({"a": {"$gt": 1, "$lte": 2.5}}),
            json!({"a": {"$eq": {"$gt": 1}}, "b": {"$neq": [1]}}),
            json!({"a": {"$in": [1, "x", null]}, "b": {"$nin": []}}),
            json!({"a": {"$contains": "X"}, "b": {"$startsWith": "y"}, "c": {"$endsWith": "z"}}),
            json!({"a": {"$exists": false}, "b": {"$between": [1, 2]}, "c": {"$gte": "m"}, "d": {"$lt": true}}),
            json!({"$or": [{"a": 1}, {"$and": [{"b": 2}, {"$or": []}, {"a": 1, "b": 3}]}], "c": 1}),
            json!({"$and": [{"$or": [{"a": 1}]}, {"$or": [{"b": 1}]}]}),
        ] {
            let parse = |json: &Json| Filter::parse(json).unwrap();
            let canonical = |filter: Filter| Query { filter, ..Query::new("b") }.canonical();
            let filter = parse(&json);
            assert_eq!(canonical(parse(&filter.to_json())), canonical(filter.clone()), "{json} {}", filter.to_json());
        }
    }
}
