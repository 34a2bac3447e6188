//! Networks of IP addresses.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

/// A network in CIDR notation, such as `10.0.0.0/8`, or a single address.
///
/// ```
/// use tidewire::Network;
///
/// let network: Network = "10.0.0.0/8".parse()?;
/// assert!(network.contains("10.1.2.3".parse()?));
/// assert!(!network.contains("11.1.2.3".parse()?));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Network {
    /// Invariant: the bits after the prefix are zero.
    address: IpAddr,
    prefix: u32,
}

/// Why a string is not a valid [`Network`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NetworkError {
    /// It is neither an address nor a network.
    #[error("expected an IP address or a network such as \"10.0.0.0/8\"")]
    Invalid,
    /// The address has bits after the prefix, so it is ambiguous: it may name one address or the network.
    #[error("the address has bits after the prefix; did you mean \"{network}\"?")]
    BitsAfterPrefix {
        /// The network that contains the address.
        network: Network,
    },
}

impl Network {
    /// Returns whether the network contains an address. An IPv4-mapped IPv6 address is treated as the IPv4 address.
    pub fn contains(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        address.is_ipv4() == self.address.is_ipv4() && masked(address, self.prefix) == self.address
    }
}

impl From<IpAddr> for Network {
    fn from(address: IpAddr) -> Self {
        let address = address.to_canonical();
        Self { address, prefix: bits(address) }
    }
}

impl FromStr for Network {
    type Err = NetworkError;

    fn from_str(text: &str) -> Result<Self, NetworkError> {
        let Some((address, prefix)) = text.split_once('/') else {
            return text.parse::<IpAddr>().map(Self::from).map_err(|_| NetworkError::Invalid);
        };
        let address: IpAddr = address.parse().map_err(|_| NetworkError::Invalid)?;
        let is_number = !prefix.is_empty() && prefix.bytes().all(|byte| byte.is_ascii_digit());
        let prefix = prefix.parse().ok().filter(|prefix| is_number && *prefix <= bits(address));
        let prefix = prefix.ok_or(NetworkError::Invalid)?;
        let network = Self { address: masked(address, prefix), prefix };
        if network.address == address { Ok(network) } else { Err(NetworkError::BitsAfterPrefix { network }) }
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix)
    }
}

fn bits(address: IpAddr) -> u32 {
    if address.is_ipv4() { 32 } else { 128 }
}

/// Returns the address with the bits after the prefix set to zero.
fn masked(address: IpAddr, prefix: u32) -> IpAddr {
    match address {
        IpAddr::V4(address) => {
            let mask = u32::MAX.checked_shl(32 - prefix).unwrap_or(0);
            IpAddr::V4((address.to_bits() & mask).into())
        }
        IpAddr::V6(address) => {
            let mask = u128::MAX.checked_shl(128 - prefix).unwrap_or(0);
            IpAddr::V6((address.to_bits() & mask).into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn network_contains_addresses_with_its_prefix() {
        for (network, inside, outside) in [
            (
                "10.0.0.0/8",
                &["10.0.0.0", "10.255.255.255", "::ffff:10.1.2.3"][..],
                &["11.0.0.0", "9.9.9.9", "::a00:1"][..],
            ),
            ("192.0.2.128/25", &["192.0.2.128", "192.0.2.255"], &["192.0.2.127", "192.0.3.128"]),
            ("192.0.2.1", &["192.0.2.1", "::ffff:192.0.2.1"], &["192.0.2.2"]),
            ("::ffff:192.0.2.1", &["192.0.2.1"], &["192.0.2.2"]),
            ("0.0.0.0/0", &["0.0.0.0", "255.255.255.255"], &["::", "::1"]),
            ("::/0", &["::", "2001:db8::1"], &["127.0.0.1", "::ffff:127.0.0.1"]),
            ("2001:db8::/33", &["2001:db8:7fff::1"], &["2001:db8:8000::1", "2001:db9::"]),
            ("::1/128", &["::1"], &["::2", "127.0.0.1"]),
        ] {
            let parsed: Network = network.parse().unwrap();
            assert!(inside.iter().all(|address| parsed.contains(address.parse().unwrap())), "{network}");
            assert!(outside.iter().all(|address| !parsed.contains(address.parse().unwrap())), "{network}");
            assert_eq!(parsed.to_string().parse(), Ok(parsed));
        }
    }

    #[test]
    fn invalid_networks_are_rejected() {
        for text in [
            "",
            "/",
            "10.0.0.0/",
            "10.0.0.0/33",
            "10.0.0.0/+8",
            "::/129",
            "10.0.0/8",
            "tide.example",
            "/8",
            "10.0.0.0/8/8",
        ] {
            assert_eq!(text.parse::<Network>(), Err(NetworkError::Invalid), "{text}");
        }
        let error = "10.0.0.1/8".parse::<Network>().unwrap_err();
        assert!(error.to_string().contains("did you mean \"10.0.0.0/8\"?"), "{error}");
    }
}
