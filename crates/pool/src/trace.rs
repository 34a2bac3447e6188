//! Trace contexts, which connect the messages of a trace across threads and processes.

use std::cell::Cell;
use std::fmt;
use std::str::FromStr;

/// A W3C trace context: which trace a message belongs to, and which span caused it.
///
/// It is part of the message, because a thread-local would be lost on another thread. It is parsed from a `traceparent` header, and
/// displayed as one.
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

/// Error of parsing a `traceparent` header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// The header does not have the format `version-trace-span-flags`, in lower-case hexadecimal digits.
    #[error("expected a traceparent 00-<32 hex digits>-<16 hex digits>-<2 hex digits>, in lower case")]
    Malformed,
    /// The trace id or the span id is zero, which the standard forbids.
    #[error("the trace id and the span id of a traceparent must not be zero")]
    Zero,
}

thread_local! {
    static CURRENT: Cell<TraceContext> = const { Cell::new(TraceContext::NONE) };
}

impl TraceContext {
    /// The context of a message without a trace. The default.
    pub const NONE: Self = Self { trace: [0; 2], span: 0, flags: 0 };

    /// Creates the context of a new, sampled trace.
    pub fn root() -> Self {
        Self { trace: [nonzero(), nonzero()], span: nonzero(), flags: 1 }
    }

    /// Creates a context with a new span in the same trace. Returns [`NONE`](Self::NONE) for `NONE`.
    #[must_use]
    pub fn child(self) -> Self {
        if self.is_none() { self } else { Self { span: nonzero(), ..self } }
    }

    /// Returns the context of the message that this thread is handling in an [`Observed`](crate::Observed) handler, or else
    /// [`NONE`](Self::NONE).
    pub fn current() -> Self {
        CURRENT.get()
    }

    /// Makes this the current context of the thread until the guard is dropped.
    pub(crate) fn enter(self) -> Entered {
        Entered { before: CURRENT.replace(self) }
    }

    /// Returns whether there is no trace.
    pub fn is_none(self) -> bool {
        self.trace == [0; 2]
    }

    /// Returns the id of the trace.
    pub fn trace_id(self) -> u128 {
        u128::from(self.trace[0]) << 64 | u128::from(self.trace[1])
    }

    /// Returns the id of the span that caused the message.
    pub fn span_id(self) -> u64 {
        self.span
    }

    /// Returns whether the process that began the trace records it.
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
    /// Formats the context as a `traceparent` header.
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
        // A later version may append fields, which are ignored. Version 00 must not have them, and ff is forbidden.
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
