//! The bytes of a command, in place as long as they are few.

use crate::resp::encode_argument;

/// What a small command needs: a key, and a value of 64 bytes. It costs no allocation.
const SMALL: usize = 112;

/// What stands around the longest argument.
const AROUND: usize = "$536870912\r\n\r\n".len();

/// The same of one whose length has two digits.
const AROUND_SMALL: usize = "$99\r\n\r\n".len();

/// Bytes that begin with room for a head.
#[derive(Clone)]
pub(crate) struct Buffer {
    small: [u8; SMALL],
    /// How many of these there are.
    len: usize,
    /// All of them, once they are too many for that.
    large: Vec<u8>,
}

impl Buffer {
    /// Room for the head of the most arguments.
    pub(crate) const HEAD: usize = "*1048576\r\n".len();

    pub(crate) fn new() -> Self {
        Self { small: [0; SMALL], len: Self::HEAD, large: Vec::new() }
    }

    #[inline]
    pub(crate) fn as_slice(&self) -> &[u8] {
        if self.large.is_empty() { &self.small[..self.len] } else { &self.large }
    }

    /// Writes how many arguments there are. Returns where the head begins.
    #[inline]
    pub(crate) fn write_head(&mut self, arguments: usize) -> usize {
        let head = if self.large.is_empty() { &mut self.small[..] } else { &mut self.large };
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
        let len = argument.len();
        if len > 99 || !self.large.is_empty() || len + AROUND_SMALL > SMALL - self.len {
            return self.push_large(argument);
        }
        let room = &mut self.small[self.len..];
        room[0] = b'$';
        let at = if len < 10 {
            room[1] = digit(len);
            2
        } else {
            (room[1], room[2]) = (digit(len / 10), digit(len % 10));
            3
        };
        room[at..at + 2].copy_from_slice(b"\r\n");
        let end = at + 2 + len;
        room[at + 2..end].copy_from_slice(argument);
        room[end..end + 2].copy_from_slice(b"\r\n");
        self.len += end + 2;
    }

    /// Adds the arguments of another one.
    pub(crate) fn append(&mut self, other: &Self) {
        let arguments = &other.as_slice()[Self::HEAD..];
        self.grow(arguments.len());
        self.large.extend_from_slice(arguments);
    }

    #[cold]
    fn push_large(&mut self, argument: &[u8]) {
        // At once, so that a large value is not moved for the two bytes that follow it.
        self.grow(argument.len() + AROUND);
        encode_argument(argument, &mut self.large);
    }

    /// Makes room elsewhere.
    fn grow(&mut self, additional: usize) {
        if self.large.is_empty() {
            self.large.reserve((self.len + additional).max(2 * SMALL));
            self.large.extend_from_slice(&self.small[..self.len]);
        } else {
            self.large.reserve(additional);
        }
    }
}

#[expect(clippy::cast_possible_truncation, reason = "it is below ten")]
#[inline]
fn digit(number: usize) -> u8 {
    b'0' + number as u8
}
