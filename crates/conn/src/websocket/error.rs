//! Errors of a WebSocket, and the close codes that report them to the peer.

use super::CloseCode;
use super::header::MAX_CONTROL_BYTES;

/// An error in the input of a [`WebSocket`](crate::websocket::WebSocket), or in a message to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WebSocketError {
    /// The peer set reserved bits, although no extension was negotiated.
    #[error("frame with reserved bits {bits:#05b}; no extension was negotiated")]
    ReservedBits {
        /// The three bits.
        bits: u8,
    },
    /// The peer sent a frame with a reserved opcode.
    #[error("frame with reserved opcode {opcode:#x}")]
    ReservedOpcode {
        /// The opcode.
        opcode: u8,
    },
    /// The peer sent a ping, pong or close frame in fragments.
    #[error("fragmented control frame; only messages may be fragmented")]
    FragmentedControl,
    /// The peer sent a continuation frame without a message.
    #[error("continuation frame without a message")]
    UnexpectedContinuation,
    /// The peer began a message before the end of another.
    #[error("expected a continuation frame, got a new message")]
    InterruptedMessage,
    /// The peer sent a message in too many fragments.
    #[error("message with more than {max_fragments} fragments")]
    TooManyFragments {
        /// The limit.
        max_fragments: usize,
    },
    /// A client sent a frame without a mask.
    #[error("unmasked frame from a client; clients must mask their frames")]
    Unmasked,
    /// A server sent a frame with a mask.
    #[error("masked frame from a server; servers must not mask their frames")]
    Masked,
    /// The peer sent a ping, pong or close frame that is too long.
    #[error("control frame of more than {MAX_CONTROL_BYTES} bytes")]
    LongControl,
    /// The peer encoded a length in more bytes than necessary.
    #[error("length {len} is not encoded in the minimal number of bytes")]
    PaddedLength {
        /// The length.
        len: u64,
    },
    /// The peer announced a length that does not fit 63 bits.
    #[error("length {len:#x} does not fit 63 bits")]
    HugeLength {
        /// The length.
        len: u64,
    },
    /// The peer announced a frame above the limit.
    #[error("the peer announced a frame of {len} bytes; the limit is {max_frame}")]
    FrameTooLarge {
        /// The announced length, in bytes.
        len: u64,
        /// The limit.
        max_frame: usize,
    },
    /// The peer announced a frame with which its message exceeds the limit.
    #[error("the peer announced a message of {len} bytes; the limit is {max_message}")]
    MessageTooLarge {
        /// The length of the message with the announced frame, in bytes.
        len: u64,
        /// The limit.
        max_message: usize,
    },
    /// The peer sent a text message that is not valid UTF-8.
    #[error("text message is not valid UTF-8")]
    InvalidUtf8,
    /// The peer sent a close frame with an incomplete code.
    #[error("close frame with a payload of one byte; a code has two")]
    ShortClose,
    /// The peer sent a close frame with a code that must not be sent.
    #[error("close frame with invalid code {code}")]
    InvalidCloseCode {
        /// The code.
        code: CloseCode,
    },
    /// The peer sent a close frame whose reason is not valid UTF-8.
    #[error("close frame with a reason that is not valid UTF-8")]
    InvalidCloseReason,
    /// The stream ended within the header of a frame.
    #[error("the stream ended within the header of a frame")]
    TruncatedHeader,
    /// The stream ended within the payload of a frame.
    #[error("the stream ended {missing} bytes before the end of a frame")]
    TruncatedFrame {
        /// The number of missing bytes.
        missing: usize,
    },
    /// The stream ended between two fragments.
    #[error("the stream ended between the fragments of a message")]
    TruncatedMessage,
    /// The stream ended between messages, without a close frame.
    #[error("the stream ended without a close frame")]
    NoClose,
    /// A ping, pong or close frame to be sent is too long.
    #[error("cannot send a control frame of {len} bytes; the limit is {MAX_CONTROL_BYTES}")]
    ControlTooLong {
        /// The length of the payload, in bytes. In a close frame it includes the code.
        len: usize,
    },
    /// A close frame to be sent has a code that must not be sent.
    #[error("cannot send a close frame with code {code}")]
    UnsendableCode {
        /// The code.
        code: CloseCode,
    },
}

impl WebSocketError {
    /// Returns the code to close the connection with. [`ABNORMAL`](CloseCode::ABNORMAL) if the stream has ended, and no close frame
    /// can be sent.
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
