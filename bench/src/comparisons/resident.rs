//! The resident memory of a process.

use std::fs;

/// Returns the resident memory of a process in bytes. Reads `smaps_rollup`, which is exact; other files under /proc are estimates.
pub(super) fn resident_bytes(pid: u32) -> u64 {
    let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).expect("the process is running");
    let resident = rollup.lines().find_map(|line| line.strip_prefix("Rss:")).expect("smaps_rollup has a line Rss");
    let kilobytes: u64 = resident.trim().trim_end_matches(" kB").parse().expect("a number of kB");
    1024 * kilobytes
}
