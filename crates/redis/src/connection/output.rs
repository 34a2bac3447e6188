//! Bytes that are being written to the socket.

use super::batch;

/// The bytes to write. Each byte has a position in the stream of the connection, the number of bytes before it. Bytes that were not
/// written can be taken back.
#[derive(Debug, Default)]
pub(super) struct Output {
    /// Empty if there is nothing to write.
    bytes: Vec<u8>,
    /// The number of these that were written.
    flushed: usize,
    /// The position of the next byte that is put in.
    end: u64,
}

impl Output {
    /// Returns the position of the next byte that is put in.
    pub(super) fn end(&self) -> u64 {
        self.end
    }

    /// Returns the number of bytes written so far, which is the position of the first unwritten byte.
    pub(super) fn written(&self) -> u64 {
        self.end - self.unwritten().len() as u64
    }

    pub(super) fn unwritten(&self) -> &[u8] {
        &self.bytes[self.flushed..]
    }

    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Takes the bytes out of a buffer and leaves it empty, for reuse.
    pub(super) fn put(&mut self, bytes: &mut Vec<u8>) {
        self.end += bytes.len() as u64;
        if self.is_empty() {
            std::mem::swap(&mut self.bytes, bytes);
        } else {
            // Under constant load the output is never empty, so the written bytes are removed once they are more than half.
            if self.flushed > self.bytes.len() / 2 {
                self.bytes.drain(..self.flushed);
                self.flushed = 0;
            }
            self.bytes.extend_from_slice(bytes);
        }
        batch::clear(bytes);
    }

    /// Records that `count` more bytes were written.
    pub(super) fn flush(&mut self, count: usize) {
        self.flushed += count;
        self.clear_if_written();
    }

    /// Takes back the bytes from this position on, none of which was written.
    pub(super) fn cut(&mut self, from: u64) -> Vec<u8> {
        let len = usize::try_from(self.end - from).unwrap_or(usize::MAX);
        let cut = self.bytes.split_off(self.bytes.len() - len);
        self.end = from;
        self.clear_if_written();
        cut
    }

    fn clear_if_written(&mut self) {
        if self.flushed == self.bytes.len() {
            self.flushed = 0;
            batch::clear(&mut self.bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unwritten_bytes_are_cut_and_replaced() {
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
    fn written_bytes_are_freed_under_constant_load() {
        let mut output = Output::default();
        let (mut expected, mut written) = (0_u8, 0);
        for round in 0..1000_u64 {
            // At first, a hundred bytes more than the socket takes.
            let bytes: Vec<u8> = (round * 1000..(round + 1) * 1000).map(|position| (position % 251) as u8).collect();
            output.put(&mut bytes.clone());
            let count = if round < 5 { 900 } else { 1000 };
            for byte in &output.unwritten()[..count] {
                assert_eq!(*byte, expected);
                expected = (expected + 1) % 251;
            }
            output.flush(count);
            written += count as u64;
            assert_eq!((output.written(), output.end()), (written, (round + 1) * 1000));
            assert!(!output.is_empty());
        }
        assert!(output.bytes.capacity() < 10_000, "{}", output.bytes.capacity());
    }
}
