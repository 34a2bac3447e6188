//! The hook for slow commands.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::Error;

/// Who is told of commands that took long.
#[derive(Clone)]
pub struct Slow {
    after: Duration,
    hook: Arc<dyn Fn(SlowCommand<'_>) + Send + Sync>,
}

impl Slow {
    /// Tells of commands that took at least so long, from submission to the end, however they ended.
    ///
    /// The hook is called on the task that asked, before it has its reply, and never where connections are served: a slow one
    /// makes nobody else wait. Of a call that was given up nobody is told.
    pub fn after(duration: Duration, hook: impl Fn(SlowCommand<'_>) + Send + Sync + 'static) -> Self {
        Self { after: duration, hook: Arc::new(hook) }
    }

    pub(crate) fn tell(&self, command: SlowCommand<'_>) {
        if command.elapsed >= self.after {
            (self.hook)(command);
        }
    }
}

impl fmt::Debug for Slow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slow").field("after", &self.after).finish_non_exhaustive()
    }
}

/// A command that took long. Its arguments may be secret and are not told.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct SlowCommand<'a> {
    /// The name of the command, as it was written; of a pipeline, that of the first.
    pub name: &'a str,
    /// How many commands there were.
    pub commands: usize,
    /// Their bytes.
    pub bytes: usize,
    /// How long it took.
    pub elapsed: Duration,
    /// Why it failed, if there was no reply. A reply that is an error of the server is none of these.
    pub error: Option<&'a Error>,
}

/// The name of an encoded command. What is not one has none.
pub(crate) fn name(command: &[u8]) -> &str {
    fn named(command: &[u8]) -> Option<&str> {
        let mut lines = command.splitn(4, |byte| *byte == b'\n');
        let (_, len) = (lines.next()?, lines.next()?);
        let len: usize = std::str::from_utf8(len).ok()?.trim_end().strip_prefix('$')?.parse().ok()?;
        std::str::from_utf8(lines.next()?.get(..len)?).ok()
    }
    named(command).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_has_a_name_and_anything_else_has_none() {
        let mut command = Vec::new();
        crate::encode_command(&["HGETALL", "secret"], &mut command);
        assert_eq!(name(&command), "HGETALL");
        for end in 0..command.len() {
            assert!(matches!(name(&command[..end]), "" | "HGETALL"), "{end}");
        }
        for other in [&b""[..], b"PING\r\n", b"*1\r\n$x\r\nPING\r\n", b"*1\r\n$9\r\nPING\r\n", b"*1\r\n$1\r\n\xff\r\n"]
        {
            assert_eq!(name(other), "");
        }
    }
}
