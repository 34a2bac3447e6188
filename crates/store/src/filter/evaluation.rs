//! Evaluation of a filter on one row.

use super::Test;
use crate::budget::{CONDITION_WORK, RECORD_WORK};
use crate::query::{Budget, Exceeded};
use crate::{Field, Row, Value};

/// The evaluation of a filter on a row, with the budget and cached conversions.
pub(super) struct Evaluation<'a, 'f> {
    row: &'a Row,
    budget: &'a Budget,
    /// Fields converted to lower case, so that each is converted once.
    lowered: Vec<(&'f Field, Option<String>)>,
    /// Whether the row has been charged to the budget.
    is_charged: bool,
}

impl<'a, 'f> Evaluation<'a, 'f> {
    pub(super) fn new(row: &'a Row, budget: &'a Budget) -> Self {
        Self { row, budget, lowered: Vec::new(), is_charged: false }
    }

    /// Returns whether a field passes a test.
    pub(super) fn passes(&mut self, field: &'f Field, test: &Test) -> Result<bool, Exceeded> {
        if !std::mem::replace(&mut self.is_charged, true) {
            self.budget.charge(RECORD_WORK)?;
        }
        if let Test::Contains(part) = test {
            return self.contains(field, part);
        }
        let text = self.row.text_of(field);
        // The work is a search of the members for the field, and of its text for escapes.
        self.budget.charge(CONDITION_WORK + self.row.member_count() + text.map_or(0, |text| text.len() / 4))?;
        Ok(test.passes(text.map(Value::of_text).as_ref()))
    }

    fn contains(&mut self, field: &'f Field, part: &str) -> Result<bool, Exceeded> {
        self.budget.charge(CONDITION_WORK + self.lowered.len())?;
        let known = self.lowered.iter().position(|(known, _)| *known == field);
        let index = if let Some(index) = known {
            index
        } else {
            let lowered = self.lower(field)?;
            self.lowered.push((field, lowered));
            self.lowered.len() - 1
        };
        let Some(text) = &self.lowered[index].1 else { return Ok(false) };
        // Searches for short strings use vector instructions.
        self.budget.charge(if part.len() <= 32 { text.len() / 16 } else { text.len() })?;
        Ok(text.contains(part))
    }

    /// Returns the value of a field in lower case, if it is a string.
    fn lower(&self, field: &Field) -> Result<Option<String>, Exceeded> {
        let text = self.row.text_of(field);
        self.budget.charge(self.row.member_count() + text.map_or(0, str::len))?;
        match text.map(Value::of_text) {
            Some(Value::String(text)) => Ok(Some(text.to_lowercase())),
            _ => Ok(None),
        }
    }
}
