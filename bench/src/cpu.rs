//! CPU time of this process and of others, in nanoseconds, including threads that have ended.

use std::io;
use std::time::Duration;

use nix::sys::time::TimeSpec;
use nix::time::{ClockId, clock_getcpuclockid, clock_gettime};
use nix::unistd::Pid;

/// The CPU-time clock of a process.
#[derive(Clone, Copy, Debug)]
pub struct CpuClock(ClockId);

impl CpuClock {
    /// Returns the clock of the calling process.
    pub fn of_this_process() -> Self {
        Self(ClockId::CLOCK_PROCESS_CPUTIME_ID)
    }

    /// Returns the clock of another process. Fails if no process has this id.
    pub fn of(pid: u32) -> io::Result<Self> {
        Ok(Self(clock_getcpuclockid(Pid::from_raw(pid.cast_signed()))?))
    }

    /// Returns the CPU time used so far.
    ///
    /// # Panics
    ///
    /// If the process has ended.
    pub fn now(self) -> Duration {
        clock_gettime(self.0).map(TimeSpec::into).expect("the process whose CPU time is measured has ended")
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn clock_of_a_busy_child_advances() {
        let mut child = Command::new("sh").args(["-c", "while kill -0 $PPID; do :; done"]).spawn().unwrap();
        let clock = CpuClock::of(child.id()).unwrap();
        let before = clock.now();
        while clock.now() == before {
            std::thread::yield_now();
        }
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(CpuClock::of(child.id()).is_err());
    }

    #[test]
    fn work_advances_the_clock_of_this_process() {
        let clock = CpuClock::of_this_process();
        let before = clock.now();
        while clock.now() == before {}
    }
}
