//! Errors in the input of a decoder.

/// Error of decoding a stream, which cannot be decoded further.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{kind} (at byte {offset} of the stream)")]
#[non_exhaustive]
pub struct DecodeError {
    /// The kind of error.
    pub kind: DecodeErrorKind,
    /// The number of bytes of the stream before the error.
    pub offset: u64,
}

/// The kinds of [`DecodeError`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeErrorKind {
    /// No value begins with this byte.
    #[error("no value begins with '{}'; the peer does not speak RESP", byte.escape_ascii())]
    UnknownType {
        /// The byte.
        byte: u8,
    },
    /// A carriage return or a line feed without the other.
    #[error("expected CR LF at the end of a line, got one of them alone")]
    LineBreak,
    /// A line is longer than the limit.
    #[error("a line is longer than `max_line`, {max} bytes")]
    LineTooLong {
        /// The limit.
        max: usize,
    },
    /// A length is invalid.
    #[error("invalid length of a '{}'; expected digits", first.escape_ascii())]
    Length {
        /// The first byte of the value.
        first: u8,
    },
    /// A string is longer than the limit.
    #[error("a string has {len} bytes, more than `max_bulk`, {max}")]
    BulkTooLong {
        /// The announced length. For a string in chunks, the sum so far.
        len: u64,
        /// The limit.
        max: usize,
    },
    /// A string is not followed by CR LF.
    #[error("expected CR LF after a string; its length is wrong")]
    BulkEnd,
    /// A reply has more elements than the limit.
    #[error("a reply has more elements than `max_elements`, {max}")]
    TooManyElements {
        /// The limit.
        max: usize,
    },
    /// Aggregates are nested more deeply than the limit.
    #[error("a reply is nested more deeply than `max_depth`, {max} levels")]
    TooDeep {
        /// The limit.
        max: usize,
    },
    /// An integer is not made of digits.
    #[error("invalid integer; expected digits")]
    Integer,
    /// An integer does not fit 64 bits.
    #[error("an integer does not fit 64 bits")]
    IntegerRange,
    /// A double is not a number, or is finite and does not fit.
    #[error("invalid double; expected a decimal number that fits 64 bits")]
    Double,
    /// A big number is not made of digits.
    #[error("invalid big number; expected digits")]
    BigNumber,
    /// A boolean is neither `t` nor `f`.
    #[error("invalid boolean; expected t or f")]
    Boolean,
    /// A null is not followed by CR LF.
    #[error("expected CR LF after a null")]
    Null,
    /// A verbatim string does not begin with its format.
    #[error("expected a format of three bytes and a colon at the beginning of a verbatim string")]
    Verbatim,
    /// A string in chunks continues with another value.
    #[error("expected ';' before the next chunk of a string, got '{}'", byte.escape_ascii())]
    ChunkExpected {
        /// The byte in place of `;`.
        byte: u8,
    },
    /// A chunk that is not part of a string.
    #[error("unexpected chunk outside of a string")]
    StrayChunk,
    /// An end that is not the end of a streamed aggregate.
    #[error("unexpected end outside of a streamed aggregate")]
    StrayEnd,
    /// A map ends after a key.
    #[error("a map ends after a key; expected its value")]
    OddMap,
    /// An aggregate ends after attributes.
    #[error("an aggregate ends after attributes; expected their value")]
    StrayAttributes,
    /// A push inside a reply.
    #[error("unexpected push inside a reply")]
    NestedPush,
    /// The stream ended inside a reply.
    #[error("the stream ended inside a reply")]
    Truncated,
}
