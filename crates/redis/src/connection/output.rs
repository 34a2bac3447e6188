//! Bytes that are being written to the socket.

use super::batch;

/// What is to be written. Every byte has its place in the stream, which is how many were put in before it; what was not written can
/// be cut off again.
#[derive(Debug, Default)]
pub(super) struct Output {
    /// What is to be written, from `flushed` on. Empty if there is nothing.
    bytes: Vec<u8>,
    flushed: usize,
    /// Where the next byte is put.
    end: u64,
}

impl Output {
    /// Where the next byte is put.
    pub(super) fn end(&self) -> u64 {
        self.end
    }

    /// How many bytes were written so far.
    pub(super) fn written(&self) -> u64 {
        self.end - self.unwritten().len() as u64
    }

    /// What is to be written.
    pub(super) fn unwritten(&self) -> &[u8] {
        &self.bytes[self.flushed..]
    }

    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Takes bytes, and gives back a buffer without any.
    pub(super) fn put(&mut self, bytes: &mut Vec<u8>) {
        self.end += bytes.len() as u64;
        if self.is_empty() {
            std::mem::swap(&mut self.bytes, bytes);
        } else {
            // A socket that always has something to take never sees it empty. Once most of it is written, that is worth moving the rest.
            if self.flushed > self.bytes.len() / 2 {
                self.bytes.drain(..self.flushed);
                self.flushed = 0;
            }
            self.bytes.extend_from_slice(bytes);
        }
        batch::empty(bytes);
    }

    /// So many more were written.
    pub(super) fn flush(&mut self, count: usize) {
        self.flushed += count;
        self.empty_if_written();
    }

    /// Takes back what was put in from this place on, none of which was written.
    pub(super) fn cut(&mut self, from: u64) -> Vec<u8> {
        let len = usize::try_from(self.end - from).unwrap_or(usize::MAX);
        let cut = self.bytes.split_off(self.bytes.len() - len);
        self.end = from;
        self.empty_if_written();
        cut
    }

    fn empty_if_written(&mut self) {
        if self.flushed == self.bytes.len() {
            self.flushed = 0;
            batch::empty(&mut self.bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_written_is_cut_off_and_what_follows_takes_its_place() {
        let mut output = Output::default();
        output.put(&mut b"one".to_vec());
        output.put(&mut b"two".to_vec());
        output.flush(1);
        assert_eq!((output.written(), output.end(), output.unwritten()), (1, 6, &b"netwo"[..]));
        assert_eq!(output.cut(3), b"two");
        assert_eq!((output.written(), output.end(), output.unwritten()), (1, 3, &b"ne"[..]));
        output.flush(2);
        assert!(output.is_empty());
        let mut bytes = b"three".to_vec();
        output.put(&mut bytes);
        assert_eq!((bytes.len(), output.written(), output.end()), (0, 3, 8));
        assert_eq!(output.cut(3), b"three");
        assert!(output.is_empty());
        assert_eq!((output.written(), output.cut(3)), (3, Vec::new()));
    }

    #[test]
    fn what_is_written_takes_no_room_though_there_is_always_more() {
        let mut output = Output::default();
        let (mut expected, mut written) = (0_u8, 0);
        for turn in 0..1000_u64 {
            // A hundred bytes more each time than the socket takes, at first.
            let bytes: Vec<u8> = (turn * 1000..(turn + 1) * 1000).map(|place| (place % 251) as u8).collect();
            output.put(&mut bytes.clone());
            let count = if turn < 5 { 900 } else { 1000 };
            for byte in &output.unwritten()[..count] {
                assert_eq!(*byte, expected);
                expected = (expected + 1) % 251;
            }
            output.flush(count);
            written += count as u64;
            assert_eq!((output.written(), output.end()), (written, (turn + 1) * 1000));
            assert!(!output.is_empty());
        }
        assert!(output.bytes.capacity() < 10_000, "{}", output.bytes.capacity());
    }
}
