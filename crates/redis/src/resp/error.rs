//! Errors in the input of a decoder.

/// What is wrong with a stream. It cannot be read any further.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{kind} (byte {offset} of the stream)")]
#[non_exhaustive]
pub struct DecodeError {
    /// What is wrong.
    pub kind: DecodeErrorKind,
    /// Where: the bytes of the stream before it.
    pub offset: u64,
}

/// The kinds of [`DecodeError`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeErrorKind {
    /// No value begins with this byte.
    #[error("no value begins with '{}': this does not speak RESP", byte.escape_ascii())]
    UnknownType {
        /// The byte.
        byte: u8,
    },
    /// A carriage return or a line feed without the other.
    #[error("a line has a lone CR or LF: lines end with CR LF")]
    LineBreak,
    /// A line is above the limit.
    #[error("a line is longer than {max} bytes")]
    LineTooLong {
        /// The limit.
        max: usize,
    },
    /// A length is not one.
    #[error("the length of a '{}' is not a number that it can have", first.escape_ascii())]
    Length {
        /// The first byte of what has the length.
        first: u8,
    },
    /// A string is above the limit.
    #[error("a string of {len} bytes was announced: at most {max} are accepted")]
    BulkTooLong {
        /// The announced length; of a string in chunks, those up to here together.
        len: u64,
        /// The limit.
        max: usize,
    },
    /// A string is not followed by the end of a line.
    #[error("a string is not followed by CR LF: its length is wrong")]
    BulkEnd,
    /// An aggregate, or those of a reply together, are above the limit.
    #[error("a reply has more than {max} elements")]
    TooManyElements {
        /// The limit.
        max: usize,
    },
    /// Aggregates are nested too deeply.
    #[error("a reply is nested deeper than {max} levels")]
    TooDeep {
        /// The limit.
        max: usize,
    },
    /// An integer is none.
    #[error("an integer is not made of digits")]
    Integer,
    /// An integer does not fit 64 bits.
    #[error("an integer does not fit 64 bits")]
    IntegerRange,
    /// A double is none, or is finite and does not fit.
    #[error("a double is not a number that fits one")]
    Double,
    /// A big number is none.
    #[error("a big number is not made of digits")]
    BigNumber,
    /// A boolean is neither `t` nor `f`.
    #[error("a boolean is neither t nor f")]
    Boolean,
    /// A null is followed by something.
    #[error("a null has a content")]
    Null,
    /// A verbatim string does not begin with its format.
    #[error("a verbatim string does not begin with three letters and a colon")]
    Verbatim,
    /// Within a string in chunks there is something else.
    #[error("a string in chunks goes on with '{}' instead of ';'", byte.escape_ascii())]
    ChunkExpected {
        /// How it goes on.
        byte: u8,
    },
    /// A chunk without a string that it belongs to.
    #[error("a chunk belongs to no string")]
    StrayChunk,
    /// An end without an aggregate of unknown length.
    #[error("an end of nothing, or of what has a length")]
    StrayEnd,
    /// A map ends after a key.
    #[error("a map ends between a key and its value")]
    OddMap,
    /// An aggregate ends after attributes.
    #[error("attributes are followed by no value")]
    StrayAttributes,
    /// A push within a reply.
    #[error("a push within a reply")]
    NestedPush,
    /// The stream ended too early.
    #[error("the stream ended within a reply")]
    Truncated,
}
