//! The end of the log, to which each group of commits is appended as one frame.
//!
//! The last page of the log is usually written only in part, and its bytes stay in memory. A frame is appended to them, padded with
//! zeros to full pages, and written with one call into preallocated space. The call reads nothing, and allocates no blocks and changes
//! no metadata of the file. The durable bytes of that page are rewritten unchanged, so a torn write does not change them.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};

use super::super::EngineError;
use super::super::disk::is_out_of_descriptors;
use super::data_dir::DataDir;
use super::frame::{ALIGN_BYTES, FrameHeader, FrameKind, HEADER_BYTES, Layout};
use super::segment::{MAX_SEGMENT_BYTES, PAGE_BYTES, Segment, SegmentHeader};

/// The state that links each frame to the previous one.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cursor {
    /// Identifies the log.
    pub(super) log: u64,
    pub(super) epoch: u64,
    /// The number of the next frame.
    pub(super) frame: u64,
    /// The sequence of the next commit.
    pub(super) sequence: u64,
    /// The checksum of the header of the last frame.
    pub(super) chain: u32,
}

pub(super) struct Log {
    data_dir: Arc<DataDir>,
    segment: Segment,
    /// The next segment, once its preparation has begun.
    next: Option<Receiver<io::Result<Segment>>>,
    pub(super) cursor: Cursor,
    /// The number of the last durable frame.
    durable: u64,
    /// Whether commits are acknowledged before they are durable.
    is_relaxed: bool,
    /// Offset of the buffer in the file: a multiple of the page size.
    page_offset: u64,
    /// The written part of the page in which the last frame ended. After a rotation, the unwritten segment header.
    buffer: Vec<u8>,
    /// The bytes of the frames that were appended or recovered.
    pub(super) appended: u64,
    pub(super) syncs: u64,
    has_failed: bool,
}

impl Log {
    /// Creates a log that continues after `tail`, the durable bytes of the page at offset `page_offset`.
    pub(super) fn new(
        data_dir: Arc<DataDir>,
        segment: Segment,
        cursor: Cursor,
        page_offset: u64,
        tail: Vec<u8>,
        is_relaxed: bool,
    ) -> Self {
        let durable = cursor.frame - 1;
        let mut buffer = tail;
        buffer.reserve(64 * 1024);
        Self {
            data_dir,
            segment,
            next: None,
            cursor,
            durable,
            is_relaxed,
            page_offset,
            buffer,
            appended: 0,
            syncs: 0,
            has_failed: false,
        }
    }

    /// Uses an existing segment as the next segment.
    pub(super) fn set_next(&mut self, segment: Segment) {
        let (sender, receiver) = sync_channel(1);
        // The channel holds one message, and the receiver is alive.
        let _ = sender.send(Ok(segment));
        self.next = Some(receiver);
    }

    /// Prepares the next segment in the background.
    pub(super) fn prepare_next_segment(&mut self) {
        if self.next.is_some() {
            return;
        }
        let (sender, receiver) = sync_channel(1);
        let (data_dir, number) = (Arc::clone(&self.data_dir), self.segment.number + 1);
        self.data_dir.disk.spawn(Box::new(move || {
            let created = Segment::create(&data_dir, number, None);
            // Released before the receiver gets the result, so that this thread does not keep the directory locked.
            drop(data_dir);
            let _ = sender.send(created);
        }));
        self.next = Some(receiver);
    }

    /// Returns the number of the segment and its used bytes.
    pub(super) fn end(&self) -> (u64, u64) {
        (self.segment.number, self.page_offset + self.buffer.len() as u64)
    }

    /// Fails if an earlier write failed.
    pub(super) fn check(&self) -> Result<(), EngineError> {
        if self.has_failed { Err(EngineError::Stopped) } else { Ok(()) }
    }

    pub(super) fn is_durable(&self) -> bool {
        self.durable + 1 == self.cursor.frame
    }

    /// Writes a frame of `count` commits, with a payload of `len` bytes that `encode` appends. The frame is not durable yet.
    pub(super) fn append(
        &mut self,
        kind: FrameKind,
        count: u32,
        len: u32,
        encode: impl FnOnce(&mut Vec<u8>),
    ) -> Result<(), EngineError> {
        self.check()?;
        let frame_len = (HEADER_BYTES + len as usize).next_multiple_of(ALIGN_BYTES);
        if self.page_offset + (self.buffer.len() + frame_len) as u64 > self.segment.capacity {
            self.rotate_or_extend()?;
        }
        let start = self.buffer.len();
        self.buffer.resize(start + HEADER_BYTES, 0);
        encode(&mut self.buffer);
        debug_assert_eq!(self.buffer.len(), start + HEADER_BYTES + len as usize);
        let (before, payload) = self.buffer.split_at_mut(start + HEADER_BYTES);
        let Cursor { log, frame, sequence, chain, .. } = self.cursor;
        let header = FrameHeader {
            kind,
            is_relaxed: self.is_relaxed,
            payload_crc: crc32c::crc32c(payload),
            len,
            log,
            segment: self.segment.number,
            number: frame,
            sequence,
            durable: self.durable,
            chain,
            count,
        };
        let Some(header_bytes) = before.last_chunk_mut() else { return Ok(()) };
        let chain = header.write(header_bytes);
        let end = start + frame_len;
        self.buffer.resize(end.next_multiple_of(PAGE_BYTES), 0);
        if let Err(source) = self.segment.file.write_at(&self.buffer, self.page_offset) {
            return Err(self.fail(source));
        }
        self.cursor.frame += 1;
        self.cursor.sequence += u64::from(count);
        self.cursor.chain = chain;
        self.appended += frame_len as u64;

        let written = end / PAGE_BYTES * PAGE_BYTES;
        self.buffer.copy_within(written..end, 0);
        self.buffer.truncate(end - written);
        self.page_offset += written as u64;
        Ok(())
    }

    /// Syncs the frames written so far.
    pub(super) fn sync(&mut self) -> Result<(), EngineError> {
        self.check()?;
        if !self.is_durable() {
            self.syncs += 1;
            if let Err(source) = self.segment.file.sync_data() {
                return Err(self.fail(source));
            }
            self.durable = self.cursor.frame - 1;
        }
        Ok(())
    }

    /// Continues in the next segment, or extends the current segment if no file descriptor is left for the next one.
    fn rotate_or_extend(&mut self) -> Result<(), EngineError> {
        let rotated = self.rotate();
        match &rotated {
            Err(EngineError::NoSegment { source, .. }) if is_out_of_descriptors(source) => {}
            _ => return rotated,
        }
        let capacity = self.segment.capacity + self.data_dir.segment_bytes;
        if capacity > MAX_SEGMENT_BYTES {
            return rotated;
        }
        let (number, used) = self.end();
        if let Err(source) = self.segment.extend(capacity, used) {
            return Err(EngineError::NoSegment { file: self.data_dir.segment(number + 1), source });
        }
        self.syncs += 1;
        // If this sync fails, frames that were written before may be lost.
        if let Err(source) = self.segment.file.sync_all() {
            return Err(self.fail(source));
        }
        self.durable = self.cursor.frame - 1;
        self.segment.capacity = capacity;
        self.prepare_next_segment();
        Ok(())
    }

    /// Continues in the next segment, with the current layout. On [`EngineError::NoSegment`] nothing has changed.
    pub(super) fn rotate(&mut self) -> Result<(), EngineError> {
        let number = self.segment.number + 1;
        let created = match self.next.take().map(|next| next.recv()) {
            Some(Ok(Ok(segment))) => Ok(segment),
            // The preparation failed or was not started. The cause may have been temporary.
            _ => Segment::create(&self.data_dir, number, None),
        };
        let next = created.map_err(|source| EngineError::NoSegment { file: self.data_dir.segment(number), source })?;
        self.sync()?;
        self.segment = next;
        let Cursor { log, epoch, frame, sequence, chain } = self.cursor;
        self.page_offset = 0;
        self.buffer.clear();
        let layout = Layout::CURRENT;
        SegmentHeader { layout, log, number, epoch, sequence, frame, chain, is_relaxed: self.is_relaxed }
            .write(&mut self.buffer);
        self.prepare_next_segment();
        Ok(())
    }

    fn fail(&mut self, source: io::Error) -> EngineError {
        self.has_failed = true;
        let file: PathBuf = self.segment.path.clone();
        EngineError::OutcomeUnknown { file, source }
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        // Waits for the background thread, so that the directory is unlocked when the log is dropped.
        if let Some(next) = self.next.take() {
            let _ = next.recv();
        }
    }
}
