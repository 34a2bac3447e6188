//! Trace contexts: the trace that a message belongs to, across threads and processes.

use std::cell::Cell;
use std::fmt;
use std::str::FromStr;

/// A W3C trace context: which trace a message belongs to, and which span caused it.
///
/// It travels with the message, because a thread-local cannot follow it to another thread. Parse a `traceparent` header to
/// come from another process, format it to go to one.
///
/// ```
/// use tidewire_pool::TraceContext;
///
/// let header = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
/// let context: TraceContext = header.parse()?;
/// assert_eq!(context.to_string(), header);
///
/// let child = context.child();
/// assert_eq!(child.trace_id(), context.trace_id());
/// assert_ne!(child.span_id(), context.span_id());
/// # Ok::<(), tidewire_pool::TraceError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct TraceContext {
    trace: [u64; 2],
    span: u64,
    flags: u8,
}

/// Why a `traceparent` header is not one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// Not `version-trace-span-flags`, in lower-case hexadecimal digits of the right number.
    #[error("a traceparent is 00-<32 hex digits>-<16 hex digits>-<2 hex digits>, in lower case")]
    Malformed,
    /// The standard forbids ids that are all zero.
    #[error("the trace id and the span id of a traceparent are not zero")]
    Zero,
}

thread_local! {
    static CURRENT: Cell<TraceContext> = const { Cell::new(TraceContext::NONE) };
}

impl TraceContext {
    /// Of no trace. The default.
    pub const NONE: Self = Self { trace: [0; 2], span: 0, flags: 0 };

    /// A new trace, sampled.
    pub fn root() -> Self {
        Self { trace: [nonzero(), nonzero()], span: nonzero(), flags: 1 }
    }

    /// A new span of the same trace. The child of none is none.
    #[must_use]
    pub fn child(self) -> Self {
        if self.is_none() { self } else { Self { span: nonzero(), ..self } }
    }

    /// The context of the message that this thread is handling, under an [`Observed`](crate::Observed) handler; else none.
    pub fn current() -> Self {
        CURRENT.get()
    }

    /// Makes it the current one until the guard is dropped.
    pub(crate) fn enter(self) -> Entered {
        Entered { before: CURRENT.replace(self) }
    }

    /// Whether it belongs to no trace.
    pub fn is_none(self) -> bool {
        self.trace == [0; 2]
    }

    /// The id of the trace.
    pub fn trace_id(self) -> u128 {
        u128::from(self.trace[0]) << 64 | u128::from(self.trace[1])
    }

    /// The id of the span that caused the message.
    pub fn span_id(self) -> u64 {
        self.span
    }

    /// Returns whether the trace is recorded by the process that began it.
    pub fn is_sampled(self) -> bool {
        self.flags & 1 == 1
    }
}

pub(crate) struct Entered {
    before: TraceContext,
}

impl Drop for Entered {
    fn drop(&mut self) {
        CURRENT.set(self.before);
    }
}

fn nonzero() -> u64 {
    fastrand::u64(1..)
}

impl Default for TraceContext {
    fn default() -> Self {
        Self::NONE
    }
}

impl fmt::Display for TraceContext {
    /// As a `traceparent` header.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "00-{:032x}-{:016x}-{:02x}", self.trace_id(), self.span, self.flags)
    }
}

impl fmt::Debug for TraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_none() { f.write_str("TraceContext::NONE") } else { write!(f, "TraceContext({self})") }
    }
}

impl FromStr for TraceContext {
    type Err = TraceError;

    fn from_str(header: &str) -> Result<Self, TraceError> {
        let mut parts = header.split('-');
        let mut hex = |digits: usize| {
            let part = parts.next().filter(|part| part.len() == digits).ok_or(TraceError::Malformed)?;
            if !part.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f')) {
                return Err(TraceError::Malformed);
            }
            u128::from_str_radix(part, 16).map_err(|_| TraceError::Malformed)
        };
        let (version, trace, span, flags) = (hex(2)?, hex(32)?, hex(16)?, hex(2)?);
        // A later version may append fields, which are ignored; version 00 has none, and ff is forbidden.
        if version == 0xff || version == 0 && parts.next().is_some() {
            return Err(TraceError::Malformed);
        }
        if trace == 0 || span == 0 {
            return Err(TraceError::Zero);
        }
        #[expect(clippy::cast_possible_truncation, reason = "each has as many digits as its type holds")]
        Ok(Self { trace: [(trace >> 64) as u64, trace as u64], span: span as u64, flags: flags as u8 })
    }
}
