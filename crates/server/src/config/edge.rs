//! Settings of the network edge: the names of the server, the proxies in front of it, and the address for administrators.

use std::net::SocketAddr;

use super::entry::{Entry, Report, warning};
use super::error::Problem;
use super::location::Location;
use crate::transport::origin::is_host_name;
use crate::{Network, NetworkError, ServerOptions};

/// Where settings were given that depend on others.
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
            report.add(location, "proxyProtocol", Problem::NoTrustedProxies);
        }
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

fn networks(entry: &Entry<'_>, report: &mut Report) -> Option<Vec<Network>> {
    const EXPECTED: &str = "an IP address or a network such as \"10.0.0.0/8\"";
    let items = entry.items(report, "a list of IP addresses and networks")?;
    let network = |item: &Entry<'_>, report: &mut Report| match item.text(report, EXPECTED)?.parse() {
        Ok(network) => Some(network),
        Err(NetworkError::BitsAfterPrefix { network }) => {
            let expected = format!("a network without bits after its prefix, such as \"{network}\",");
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
