//! Limits on the input of a decoder.

/// The largest value of `max_depth`: nested values are dropped recursively, on the stack.
const MAX_DEPTH: usize = 512;

/// The settings of a [`Decoder`](super::Decoder).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct DecoderOptions {
    /// The longest string in bytes, in chunks or not. Default: 512 MiB, the default limit of Redis.
    pub max_bulk: usize,
    /// The number of elements of one reply, including nested ones. A pair of a map counts twice, and an attribute adds one. Default:
    /// 1 048 576, which is about 40 MiB without the strings. Use `SCAN`, `HSCAN`, `SSCAN` or `ZSCAN` to read more.
    pub max_elements: usize,
    /// The levels of nested aggregates, at most 512. Default: 64, more than any reply of Redis or of a typical script has.
    pub max_depth: usize,
    /// The longest line in bytes: a simple string, an error, a number. Default: 64 KiB, the limit of Redis.
    pub max_line: usize,
    /// Whether values keep their attributes, as [`Value::Attributed`](crate::Value::Attributed). Default: false, because attributes
    /// are hints, and most code expects the bare value.
    pub keep_attributes: bool,
}

impl Default for DecoderOptions {
    fn default() -> Self {
        Self { max_bulk: 512 << 20, max_elements: 1 << 20, max_depth: 64, max_line: 64 << 10, keep_attributes: false }
    }
}

impl DecoderOptions {
    /// Sets [`max_bulk`](#structfield.max_bulk).
    #[must_use]
    pub fn max_bulk(mut self, max_bulk: usize) -> Self {
        self.max_bulk = max_bulk;
        self
    }

    /// Sets [`max_elements`](#structfield.max_elements).
    #[must_use]
    pub fn max_elements(mut self, max_elements: usize) -> Self {
        self.max_elements = max_elements;
        self
    }

    /// Sets [`max_depth`](#structfield.max_depth).
    #[must_use]
    pub fn max_depth(mut self, max_depth: usize) -> Self {
        self.max_depth = max_depth;
        self
    }

    /// Sets [`max_line`](#structfield.max_line).
    #[must_use]
    pub fn max_line(mut self, max_line: usize) -> Self {
        self.max_line = max_line;
        self
    }

    /// Sets [`keep_attributes`](#structfield.keep_attributes).
    #[must_use]
    pub fn keep_attributes(mut self, keep_attributes: bool) -> Self {
        self.keep_attributes = keep_attributes;
        self
    }

    /// Lowers the limits so that no sum of lengths overflows, and no drop overflows the stack.
    pub(super) fn clamped(self) -> Self {
        Self {
            max_bulk: self.max_bulk.min(usize::MAX / 4),
            max_line: self.max_line.min(usize::MAX / 4),
            max_depth: self.max_depth.min(MAX_DEPTH),
            ..self
        }
    }
}
