//! The memory of a process.

use std::fs;

/// The resident memory of a process in bytes. The kernel counts page by page, where the other files under /proc are an estimate.
pub(super) fn resident(pid: u32) -> u64 {
    let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).expect("the process lives");
    let resident = rollup.lines().find_map(|line| line.strip_prefix("Rss:")).expect("it has resident memory");
    let kilobytes: u64 = resident.trim().trim_end_matches(" kB").parse().expect("a number of kB");
    1024 * kilobytes
}
