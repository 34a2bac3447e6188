//! The limit of file descriptors, which bounds the number of connections: each has one.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tidewire::config::Config;

/// Descriptors for everything else: the files of the engine, backups, the listener, sockets that are refused, the runtime.
const RESERVED: u64 = 64;

/// Raises the soft limit of descriptors to the hard limit, and lowers the limit of connections to what it allows. Adds a warning if
/// that is fewer than configured.
pub(crate) fn limit_connections(config: &mut Config) {
    let Some(limit) = raise() else { return };
    let possible = usize::try_from(limit.saturating_sub(RESERVED)).unwrap_or(usize::MAX).max(1);
    let configured = config.server.max_connections;
    if configured <= possible {
        return;
    }
    config.server.max_connections = possible;
    config.warnings.push(format!(
        "`maxConnections` is {configured}, but the limit of open files ({limit}, of which {RESERVED} are reserved) allows only \
         {possible} connections: raise it, for example with `ulimit -Hn` or LimitNOFILE, or lower `maxConnections`"
    ));
}

/// Raises the soft limit of descriptors to the hard limit. Returns the limit that applies, or `None` if there is none.
fn raise() -> Option<u64> {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    // If the system refuses it, the soft limit stays.
    if current != maximum && setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).is_ok() {
        return maximum;
    }
    current
}
