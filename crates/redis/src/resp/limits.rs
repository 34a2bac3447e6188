//! Limits on the input of a decoder.

/// The deepest nesting that can be set: values are dropped level by level, on the stack.
const DEEPEST: usize = 512;

/// What a [`Decoder`](super::Decoder) accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct DecoderOptions {
    /// The longest string, in chunks or not. Default: 512 MiB, which is what Redis keeps under a key by default.
    pub max_bulk: usize,
    /// The most elements of one reply, those of nested aggregates together; a pair counts twice, and an attribute for one more.
    /// Default: 1 048 576, or some 40 MiB beside the strings. Whoever reads more at once should scan instead.
    pub max_elements: usize,
    /// How deep aggregates may be nested, at most 512. Default: 64, far beyond what Redis or a sensible script answers.
    pub max_depth: usize,
    /// The longest line: a simple string, an error, a number. Default: 64 KiB, which is what Redis accepts itself.
    pub max_line: usize,
    /// Whether values keep their attributes. Default: no, because a client asks for a value, and they are hints.
    pub keep_attributes: bool,
}

impl Default for DecoderOptions {
    fn default() -> Self {
        Self { max_bulk: 512 << 20, max_elements: 1 << 20, max_depth: 64, max_line: 64 << 10, keep_attributes: false }
    }
}

impl DecoderOptions {
    /// With which no sum of lengths overflows and no drop overflows the stack.
    pub(super) fn within_reason(mut self) -> Self {
        self.max_bulk = self.max_bulk.min(usize::MAX / 4);
        self.max_line = self.max_line.min(usize::MAX / 4);
        self.max_depth = self.max_depth.min(DEEPEST);
        self
    }
}
