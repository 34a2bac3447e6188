//! The memory available to the process, from which default limits are derived.

use std::fs;
use std::path::{Path, PathBuf};

/// Returns the memory that the process may use: that of the machine, or the limit of its control group if that is lower. Returns
/// `None` if neither is known.
pub(crate) fn memory_bytes() -> Option<u64> {
    memory_bytes_in(Path::new("/"))
}

/// Reads `/proc` and `/sys` below `root`.
fn memory_bytes_in(root: &Path) -> Option<u64> {
    let machine = fs::read_to_string(root.join("proc/meminfo")).ok().and_then(|text| parse_mem_total(&text));
    let groups = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let limits = groups.lines().flat_map(|line| limit_files(root, line));
    // Without a limit, cgroup v2 has the text `max`, which does not parse, and v1 has a number above any memory size.
    let limits = limits.filter_map(|file| fs::read_to_string(file).ok()?.trim().parse().ok());
    machine.into_iter().chain(limits).filter(|bytes| *bytes > 0).min()
}

/// Returns the value of `MemTotal` in `/proc/meminfo`.
fn parse_mem_total(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1024)
}

/// Returns the files with the memory limits of a control group and its ancestors, given its line of `/proc/self/cgroup`. In a
/// container the path may be that of the host; then only the file at the root exists.
fn limit_files(root: &Path, line: &str) -> Vec<PathBuf> {
    let mut parts = line.splitn(3, ':');
    let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next()) else {
        return Vec::new();
    };
    let (hierarchy, file) = if controllers.is_empty() {
        ("sys/fs/cgroup", "memory.max")
    } else if controllers.split(',').any(|controller| controller == "memory") {
        ("sys/fs/cgroup/memory", "memory.limit_in_bytes")
    } else {
        return Vec::new();
    };
    let hierarchy = root.join(hierarchy);
    let groups = Path::new(path.trim_start_matches('/')).ancestors();
    groups.map(|group| hierarchy.join(group).join(file)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    /// Returns the memory that is detected in a root directory with these files.
    fn machine(files: &[(&str, &str)]) -> Option<u64> {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        memory_bytes_in(root.path())
    }

    const EIGHT_GIB: (&str, &str) =
        ("proc/meminfo", "MemFree:  123 kB\nMemTotal:        8388608 kB\nSwapTotal: 0 kB\n");

    #[test]
    fn lowest_limit_applies() {
        assert_eq!(machine(&[EIGHT_GIB]), Some(8 * GIB));
        let group = ("proc/self/cgroup", "0::/a.slice/b.service\n");
        let of = |path, text| machine(&[EIGHT_GIB, group, (path, text)]);
        assert_eq!(of("sys/fs/cgroup/a.slice/b.service/memory.max", "1073741824\n"), Some(GIB));
        assert_eq!(of("sys/fs/cgroup/a.slice/memory.max", "2147483648\n"), Some(2 * GIB), "of a containing group");
        assert_eq!(of("sys/fs/cgroup/memory.max", "3221225472\n"), Some(3 * GIB), "of a container");
        assert_eq!(of("sys/fs/cgroup/a.slice/b.service/memory.max", "max\n"), Some(8 * GIB));
        assert_eq!(of("sys/fs/cgroup/other/memory.max", "1\n"), Some(8 * GIB));
    }

    #[test]
    fn cgroup_v1_limits_apply() {
        let groups = ("proc/self/cgroup", "9:cpu,cpuacct:/x\n4:memory:/docker/1f\n0::/\n");
        let limit = "sys/fs/cgroup/memory/docker/1f/memory.limit_in_bytes";
        assert_eq!(machine(&[EIGHT_GIB, groups, (limit, "536870912\n")]), Some(GIB / 2));
        assert_eq!(machine(&[EIGHT_GIB, groups, (limit, "9223372036854771712\n")]), Some(8 * GIB));
        let of_container = "sys/fs/cgroup/memory/memory.limit_in_bytes";
        assert_eq!(machine(&[EIGHT_GIB, groups, (of_container, "536870912\n")]), Some(GIB / 2));
    }

    #[test]
    fn unreadable_or_invalid_files_are_ignored() {
        assert_eq!(machine(&[]), None);
        assert_eq!(machine(&[("proc/meminfo", "MemTotal: many\n"), ("proc/self/cgroup", "nonsense")]), None);
    }

    #[test]
    fn memory_of_this_machine_is_detected() {
        assert!(memory_bytes().is_some_and(|bytes| bytes > 1 << 20));
    }
}
