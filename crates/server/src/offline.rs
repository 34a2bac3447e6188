//! The `backup` and `restore` commands, which work on the data directory of a stopped server.
//!
//! A backup locks the data directory: it fails if a server is running, and no server can start on the directory until it is done. It
//! verifies all files and does not modify them.

use std::fmt::Write as _;
use std::io;
use std::path::Path;

use anyhow::{Context as _, bail};
use tidewire_store::engine::{BackupError, CopyError, Embedded, EmbeddedOptions, OpenError, Recovery};
use tidewire_store::{Position, Store, StoreOpenError, StoreOptions};

/// Copies a data directory to a new or empty directory. Returns the summary to print.
pub(crate) fn backup(data_dir: &Path, to: &Path) -> anyhow::Result<String> {
    if !has_data(data_dir).with_context(|| format!("cannot read the data directory {}", data_dir.display()))? {
        bail!("{} is not a data directory; set it with --data-dir or --config", data_dir.display());
    }
    if !is_new_or_empty(to).with_context(|| format!("cannot read {}", to.display()))? {
        bail!("{} is not empty; specify a new or empty directory", to.display());
    }
    if std::path::absolute(to)?.starts_with(std::path::absolute(data_dir)?) {
        bail!("{} is inside the data directory {}; specify another directory", to.display(), data_dir.display());
    }
    let position = match Embedded::backup_dir(data_dir, to) {
        Err(CopyError::Open(OpenError::Locked { .. })) => bail!(
            "the data directory {} is in use by a running server; stop the server, or use the operation `server.backup` to \
             back it up while it is running",
            data_dir.display()
        ),
        copied => copied.with_context(|| format!("cannot back up {} to {}", data_dir.display(), to.display()))?,
    };

    let mut summary = format!("Backed up {} to {}\n", data_dir.display(), to.display());
    describe(to, position, &mut summary)?;
    writeln!(summary, "To restore it, run: tidewire restore {} --data-dir DIR", to.display())?;
    Ok(summary)
}

/// Creates a data directory with a new epoch from a backup, and verifies it by loading it. Returns the summary to print.
pub(crate) fn restore(from: &Path, data_dir: &Path) -> anyhow::Result<String> {
    if !has_data(from).with_context(|| format!("cannot read the backup {}", from.display()))? {
        bail!("{} is not a backup", from.display());
    }
    if !is_new_or_empty(data_dir).with_context(|| format!("cannot read {}", data_dir.display()))? {
        bail!(
            "the data directory {} is not empty; move it away, or specify another one with --data-dir",
            data_dir.display()
        );
    }
    let restored = Embedded::restore(from, data_dir, EmbeddedOptions::default());
    let Recovery { position, .. } = match restored {
        Ok(recovery) => recovery,
        // Another process has created the data directory concurrently.
        Err(error @ CopyError::Write(BackupError::NotEmpty { .. })) => return Err(error).context("cannot restore"),
        Err(CopyError::Open(OpenError::Locked { dir })) => {
            bail!("{} is in use by a running server; restore from a backup, not from a data directory", dir.display())
        }
        Err(error) => return Err(error).with_context(|| restore_context(from, data_dir)),
    };
    // The engine has verified the files. Loading them verifies the records and definitions as well.
    let (store, _) = open(data_dir).with_context(|| restore_context(from, data_dir))?;
    let buckets = store.stats().buckets;
    store.close().with_context(|| format!("cannot close the data directory {}", data_dir.display()))?;

    let mut summary = format!("Restored {} to {}\n", from.display(), data_dir.display());
    let records: usize = buckets.iter().map(|bucket| bucket.records).sum();
    writeln!(
        summary,
        "  records:  {records} in {} bucket{}",
        buckets.len(),
        if buckets.len() == 1 { "" } else { "s" }
    )?;
    describe(from, position, &mut summary)?;
    writeln!(summary, "To start the server, run: tidewire --data-dir {}", data_dir.display())?;
    Ok(summary)
}

/// Returns the context of a failed restore. If the restore has left an incomplete copy, the context asks the user to remove it.
fn restore_context(from: &Path, data_dir: &Path) -> String {
    let from = from.display();
    match is_new_or_empty(data_dir) {
        Ok(true) => format!("cannot restore {from}"),
        _ => format!("cannot restore {from}; remove the incomplete copy {} before trying again", data_dir.display()),
    }
}

/// Opens a data directory without deleting expired records.
fn open(dir: &Path) -> Result<(Store, Recovery), StoreOpenError> {
    Store::open(dir, StoreOptions::default().sweep_interval(None))
}

/// Returns whether a directory has files of the embedded engine. Opening a directory without them would create them.
fn has_data(dir: &Path) -> io::Result<bool> {
    for entry in std::fs::read_dir(dir)? {
        let name = entry?.file_name();
        let name = name.to_string_lossy();
        if name.starts_with("log-") || name.starts_with("snapshot-") {
            return Ok(true);
        }
    }
    Ok(false)
}

fn is_new_or_empty(dir: &Path) -> io::Result<bool> {
    match std::fs::read_dir(dir) {
        Ok(mut entries) => entries.next().transpose().map(|first| first.is_none()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(true),
        Err(error) => Err(error),
    }
}

/// Appends the size and position of a copy.
fn describe(dir: &Path, position: Position, summary: &mut String) -> anyhow::Result<()> {
    let bytes = disk_bytes(dir).with_context(|| format!("cannot read {}", dir.display()))?;
    writeln!(summary, "  bytes:    {bytes}")?;
    writeln!(summary, "  position: {position}")?;
    Ok(())
}

/// Returns the total size of the files in a directory.
fn disk_bytes(dir: &Path) -> io::Result<u64> {
    let mut bytes = 0;
    for entry in std::fs::read_dir(dir)? {
        bytes += entry?.metadata()?.len();
    }
    Ok(bytes)
}
