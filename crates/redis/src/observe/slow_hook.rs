//! The hook for slow commands.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::Error;

/// A function that is called for commands that took long.
#[derive(Clone)]
pub struct SlowHook {
    threshold: Duration,
    hook: Arc<dyn Fn(SlowCommand<'_>) + Send + Sync>,
}

impl SlowHook {
    /// Calls `hook` for commands that took at least `threshold`, from submission to the end, successful or not.
    ///
    /// The hook is called on the task that sent the command, before the task has its reply, and never on the task of the
    /// connection: a slow hook delays no other task. It is not called for a request whose future was dropped.
    pub fn new(threshold: Duration, hook: impl Fn(SlowCommand<'_>) + Send + Sync + 'static) -> Self {
        Self { threshold, hook: Arc::new(hook) }
    }

    pub(crate) fn observe(&self, command: SlowCommand<'_>) {
        if command.elapsed >= self.threshold {
            (self.hook)(command);
        }
    }
}

impl fmt::Debug for SlowHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SlowHook").field("threshold", &self.threshold).finish_non_exhaustive()
    }
}

/// A command that took long, without its arguments, which may be secret.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct SlowCommand<'a> {
    /// The name of the command as it was written; the first name of a pipeline.
    pub name: &'a str,
    /// The number of commands.
    pub commands: usize,
    /// The bytes of the encoded commands.
    pub bytes: usize,
    /// The time from submission to the end.
    pub elapsed: Duration,
    /// Why there was no reply. An error reply of the server does not count.
    pub error: Option<&'a Error>,
}

/// Returns the name of an encoded command, or an empty string if it is not a command.
pub(crate) fn name(command: &[u8]) -> &str {
    fn parse(command: &[u8]) -> Option<&str> {
        let mut lines = command.splitn(4, |byte| *byte == b'\n');
        let (_, len) = (lines.next()?, lines.next()?);
        let len: usize = std::str::from_utf8(len).ok()?.trim_end().strip_prefix('$')?.parse().ok()?;
        std::str::from_utf8(lines.next()?.get(..len)?).ok()
    }
    parse(command).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_of_a_command_is_found() {
        let mut command = Vec::new();
        crate::resp::encode_command(&["HGETALL", "secret"], &mut command);
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
