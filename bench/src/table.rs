//! Markdown tables with aligned columns, readable as plain text.

use std::fmt;

pub(crate) struct Table {
    /// The number of leading columns that hold text and are left-aligned. The other columns hold numbers.
    text_columns: usize,
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn new(text_columns: usize, headings: Vec<String>) -> Self {
        Self { text_columns, rows: vec![headings] }
    }

    /// Adds a row, with one cell per heading.
    pub(crate) fn push_row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let widths: Vec<usize> = (0..self.rows[0].len())
            .map(|column| self.rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0))
            .collect();
        for (line, row) in self.rows.iter().enumerate() {
            for (column, (cell, &width)) in row.iter().zip(&widths).enumerate() {
                if column < self.text_columns {
                    write!(f, "| {cell:width$} ")?;
                } else {
                    write!(f, "| {cell:>width$} ")?;
                }
            }
            writeln!(f, "|")?;
            if line == 0 {
                for (column, width) in widths.iter().enumerate() {
                    let dashes = "-".repeat(width + 1);
                    if column < self.text_columns { write!(f, "|:{dashes}") } else { write!(f, "|{dashes}:") }?;
                }
                writeln!(f, "|")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_is_aligned_markdown() {
        let mut table = Table::new(1, vec!["contender".into(), "p99".into()]);
        table.push_row(vec!["ours".into(), "1.23 µs".into()]);
        assert_eq!(
            table.to_string(),
            "| contender |     p99 |\n\
             |:----------|--------:|\n\
             | ours      | 1.23 µs |\n"
        );
    }
}
