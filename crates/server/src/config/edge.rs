//! Settings of the network edge: the names of the server.

use super::entry::{Entry, Report, warning};
use super::location::Location;
use crate::ServerOptions;
use crate::transport::origin::is_host_name;

/// Where settings were given that depend on others.
#[derive(Default)]
pub(super) struct EdgeLocations {
    allowed_hosts: Option<Location>,
}

impl EdgeLocations {
    pub(super) fn read(&mut self, entry: &Entry<'_>, server: &mut ServerOptions, report: &mut Report) {
        if let Some(hosts) = hosts(entry, report) {
            server.allowed_hosts = hosts;
            self.allowed_hosts = Some(entry.location());
        }
    }

    /// Checks the settings together, after all sources have been read.
    pub(super) fn finish(self, server: &ServerOptions, report: &mut Report) {
        if let Some(location) = self.allowed_hosts.filter(|_| !server.allowed_hosts.is_empty()) {
            let message = if server.allowed_origins.is_some() {
                "it has no effect, because `allowedOrigins` decides alone"
            } else if server.auth.as_ref().is_some_and(|auth| auth.required) {
                "it has no effect, because clients must log in, and then pages of any origin may connect"
            } else {
                return;
            };
            report.warnings.push(warning(&location, "allowedHosts", message));
        }
    }
}

fn hosts(entry: &Entry<'_>, report: &mut Report) -> Option<Vec<String>> {
    const EXPECTED: &str = "a host name without a port, such as \"tide.example\"";
    let items = entry.items(report, "a list of host names")?;
    let host = |item: &Entry<'_>, report: &mut Report| match item.text(report, EXPECTED)? {
        host if is_host_name(host) => Some(host.to_owned()),
        _ => item.mismatch(report, EXPECTED),
    };
    // All of them are checked before one fails the list.
    let hosts: Vec<Option<String>> = items.iter().map(|item| host(item, report)).collect();
    hosts.into_iter().collect()
}
