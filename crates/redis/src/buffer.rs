//! The bytes of a command, stored inline while it is small.

use crate::resp::encode_argument;

/// Inline capacity: a `SET` with a value of 64 bytes needs no allocation.
const INLINE_BYTES: usize = 112;

/// Bytes around the longest argument.
const OVERHEAD: usize = "$536870912\r\n\r\n".len();

/// The longest short argument, whose length has at most two digits.
const MAX_SHORT_BYTES: usize = 99;

/// Bytes around a short argument.
const SHORT_OVERHEAD: usize = "$99\r\n\r\n".len();

/// Encoded arguments, after space for the header of the command.
#[derive(Clone)]
pub(crate) struct Buffer {
    inline: [u8; INLINE_BYTES],
    /// The length of `inline`.
    len: usize,
    /// All bytes, once they do not fit inline. Empty before.
    heap: Vec<u8>,
}

impl Buffer {
    /// The length of the longest header.
    pub(crate) const HEAD: usize = "*1048576\r\n".len();

    pub(crate) fn new() -> Self {
        Self { inline: [0; INLINE_BYTES], len: Self::HEAD, heap: Vec::new() }
    }

    #[inline]
    pub(crate) fn as_slice(&self) -> &[u8] {
        if self.heap.is_empty() { &self.inline[..self.len] } else { &self.heap }
    }

    /// Writes the header, which has the number of arguments. Returns its first index.
    #[inline]
    pub(crate) fn write_head(&mut self, arguments: usize) -> usize {
        let head = if self.heap.is_empty() { &mut self.inline[..] } else { &mut self.heap };
        let head = &mut head[..Self::HEAD];
        head[Self::HEAD - 2..].copy_from_slice(b"\r\n");
        let (mut left, mut at) = (arguments, Self::HEAD - 3);
        while left > 9 {
            head[at] = digit(left % 10);
            (left, at) = (left / 10, at - 1);
        }
        head[at] = digit(left);
        head[at - 1] = b'*';
        at - 1
    }

    #[inline]
    pub(crate) fn push(&mut self, argument: &[u8]) {
        if argument.len() > MAX_SHORT_BYTES {
            self.push_long(argument);
        } else if self.heap.is_empty() && argument.len() + SHORT_OVERHEAD <= INLINE_BYTES - self.len {
            self.len += write_short(argument, &mut self.inline[self.len..]);
        } else {
            // One append of a hundred bytes costs less than three of a few.
            let mut written = [0; MAX_SHORT_BYTES + SHORT_OVERHEAD];
            let len = write_short(argument, &mut written);
            self.grow(len);
            self.heap.extend_from_slice(&written[..len]);
        }
    }

    /// Appends the arguments of another buffer.
    pub(crate) fn append(&mut self, other: &Self) {
        let arguments = &other.as_slice()[Self::HEAD..];
        self.grow(arguments.len());
        self.heap.extend_from_slice(arguments);
    }

    fn push_long(&mut self, argument: &[u8]) {
        // Reserved at once, so that a large value is not moved for the two bytes after it.
        self.grow(argument.len() + OVERHEAD);
        encode_argument(argument, &mut self.heap);
    }

    /// Reserves memory on the heap, and moves inline bytes there.
    fn grow(&mut self, additional: usize) {
        if self.heap.is_empty() {
            self.heap.reserve((self.len + additional).max(2 * INLINE_BYTES));
            self.heap.extend_from_slice(&self.inline[..self.len]);
        } else {
            self.heap.reserve(additional);
        }
    }
}

/// Encodes a short argument. Returns its encoded length.
#[inline]
fn write_short(argument: &[u8], output: &mut [u8]) -> usize {
    let len = argument.len();
    output[0] = b'$';
    let at = if len < 10 {
        output[1] = digit(len);
        2
    } else {
        (output[1], output[2]) = (digit(len / 10), digit(len % 10));
        3
    };
    output[at..at + 2].copy_from_slice(b"\r\n");
    let end = at + 2 + len;
    output[at + 2..end].copy_from_slice(argument);
    output[end..end + 2].copy_from_slice(b"\r\n");
    end + 2
}

#[expect(clippy::cast_possible_truncation, reason = "it is below ten")]
#[inline]
fn digit(number: usize) -> u8 {
    b'0' + number as u8
}
