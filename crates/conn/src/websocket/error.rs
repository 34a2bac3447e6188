//! Errors of a WebSocket, and the close codes that report them to the peer.

use super::CloseCode;
use super::header::MAX_CONTROL_BYTES;

/// What can be wrong with what a [`WebSocket`](crate::websocket::WebSocket) reads or is to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WebSocketError {
    /// The peer set bits that only extensions use, and none was agreed on.
    #[error("a frame has reserved bits {bits:#05b}: no extension was agreed on")]
    ReservedBits {
        /// The three bits.
        bits: u8,
    },
    /// The peer sent a kind of frame that does not exist.
    #[error("a frame has opcode {opcode:#x}, which is reserved")]
    ReservedOpcode {
        /// Its kind.
        opcode: u8,
    },
    /// The peer sent a ping, pong or close in fragments.
    #[error("a control frame is a fragment: only messages may come in fragments")]
    FragmentedControl,
    /// The peer continued what it had not begun.
    #[error("a continuation came without a message to continue")]
    UnexpectedContinuation,
    /// The peer began a message before the end of another.
    #[error("a message began within the fragments of another: a continuation was expected")]
    InterruptedMessage,
    /// The peer sent a message in too many fragments.
    #[error("a message has more than {max_fragments} fragments")]
    TooManyFragments {
        /// The limit.
        max_fragments: usize,
    },
    /// A client sent a frame without a mask.
    #[error("a client's frame is not masked: clients must mask")]
    Unmasked,
    /// A server sent a frame with a mask.
    #[error("a server's frame is masked: servers must not mask")]
    Masked,
    /// The peer sent a ping, pong or close that is too long.
    #[error("a control frame is longer than {MAX_CONTROL_BYTES} bytes")]
    LongControl,
    /// The peer announced a length in more bytes than it takes.
    #[error("a length of {len} is not written in as few bytes as possible")]
    PaddedLength {
        /// The length.
        len: u64,
    },
    /// The peer announced a length that does not fit 63 bits.
    #[error("a length of {len:#x} has its highest bit set")]
    HugeLength {
        /// The length.
        len: u64,
    },
    /// The peer announced a frame above the limit.
    #[error("a frame of {len} bytes was announced: at most {max_frame} are accepted")]
    FrameTooLarge {
        /// What the peer announced.
        len: u64,
        /// The limit.
        max_frame: usize,
    },
    /// The peer announced a frame that takes its message above the limit.
    #[error("a message of {len} bytes was announced: at most {max_message} are accepted")]
    MessageTooLarge {
        /// What came before, and what the peer announced.
        len: u64,
        /// The limit.
        max_message: usize,
    },
    /// The peer sent text that is none.
    #[error("a text message is not valid UTF-8")]
    InvalidUtf8,
    /// The peer closed with half a code.
    #[error("a close frame has a payload of one byte: a code takes two")]
    ShortClose,
    /// The peer closed with a code that may not be sent.
    #[error("a close frame has the code {code}, which may not be sent")]
    InvalidCloseCode {
        /// The code.
        code: CloseCode,
    },
    /// The peer closed with a reason that is no text.
    #[error("the reason in a close frame is not valid UTF-8")]
    InvalidCloseReason,
    /// The stream ended within the header of a frame.
    #[error("the stream ended within the header of a frame")]
    TruncatedHeader,
    /// The stream ended within the payload of a frame.
    #[error("the stream ended {missing} bytes before the end of a frame")]
    TruncatedFrame {
        /// How many bytes of the frame did not come.
        missing: usize,
    },
    /// The stream ended between two fragments.
    #[error("the stream ended between the fragments of a message")]
    TruncatedMessage,
    /// The stream ended between messages, and nobody had said why.
    #[error("the stream ended without a close frame")]
    NoClose,
    /// A ping, pong or close to be sent is too long.
    #[error("a control frame of {len} bytes cannot be sent: at most {MAX_CONTROL_BYTES} are allowed")]
    ControlTooLong {
        /// The bytes it has, in a close with the two of its code.
        len: usize,
    },
    /// A close to be sent has a code that may not be sent.
    #[error("a close frame cannot be sent with the code {code}")]
    UnsendableCode {
        /// The code.
        code: CloseCode,
    },
}

impl WebSocketError {
    /// The code to close with. [`ABNORMAL`](CloseCode::ABNORMAL) if there is nobody left to tell.
    pub fn close_code(&self) -> CloseCode {
        match self {
            Self::ReservedBits { .. }
            | Self::ReservedOpcode { .. }
            | Self::FragmentedControl
            | Self::UnexpectedContinuation
            | Self::InterruptedMessage
            | Self::Unmasked
            | Self::Masked
            | Self::LongControl
            | Self::PaddedLength { .. }
            | Self::HugeLength { .. }
            | Self::ShortClose
            | Self::InvalidCloseCode { .. } => CloseCode::PROTOCOL,
            Self::InvalidUtf8 | Self::InvalidCloseReason => CloseCode::INVALID_DATA,
            Self::TooManyFragments { .. } | Self::FrameTooLarge { .. } | Self::MessageTooLarge { .. } => {
                CloseCode::TOO_BIG
            }
            Self::TruncatedHeader | Self::TruncatedFrame { .. } | Self::TruncatedMessage | Self::NoClose => {
                CloseCode::ABNORMAL
            }
            Self::ControlTooLong { .. } | Self::UnsendableCode { .. } => CloseCode::INTERNAL,
        }
    }
}
