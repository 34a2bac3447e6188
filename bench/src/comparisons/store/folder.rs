//! Folders for the stores. They are next to this program, because the system's temporary folder may be in memory.

use std::path::{Path, PathBuf};
use std::{env, fs};

use tempfile::TempDir;

/// Creates a folder, which is deleted when it is dropped.
pub(crate) fn new() -> TempDir {
    TempDir::with_prefix_in("store-", program_folder()).expect("a folder can be created next to this program")
}

/// Returns the file system and the device of the folders.
pub(crate) fn disk() -> String {
    let mounts = fs::read_to_string("/proc/mounts").unwrap_or_default();
    disk_of(&program_folder(), &mounts).unwrap_or_else(|| "an unknown disk".into())
}

fn program_folder() -> PathBuf {
    let program = env::current_exe().expect("this executable has a path");
    program.parent().expect("a file is in a folder").to_owned()
}

/// Returns the file system and device of the innermost mount point above `folder`. The last mount of a mount point wins.
fn disk_of(folder: &Path, mounts: &str) -> Option<String> {
    let above = mounts.lines().filter_map(|line| {
        let mut words = line.split(' ');
        let (device, point, file_system) = (words.next()?, words.next()?, words.next()?);
        folder.starts_with(point).then(|| (Path::new(point).components().count(), format!("{file_system} on {device}")))
    });
    above.max_by_key(|(depth, _)| *depth).map(|(_, disk)| disk)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn innermost_mount_point_determines_the_disk() {
        let mounts =
            "rootfs / rootfs rw 0 0\n/dev/a / ext4 rw 0 0\n/dev/b /home xfs rw 0 0\ntmpfs /homes tmpfs rw 0 0\n";
        let disk = |folder| disk_of(Path::new(folder), mounts);
        assert_eq!(disk("/home/me/target").as_deref(), Some("xfs on /dev/b"));
        assert_eq!(disk("/var").as_deref(), Some("ext4 on /dev/a"));
        assert_eq!(disk_of(Path::new("/var"), ""), None);
    }
}
