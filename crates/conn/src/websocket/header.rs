//! The header of a frame: its kind, its length and its mask.
//!
//! Rules are checked in the order of the bytes that they apply to, each as soon as its bytes have arrived. So the error of an invalid
//! frame is the same however the input is split, and is reported before the payload has arrived.

use super::mask::Key;
use super::{WebSocketError, WebSocketOptions};

/// The maximum payload of a control frame.
pub(super) const MAX_CONTROL_BYTES: usize = 125;
/// The longest header: two bytes, eight bytes of length, and the masking key.
const MAX_HEADER_BYTES: usize = 14;

const FIN: u8 = 0x80;
const RESERVED: u8 = 0x70;
const MASKED: u8 = 0x80;
/// Length codes: the length follows in 16 or 64 bits.
const LENGTH_16: u8 = 126;
const LENGTH_64: u8 = 127;

/// The kind of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Opcode {
    Continuation = 0x0,
    Text = 0x1,
    Binary = 0x2,
    Close = 0x8,
    Ping = 0x9,
    Pong = 0xa,
}

impl Opcode {
    pub(super) fn is_control(self) -> bool {
        self as u8 >= Self::Close as u8
    }
}

/// A decoded header.
#[derive(Debug, Clone, Copy)]
pub(super) struct Header {
    pub(super) opcode: Opcode,
    /// The frame is the last of its message.
    pub(super) fin: bool,
    /// The masking key, if the frame is masked.
    pub(super) key: Option<Key>,
    /// The length of the payload, in bytes.
    pub(super) len: usize,
    /// The size of the header, in bytes.
    pub(super) size: usize,
}

/// The rules that a header is checked against.
pub(super) struct FrameRules<'a> {
    /// Frames must be masked. If false, they must not be masked.
    pub(super) must_mask: bool,
    pub(super) options: &'a WebSocketOptions,
    /// The incomplete fragmented message, if there is one.
    pub(super) partial: Option<PartialMessage>,
}

/// The number of fragments and the length of an incomplete message.
#[derive(Debug, Clone, Copy)]
pub(super) struct PartialMessage {
    pub(super) fragments: usize,
    pub(super) len: usize,
}

impl Header {
    /// Decodes the header at the front of `input`. Returns `None` if it is incomplete.
    #[expect(clippy::inline_always, reason = "called once per frame, and inlining keeps the result in registers")]
    #[inline(always)]
    pub(super) fn read(input: &[u8], rules: &FrameRules) -> Result<Option<Self>, WebSocketError> {
        let Some(&first) = input.first() else { return Ok(None) };
        let (fin, opcode) = rules.check_first(first)?;
        let Some(&second) = input.get(1) else { return Ok(None) };
        match (second & MASKED != 0, rules.must_mask) {
            (false, true) => return Err(WebSocketError::Unmasked),
            (true, false) => return Err(WebSocketError::Masked),
            _ => {}
        }
        let (len, mut size) = match second & !MASKED {
            LENGTH_16 | LENGTH_64 if opcode.is_control() => return Err(WebSocketError::LongControl),
            LENGTH_16 => {
                let Some(len) = input[2..].first_chunk() else { return Ok(None) };
                let len = u16::from_be_bytes(*len);
                if len < u16::from(LENGTH_16) {
                    return Err(WebSocketError::PaddedLength { len: len.into() });
                }
                (len.into(), 4)
            }
            LENGTH_64 => {
                let Some(len) = input[2..].first_chunk() else { return Ok(None) };
                let len = u64::from_be_bytes(*len);
                if len >> 63 == 1 {
                    return Err(WebSocketError::HugeLength { len });
                }
                if len <= u16::MAX.into() {
                    return Err(WebSocketError::PaddedLength { len });
                }
                (len, 10)
            }
            len => (len.into(), 2),
        };
        let len = rules.check_len(opcode, len)?;
        let mut key = None;
        if rules.must_mask {
            key = input[size..].first_chunk().copied();
            if key.is_none() {
                return Ok(None);
            }
            size += size_of::<Key>();
        }
        Ok(Some(Self { opcode, fin, key, len, size }))
    }

    /// Returns the size of header and payload, in bytes.
    pub(super) fn end(&self) -> usize {
        self.size.saturating_add(self.len)
    }

    /// Encodes the header of an unfragmented frame. Returns a buffer and the size of the header in it.
    pub(super) fn write(opcode: Opcode, len: usize, key: Option<Key>) -> ([u8; MAX_HEADER_BYTES], usize) {
        let mut bytes = [0; MAX_HEADER_BYTES];
        bytes[0] = FIN | opcode as u8;
        let mut size = 2;
        match (u8::try_from(len), u16::try_from(len)) {
            (Ok(len), _) if len < LENGTH_16 => bytes[1] = len,
            (_, Ok(len)) => {
                bytes[1] = LENGTH_16;
                bytes[2..4].copy_from_slice(&len.to_be_bytes());
                size = 4;
            }
            _ => {
                bytes[1] = LENGTH_64;
                bytes[2..10].copy_from_slice(&(len as u64).to_be_bytes());
                size = 10;
            }
        }
        if let Some(key) = key {
            bytes[1] |= MASKED;
            bytes[size..size + key.len()].copy_from_slice(&key);
            size += key.len();
        }
        (bytes, size)
    }
}

impl FrameRules<'_> {
    /// Checks the first byte, given the frames before it.
    #[inline]
    fn check_first(&self, first: u8) -> Result<(bool, Opcode), WebSocketError> {
        if first & RESERVED != 0 {
            return Err(WebSocketError::ReservedBits { bits: (first & RESERVED) >> 4 });
        }
        let fin = first & FIN != 0;
        let opcode = match first & !(FIN | RESERVED) {
            0x0 => Opcode::Continuation,
            0x1 => Opcode::Text,
            0x2 => Opcode::Binary,
            0x8 => Opcode::Close,
            0x9 => Opcode::Ping,
            0xa => Opcode::Pong,
            opcode => return Err(WebSocketError::ReservedOpcode { opcode }),
        };
        match (opcode, self.partial) {
            (Opcode::Close | Opcode::Ping | Opcode::Pong, _) => {
                if !fin {
                    return Err(WebSocketError::FragmentedControl);
                }
            }
            (Opcode::Continuation, None) => return Err(WebSocketError::UnexpectedContinuation),
            (Opcode::Continuation, Some(PartialMessage { fragments, .. })) => self.check_fragments(fragments)?,
            (Opcode::Text | Opcode::Binary, Some(_)) => return Err(WebSocketError::InterruptedMessage),
            (Opcode::Text | Opcode::Binary, None) => {
                if !fin {
                    self.check_fragments(0)?;
                }
            }
        }
        Ok((fin, opcode))
    }

    /// Checks that a message with this many fragments may have another one.
    fn check_fragments(&self, fragments: usize) -> Result<(), WebSocketError> {
        let max_fragments = self.options.max_fragments;
        if fragments < max_fragments { Ok(()) } else { Err(WebSocketError::TooManyFragments { max_fragments }) }
    }

    /// Checks the announced length of a frame, and returns it.
    #[inline]
    fn check_len(&self, opcode: Opcode, len: u64) -> Result<usize, WebSocketError> {
        let WebSocketOptions { max_frame, max_message, .. } = *self.options;
        let Ok(frame_len) = usize::try_from(len) else { return Err(WebSocketError::FrameTooLarge { len, max_frame }) };
        if opcode.is_control() {
            return Ok(frame_len);
        }
        if frame_len > max_frame {
            return Err(WebSocketError::FrameTooLarge { len, max_frame });
        }
        let message_len = self.partial.map_or(0, |partial| partial.len).saturating_add(frame_len);
        if message_len > max_message {
            return Err(WebSocketError::MessageTooLarge { len: message_len as u64, max_message });
        }
        Ok(frame_len)
    }
}
