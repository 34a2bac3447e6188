//! The bytes of a command, stored inline while they are few.

use crate::resp::encode_argument;

/// What a small command needs: a key, and a value of 64 bytes. It costs no allocation.
const SMALL: usize = 112;

/// What stands around the longest argument.
const AROUND: usize = "$536870912\r\n\r\n".len();

/// An argument of so few bytes has a length of two digits at most.
const FEW: usize = 99;

/// What stands around one.
const AROUND_FEW: usize = "$99\r\n\r\n".len();

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
        if argument.len() > FEW {
            self.push_large(argument);
        } else if self.large.is_empty() && argument.len() + AROUND_FEW <= SMALL - self.len {
            self.len += write_few(argument, &mut self.small[self.len..]);
        } else {
            // One append of a hundred bytes costs less than three of a few.
            let mut written = [0; FEW + AROUND_FEW];
            let len = write_few(argument, &mut written);
            self.grow(len);
            self.large.extend_from_slice(&written[..len]);
        }
    }

    /// Adds the arguments of another one.
    pub(crate) fn append(&mut self, other: &Self) {
        let arguments = &other.as_slice()[Self::HEAD..];
        self.grow(arguments.len());
        self.large.extend_from_slice(arguments);
    }

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

/// Writes an argument of a few bytes. Returns how many bytes it takes.
#[inline]
fn write_few(argument: &[u8], room: &mut [u8]) -> usize {
    let len = argument.len();
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
    end + 2
}

#[expect(clippy::cast_possible_truncation, reason = "it is below ten")]
#[inline]
fn digit(number: usize) -> u8 {
    b'0' + number as u8
}
