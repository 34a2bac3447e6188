//! CPU pinning, so that load generator and server do not compete for a core.

use std::collections::BTreeSet;
use std::panic::resume_unwind;
use std::{fs, io, thread};

use nix::errno::Errno;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

/// The calling thread, in calls of `sched_setaffinity`.
const THIS_THREAD: Pid = Pid::from_raw(0);

/// Returns the cores that the calling thread may run on.
pub fn available_cores() -> io::Result<Vec<usize>> {
    cores_of(THIS_THREAD)
}

/// Runs `work` on a new thread that is pinned to `core`. The affinity of the calling thread does not change.
pub fn run_on_core<T: Send>(core: usize, work: impl FnOnce() -> T + Send) -> io::Result<T> {
    let pinned = || {
        pin(THIS_THREAD, core)?;
        Ok(work())
    };
    thread::scope(|scope| scope.spawn(pinned).join().unwrap_or_else(|panic| resume_unwind(panic)))
}

/// Pins every thread of another process to `core`. Threads that it starts later inherit the affinity.
pub fn pin_process(pid: u32, core: usize) -> io::Result<()> {
    let mut pinned = BTreeSet::new();
    // A thread that is not pinned yet may start another one meanwhile, so passes are repeated until one finds no new thread.
    loop {
        let mut found_new = false;
        for task in fs::read_dir(format!("/proc/{pid}/task"))? {
            let Some(task) = task?.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
            if pinned.insert(task) {
                found_new = true;
                match pin(Pid::from_raw(task), core) {
                    Ok(()) | Err(Errno::ESRCH) => {} // the thread may have ended
                    Err(error) => return Err(error.into()),
                }
            }
        }
        if !found_new {
            return Ok(());
        }
    }
}

fn pin(task: Pid, core: usize) -> nix::Result<()> {
    let mut cores = CpuSet::new();
    cores.set(core)?;
    sched_setaffinity(task, &cores)
}

fn cores_of(task: Pid) -> io::Result<Vec<usize>> {
    let set = sched_getaffinity(task)?;
    Ok((0..CpuSet::count()).filter(|&core| set.is_set(core).unwrap_or(false)).collect())
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn work_is_pinned_and_the_caller_is_not() {
        let before = available_cores().unwrap();
        for &core in &before {
            assert_eq!(run_on_core(core, available_cores).unwrap().unwrap(), [core]);
        }
        assert_eq!(available_cores().unwrap(), before);
    }

    #[test]
    fn unknown_core_is_an_error() {
        run_on_core(CpuSet::count(), || ()).unwrap_err();
    }

    #[test]
    fn another_process_is_pinned() {
        let core = *available_cores().unwrap().last().unwrap();
        // Runs until its standard input is closed.
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        pin_process(child.id(), core).unwrap();
        assert_eq!(cores_of(Pid::from_raw(child.id().cast_signed())).unwrap(), [core]);
        drop(child.stdin.take());
        child.wait().unwrap();
        pin_process(child.id(), core).unwrap_err();
    }
}
