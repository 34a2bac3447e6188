//! Settings of the network edge: host names, trusted proxies and the admin listener.

use std::net::SocketAddr;

use super::entry::{Entry, Report, warning};
use super::error::ConfigProblem;
use super::location::Location;
use crate::transport::origin::is_host_name;
use crate::{Network, NetworkError, ServerOptions};

/// The locations of settings that are checked against others.
#[derive(Default)]
pub(super) struct EdgeLocations {
    allowed_hosts: Option<Location>,
    proxy_protocol: Option<Location>,
}

impl EdgeLocations {
    pub(super) fn read(&mut self, key: &str, entry: &Entry<'_>, server: &mut ServerOptions, report: &mut Report) {
        match key {
            "allowedHosts" => {
                if let Some(hosts) = hosts(entry, report) {
                    server.allowed_hosts = hosts;
                    self.allowed_hosts = Some(entry.location());
                }
            }
            "trustedProxies" => {
                if let Some(networks) = networks(entry, report) {
                    server.trusted_proxies = networks;
                }
            }
            "proxyProtocol" => {
                if let Some(is_on) = entry.boolean(report) {
                    server.proxy_protocol = is_on;
                    self.proxy_protocol = Some(entry.location());
                }
            }
            _ => {
                if let Some(address) = socket_address(entry, report) {
                    server.admin_listen = Some(address);
                }
            }
        }
    }

    /// Checks the settings together, after all sources have been read.
    pub(super) fn finish(self, server: &ServerOptions, report: &mut Report) {
        if let Some(location) =
            self.proxy_protocol.filter(|_| server.proxy_protocol && server.trusted_proxies.is_empty())
        {
            report.add(location, "proxyProtocol", ConfigProblem::NoTrustedProxies);
        }
        if let Some(location) = self.allowed_hosts.filter(|_| !server.allowed_hosts.is_empty()) {
            let message = if server.allowed_origins.is_some() {
                "the setting has no effect because `allowedOrigins` is set"
            } else if server.auth.as_ref().is_some_and(|auth| auth.required) {
                "the setting has no effect because clients must log in, so pages of any origin may connect"
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
    // Collected first, so that all errors of the list are reported.
    let hosts: Vec<Option<String>> = items.iter().map(|item| host(item, report)).collect();
    hosts.into_iter().collect()
}

fn networks(entry: &Entry<'_>, report: &mut Report) -> Option<Vec<Network>> {
    const EXPECTED: &str = "an IP address or a network such as \"10.0.0.0/8\"";
    let items = entry.items(report, "a list of IP addresses and networks")?;
    let network = |item: &Entry<'_>, report: &mut Report| match item.text(report, EXPECTED)?.parse() {
        Ok(network) => Some(network),
        Err(NetworkError::BitsAfterPrefix { network }) => {
            let expected = format!("a network without bits after the prefix, such as \"{network}\",");
            item.mismatch(report, expected)
        }
        Err(_) => item.mismatch(report, EXPECTED),
    };
    let networks: Vec<Option<Network>> = items.iter().map(|item| network(item, report)).collect();
    networks.into_iter().collect()
}

fn socket_address(entry: &Entry<'_>, report: &mut Report) -> Option<SocketAddr> {
    const EXPECTED: &str = "an IP address and a port, such as \"127.0.0.1:9090\"";
    let text = entry.text(report, EXPECTED)?;
    text.parse().ok().or_else(|| entry.mismatch(report, EXPECTED))
}
