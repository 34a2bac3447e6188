//! The parser of filters.

use serde_json::Value as Json;

use super::parameters::ParameterSource;
use super::{Comparison, Filter, FilterError, Scalar, Scalars, Test};
use crate::Field;

/// A parser of filters. It checks templates and parses filters with values, so that both accept the same filters.
pub(super) struct Parser<'a> {
    source: ParameterSource<'a>,
    /// The number of further conditions and operands that are allowed.
    remaining: usize,
}

impl<'a> Parser<'a> {
    pub(super) fn new(source: ParameterSource<'a>) -> Self {
        Self { source, remaining: Filter::MAX_CONDITIONS }
    }

    /// Counts a condition or operand. Fails if the filter has too many.
    fn count_condition(&mut self) -> Result<(), FilterError> {
        self.remaining = self.remaining.checked_sub(1).ok_or(FilterError::TooLarge { max: Filter::MAX_CONDITIONS })?;
        Ok(())
    }

    pub(super) fn filter(&mut self, json: &Json, at: &str, depth: usize) -> Result<Filter, FilterError> {
        if depth > Filter::MAX_DEPTH {
            return Err(FilterError::TooDeep { max: Filter::MAX_DEPTH });
        }
        let members = json.as_object().ok_or_else(|| FilterError::NotAnObject { at: at.to_owned() })?;
        let mut all = Vec::new();
        for (name, value) in members {
            match name.as_str() {
                "$or" => all.push(Filter::Any(self.filters("$or", value, at, depth)?)),
                "$and" => all.push(Filter::All(self.filters("$and", value, at, depth)?)),
                _ if name.starts_with('$') => {
                    return Err(FilterError::UnknownOperator { operator: name.clone(), at: at.to_owned() });
                }
                _ => self.field(name, value, &mut all)?,
            }
        }
        Ok(match <[Filter; 1]>::try_from(all) {
            Ok([only]) => only,
            Err(all) => Filter::All(all),
        })
    }

    fn filters(
        &mut self,
        operator: &'static str,
        json: &Json,
        at: &str,
        depth: usize,
    ) -> Result<Vec<Filter>, FilterError> {
        let invalid = || FilterError::Operand { operator, at: at.to_owned(), expected: "a list of filters" };
        let list = json.as_array().ok_or_else(invalid)?;
        let mut filters = Vec::with_capacity(list.len().min(16));
        for (index, filter) in list.iter().enumerate() {
            self.count_condition()?;
            filters.push(self.filter(filter, &format!("{operator}[{index}]"), depth + 1)?);
        }
        Ok(filters)
    }

    fn field(&mut self, name: &str, json: &Json, all: &mut Vec<Filter>) -> Result<(), FilterError> {
        let operators = json
            .as_object()
            .filter(|members| !members.is_empty() && members.keys().all(|operator| operator.starts_with('$')));
        let Some(operators) = operators else {
            self.count_condition()?;
            all.push(Filter::Test(Field::new(name), Test::Equal(self.scalar(json)?)));
            return Ok(());
        };
        for (operator, operand) in operators {
            self.count_condition()?;
            all.push(Filter::Test(Field::new(name), self.test(name, operator, operand)?));
        }
        Ok(())
    }

    fn test(&mut self, field: &str, operator: &str, operand: &Json) -> Result<Test, FilterError> {
        let order = |comparison, scalar| Ok(Test::Order(comparison, scalar));
        match operator {
            "$eq" => Ok(Test::Equal(self.scalar(operand)?)),
            "$neq" => Ok(Test::NotEqual(self.scalar(operand)?)),
            "$gt" => order(Comparison::Greater, self.scalar(operand)?),
            "$gte" => order(Comparison::GreaterOrEqual, self.scalar(operand)?),
            "$lt" => order(Comparison::Less, self.scalar(operand)?),
            "$lte" => order(Comparison::LessOrEqual, self.scalar(operand)?),
            "$in" => Ok(Test::In(Scalars::new(self.scalars("$in", field, operand)?))),
            "$nin" => Ok(Test::NotIn(Scalars::new(self.scalars("$nin", field, operand)?))),
            "$contains" => Ok(Test::Contains(self.text("$contains", field, operand)?.to_lowercase())),
            "$startsWith" => Ok(Test::StartsWith(self.text("$startsWith", field, operand)?)),
            "$endsWith" => Ok(Test::EndsWith(self.text("$endsWith", field, operand)?)),
            "$exists" => match self.operand(operand, || Json::Bool(true))? {
                Json::Bool(wanted) => Ok(Test::Exists(wanted)),
                _ => Err(invalid_operand("$exists", field, "true or false")),
            },
            "$between" => match <[Scalar; 2]>::try_from(self.scalars("$between", field, operand)?) {
                Ok([low, high]) => Ok(Test::Between(low, high)),
                Err(_) => Err(invalid_operand("$between", field, "a list of two values")),
            },
            _ => Err(FilterError::UnknownOperator { operator: operator.to_owned(), at: field.to_owned() }),
        }
    }

    fn text(&self, operator: &'static str, field: &str, operand: &Json) -> Result<String, FilterError> {
        match self.operand(operand, || Json::String(String::new()))? {
            Json::String(text) => Ok(text),
            _ => Err(invalid_operand(operator, field, "a string")),
        }
    }

    fn scalars(&mut self, operator: &'static str, field: &str, operand: &Json) -> Result<Vec<Scalar>, FilterError> {
        // If the list itself is a parameter, its elements are plain values.
        let (list, is_parameter) = match operand {
            Json::Array(list) => (list.clone(), false),
            _ => match self.operand(operand, || Json::Array(vec![Json::Null; 2]))? {
                Json::Array(list) => (list, true),
                _ => return Err(invalid_operand(operator, field, "a list of values")),
            },
        };
        list.into_iter()
            .map(|value| {
                self.count_condition()?;
                if is_parameter { Ok(Scalar::new(value)) } else { self.scalar(&value) }
            })
            .collect()
    }

    fn scalar(&self, json: &Json) -> Result<Scalar, FilterError> {
        self.operand(json, || Json::Null).map(Scalar::new)
    }

    /// Returns a literal value, the value of a parameter, or the placeholder for a deferred parameter.
    fn operand(&self, json: &Json, placeholder: impl FnOnce() -> Json) -> Result<Json, FilterError> {
        match json.as_str().and_then(|text| self.source.path(text)) {
            None => Ok(json.clone()),
            Some(path) => Ok(self.source.value(path)?.cloned().unwrap_or_else(placeholder)),
        }
    }
}

fn invalid_operand(operator: &'static str, field: &str, expected: &'static str) -> FilterError {
    FilterError::Operand { operator, at: field.to_owned(), expected }
}
