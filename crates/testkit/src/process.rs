//! Child processes that tests can kill, and that never outlive the test.
//!
//! Dropping a [`Process`] kills it, which covers tests that return or panic. For a test that is killed or aborts, the kernel kills it:
//! `PR_SET_PDEATHSIG` sends SIGKILL when the parent *thread* ends. Tests run on short-lived threads and may share a server, so one
//! thread that lives as long as the process spawns all children.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::prctl;
use nix::sys::signal::{SigHandler, Signal, kill, signal};
use nix::unistd::{Pid, getpid, getppid};

use crate::wait::{PATIENCE, wait_until};

/// Number of output lines that are kept, enough to see why a child failed.
const MAX_OUTPUT_LINES: usize = 1000;
const MAX_LINE_BYTES: u64 = 64 * 1024;

/// The time to wait for the end of the output after the child has ended. It takes longer only if a grandchild holds the pipes open.
const OUTPUT_GRACE: Duration = Duration::from_secs(5);

/// Environment variable with the name of the test that a rerun process was started for.
const RERUN_ENV: &str = "TIDEWIRE_TESTKIT_RERUN";

/// A child process with its output captured.
///
/// It is killed on drop, and by the kernel when this process dies in any other way.
pub struct Process {
    program: String,
    child: Child,
    output: Arc<Output>,
}

impl Process {
    /// Starts `command`.
    ///
    /// # Panics
    ///
    /// If the program cannot be started.
    #[track_caller]
    pub fn spawn(command: Command) -> Self {
        let program = command.get_program().to_string_lossy().into_owned();
        Self::try_spawn(command).unwrap_or_else(|error| panic!("cannot start {program}: {error}"))
    }

    /// Starts `command`.
    ///
    /// # Errors
    ///
    /// If the program cannot be started.
    pub fn try_spawn(mut command: Command) -> io::Result<Self> {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let program = command.get_program().to_string_lossy().into_owned();
        let mut child = spawn_tied(command)?;
        let output = Arc::new(Output::default());
        let pipes: [(Pipe, Option<Box<dyn Read + Send>>); 2] = [
            (Pipe::Stdout, child.stdout.take().map(|pipe| Box::new(pipe) as _)),
            (Pipe::Stderr, child.stderr.take().map(|pipe| Box::new(pipe) as _)),
        ];
        output.lock().open = pipes.len();
        for (name, pipe) in pipes.into_iter().filter_map(|(name, pipe)| Some((name, pipe?))) {
            // Not joined, because a grandchild may hold the pipe open.
            let output = Arc::clone(&output);
            thread::spawn(move || output.read(name, pipe));
        }
        Ok(Self { program, child, output })
    }

    /// Returns the ID of the process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for a line of its output (standard output or error) that contains `text`, and returns what follows it on
    /// that line. Lines that came before the call count, as far as [`output`](Self::output) still has them.
    ///
    /// # Panics
    ///
    /// If the output ends or a minute passes without such a line.
    #[track_caller]
    pub fn wait_for_line(&self, text: &str) -> String {
        match self.output.wait_for(text, PATIENCE) {
            Some(rest) => rest,
            None => panic!("{} never printed {text:?}. It printed:\n{}", self.program, self.output()),
        }
    }

    /// Returns the last thousand lines of its output.
    pub fn output(&self) -> String {
        self.output.lines_of(|_| true)
    }

    /// Returns the part of [`output`](Self::output) from standard output.
    pub fn stdout(&self) -> String {
        self.output.lines_of(|pipe| pipe == Pipe::Stdout)
    }

    /// Returns the part of [`output`](Self::output) from standard error.
    pub fn stderr(&self) -> String {
        self.output.lines_of(|pipe| pipe == Pipe::Stderr)
    }

    /// Sends SIGTERM.
    pub fn terminate(&self) {
        self.signal(Signal::SIGTERM);
    }

    /// Sends SIGINT, like Ctrl-C in a terminal.
    pub fn interrupt(&self) {
        self.signal(Signal::SIGINT);
    }

    /// Sends SIGHUP, on which daemons reload their settings.
    pub fn hangup(&self) {
        self.signal(Signal::SIGHUP);
    }

    /// Sends SIGKILL, and waits until the process has ended.
    pub fn kill(&mut self) {
        // Both fail only for a child that has been waited for already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Pauses the process with SIGSTOP. Returns when it has stopped.
    pub fn pause(&self) {
        self.signal(Signal::SIGSTOP);
        wait_until("the process has stopped", PATIENCE, || matches!(state(self.pid()), Some('T' | 'Z') | None));
    }

    /// Continues a paused process with SIGCONT.
    pub fn resume(&self) {
        self.signal(Signal::SIGCONT);
    }

    /// Returns the exit status, if the process has ended.
    ///
    /// # Panics
    ///
    /// If something else has waited for the process.
    pub fn try_wait(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("no other code waits for the child")
    }

    /// Waits until the process has ended. [`output`](Self::output) is complete then, unless a grandchild still runs.
    ///
    /// # Panics
    ///
    /// If that takes longer than a minute.
    #[track_caller]
    pub fn wait(&mut self) -> ExitStatus {
        let mut status = None;
        wait_until(&format!("{} ends", self.program), PATIENCE, || {
            status = self.try_wait();
            status.is_some()
        });
        self.output.wait_for_end(OUTPUT_GRACE);
        status.expect("wait_until returned")
    }

    fn signal(&self, signal: Signal) {
        match kill(pid(self.child.id()), signal) {
            // The process may have just ended.
            Ok(()) | Err(Errno::ESRCH) => {}
            Err(error) => panic!("cannot send {signal} to {}: {error}", self.program),
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

impl fmt::Debug for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Process").field("program", &self.program).field("pid", &self.pid()).finish_non_exhaustive()
    }
}

/// Returns a command that runs one test of this test binary, named with its module path, in a new process.
///
/// The test calls [`is_rerun`] to know whether it is in that process:
///
/// ```no_run
/// use tidewire_testkit::{Process, is_rerun, rerun};
///
/// // #[test]
/// fn survives_a_kill() {
///     if is_rerun() {
///         println!("writing");
///         loop { /* work that is interrupted */ }
///     }
///     let mut child = Process::spawn(rerun("survives_a_kill"));
///     child.wait_for_line("writing");
///     child.kill();
///     // … check what it left behind
/// }
/// ```
///
/// # Panics
///
/// If the path of this executable is unknown.
pub fn rerun(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this executable has a path"));
    command.args([test, "--exact", "--nocapture"]).env(RERUN_ENV, test);
    command
}

/// Returns whether this process was started by [`rerun`].
pub fn is_rerun() -> bool {
    std::env::var_os(RERUN_ENV).is_some()
}

/// Returns whether a process with this ID runs. A zombie does not.
pub fn is_running(pid: u32) -> bool {
    !matches!(state(pid), None | Some('Z' | 'X'))
}

/// Returns the state letter in /proc/PID/stat. It follows the name in parentheses, which can contain anything.
fn state(pid: u32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

fn pid(id: u32) -> Pid {
    Pid::from_raw(id.try_into().expect("a process id fits i32"))
}

type Reply = SyncSender<io::Result<Child>>;

/// Spawns a child that is killed when this process ends. See the module documentation.
pub(crate) fn spawn_tied(mut command: Command) -> io::Result<Child> {
    static SPAWNER: LazyLock<SyncSender<(Command, Reply)>> = LazyLock::new(|| {
        let (requests, queue) = sync_channel::<(Command, Reply)>(0);
        thread::Builder::new()
            .name("testkit-spawner".into())
            .spawn(move || {
                while let Ok((mut command, reply)) = queue.recv() {
                    // Cannot fail: the caller waits for the reply.
                    let _ = reply.send(command.spawn());
                }
            })
            .expect("a thread can be started");
        requests
    });

    let parent = getpid();
    // SAFETY: between fork and exec only async-signal-safe calls are allowed; prctl, getppid and signal are, and the errors are
    // made from plain numbers without allocating.
    unsafe {
        command.pre_exec(move || {
            prctl::set_pdeathsig(Signal::SIGKILL)?;
            // A shell starts background jobs with SIGINT ignored, which a child would inherit and could not change.
            signal(Signal::SIGINT, SigHandler::SigDfl)?;
            // The parent may have died before the line above.
            if getppid() == parent { Ok(()) } else { Err(Errno::ESRCH.into()) }
        });
    }
    let (reply, answer) = sync_channel(1);
    SPAWNER.send((command, reply)).expect("the spawner never ends");
    answer.recv().expect("the spawner answers")
}

/// The source of a line.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pipe {
    Stdout,
    Stderr,
}

/// The lines a child has printed, from both of its pipes.
#[derive(Default)]
struct Output {
    lines: Mutex<Lines>,
    changed: Condvar,
}

#[derive(Default)]
struct Lines {
    kept: VecDeque<(Pipe, String)>,
    /// The number of lines before the kept ones.
    dropped: usize,
    /// The number of pipes that are still open.
    open: usize,
}

impl Output {
    fn lock(&self) -> MutexGuard<'_, Lines> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read(&self, name: Pipe, pipe: Box<dyn Read + Send>) {
        let mut pipe = BufReader::new(pipe);
        let mut line = Vec::new();
        while matches!((&mut pipe).take(MAX_LINE_BYTES).read_until(b'\n', &mut line), Ok(1..)) {
            let mut lines = self.lock();
            if lines.kept.len() == MAX_OUTPUT_LINES {
                lines.kept.pop_front();
                lines.dropped += 1;
            }
            lines.kept.push_back((name, String::from_utf8_lossy(&line).trim_end().to_owned()));
            self.changed.notify_all();
            line.clear();
        }
        self.lock().open -= 1;
        self.changed.notify_all();
    }

    fn lines_of(&self, is_included: impl Fn(Pipe) -> bool) -> String {
        let lines = self.lock();
        let included = lines.kept.iter().filter(|(pipe, _)| is_included(*pipe));
        included.map(|(_, line)| line.as_str()).collect::<Vec<_>>().join("\n")
    }

    fn wait_for_end(&self, timeout: Duration) {
        let open = |lines: &mut Lines| lines.open > 0;
        drop(self.changed.wait_timeout_while(self.lock(), timeout, open));
    }

    fn wait_for(&self, text: &str, timeout: Duration) -> Option<String> {
        let start = Instant::now();
        let mut lines = self.lock();
        let mut searched = 0;
        loop {
            let unseen = searched.max(lines.dropped) - lines.dropped;
            if let Some((_, rest)) = lines.kept.iter().skip(unseen).find_map(|(_, line)| line.split_once(text)) {
                return Some(rest.to_owned());
            }
            searched = lines.dropped + lines.kept.len();
            let left = timeout.checked_sub(start.elapsed())?;
            if lines.open == 0 {
                return None;
            }
            lines = self.changed.wait_timeout(lines, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
