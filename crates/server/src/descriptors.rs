//! The limit of file descriptors, which bounds the number of connections.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tidewire::config::Config;

/// Descriptors reserved for purposes other than connections: engine files, backups, listeners, rejected sockets and the runtime.
const RESERVED_DESCRIPTORS: u64 = 64;

/// Raises the soft limit of descriptors to the hard limit, lowers `max_connections` to what it allows, and adds a warning if that is
/// less than configured.
pub(crate) fn limit_connections(config: &mut Config) {
    let Some(limit) = raise_soft_limit() else { return };
    let possible = usize::try_from(limit.saturating_sub(RESERVED_DESCRIPTORS)).unwrap_or(usize::MAX).max(1);
    let configured = config.server.max_connections;
    if configured <= possible {
        return;
    }
    config.server.max_connections = possible;
    config.warnings.push(format!(
        "`maxConnections` is {configured}, but the open file limit ({limit}, of which {RESERVED_DESCRIPTORS} are reserved) allows \
         only {possible} connections; raise the limit, for example with `ulimit -Hn` or LimitNOFILE, or lower `maxConnections`"
    ));
}

/// Raises the soft limit of descriptors to the hard limit. Returns the limit in effect; `None` means unlimited.
fn raise_soft_limit() -> Option<u64> {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    // If raising it fails, the soft limit stays in effect.
    if current != maximum && setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).is_ok() {
        return maximum;
    }
    current
}
