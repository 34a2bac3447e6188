//! The location of a setting: in a file, a flag or an environment variable.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The location of a setting. Error messages start with it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Location {
    /// A position in the configuration file.
    File {
        /// The path as given on the command line or in the environment.
        file: PathBuf,
        /// The one-based line.
        line: usize,
        /// The one-based column, in characters.
        column: usize,
    },
    /// A command-line flag.
    Flag(String),
    /// An environment variable.
    Variable(String),
}

impl Location {
    /// Returns the sort key of error messages: the file from top to bottom, then variables, then flags.
    pub(super) fn rank(&self) -> (u8, usize, usize) {
        match self {
            Self::File { line, column, .. } => (0, *line, *column),
            Self::Variable(_) => (1, 0, 0),
            Self::Flag(_) => (2, 0, 0),
        }
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File { file, line, column } => write!(f, "{}:{line}:{column}", file.display()),
            Self::Flag(name) | Self::Variable(name) => f.write_str(name),
        }
    }
}

/// The origin of a value. Computing line and column scans the file, so it is deferred until an error needs a [`Location`].
#[derive(Clone)]
pub(super) enum Origin {
    Text { source: Arc<SourceFile>, offset: usize },
    Flag(String),
    Variable(String),
}

/// The path and the text of a configuration file.
pub(super) struct SourceFile {
    pub(super) file: PathBuf,
    pub(super) text: String,
}

/// A syntax error at a byte offset of a file.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct SyntaxError {
    pub(super) offset: usize,
    pub(super) message: String,
}

impl Origin {
    pub(super) fn location(&self) -> Location {
        match self {
            Self::Text { source, offset } => location_in(&source.file, &source.text, *offset),
            Self::Flag(name) => Location::Flag(name.clone()),
            Self::Variable(name) => Location::Variable(name.clone()),
        }
    }
}

/// Converts a byte offset to line and column. An offset past the end is treated as the end.
pub(super) fn location_in(file: &Path, text: &str, offset: usize) -> Location {
    let before = &text[..text.floor_char_boundary(offset)];
    let line_start = before.rfind('\n').map_or(0, |end| end + 1);
    Location::File {
        file: file.to_owned(),
        line: before.matches('\n').count() + 1,
        column: before[line_start..].chars().count() + 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_count_characters() {
        let text = "{\n  \"é\": 1\r\n}";
        for (offset, line, column) in [(0, 1, 1), (1, 1, 2), (4, 2, 3), (9, 2, 7), (13, 3, 1), (99, 3, 2)] {
            let expected = Location::File { file: PathBuf::from("f"), line, column };
            assert_eq!(location_in(Path::new("f"), text, offset), expected, "{offset}");
        }
    }
}
