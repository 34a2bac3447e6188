//! Where a setting was given.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Where a setting was given.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Place {
    /// In a file.
    File {
        /// As it was named.
        file: PathBuf,
        /// Counted from one.
        line: usize,
        /// In characters, counted from one.
        column: usize,
    },
    /// By a flag.
    Flag(String),
    /// By a variable of the environment.
    Variable(String),
}

impl Place {
    /// In which order people are told: from the beginning of the file to its end, and then the others.
    pub(super) fn rank(&self) -> (u8, usize, usize) {
        match self {
            Self::File { line, column, .. } => (0, *line, *column),
            Self::Variable(_) => (1, 0, 0),
            Self::Flag(_) => (2, 0, 0),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File { file, line, column } => write!(f, "{}:{line}:{column}", file.display()),
            Self::Flag(name) | Self::Variable(name) => f.write_str(name),
        }
    }
}

/// Where a value comes from. Lines and columns are counted only when somebody is told of it: a file may be one long line.
#[derive(Clone)]
pub(super) enum Origin {
    Text { source: Arc<Source>, offset: usize },
    Flag(String),
    Variable(String),
}

/// The text of a file.
pub(super) struct Source {
    pub(super) file: PathBuf,
    pub(super) text: String,
}

/// What is wrong with a text, and at which byte.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Wrong {
    pub(super) offset: usize,
    pub(super) what: String,
}

impl Origin {
    pub(super) fn place(&self) -> Place {
        match self {
            Self::Text { source, offset } => place_in(&source.file, &source.text, *offset),
            Self::Flag(name) => Place::Flag(name.clone()),
            Self::Variable(name) => Place::Variable(name.clone()),
        }
    }
}

/// The place of a byte, or the end.
pub(super) fn place_in(file: &Path, text: &str, offset: usize) -> Place {
    let before = &text[..text.floor_char_boundary(offset)];
    let line_start = before.rfind('\n').map_or(0, |end| end + 1);
    Place::File {
        file: file.to_owned(),
        line: before.matches('\n').count() + 1,
        column: before[line_start..].chars().count() + 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_characters() {
        let text = "{\n  \"é\": 1\r\n}";
        for (offset, line, column) in [(0, 1, 1), (1, 1, 2), (4, 2, 3), (9, 2, 7), (13, 3, 1), (99, 3, 2)] {
            let expected = Place::File { file: PathBuf::from("f"), line, column };
            assert_eq!(place_in(Path::new("f"), text, offset), expected, "{offset}");
        }
    }
}
