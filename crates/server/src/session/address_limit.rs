//! A limit of concurrent permits per address, for sockets and for connections that have not logged in.
//!
//! An IPv6 client usually controls at least a /64 network, so all addresses of a /64 share one limit.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

const IPV6_NETWORK_MASK: u128 = !0 << 64;

/// Returns the address under which a client is counted: an IPv4 address, or the first address of an IPv6 /64.
pub(crate) fn network(address: IpAddr) -> IpAddr {
    // An IPv4-mapped IPv6 address is the same host as the IPv4 address.
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & IPV6_NETWORK_MASK).into(),
        address @ IpAddr::V4(_) => address,
    }
}

/// A limit of permits per address.
#[derive(Debug)]
pub(crate) struct AddressLimit {
    max: usize,
    /// Invariant: no count is zero, so there are no more entries than permits.
    counts: Mutex<HashMap<IpAddr, usize>>,
}

impl AddressLimit {
    pub(crate) fn new(max: usize) -> Arc<Self> {
        Arc::new(Self { max, counts: Mutex::default() })
    }

    /// Returns a permit, or `None` if the limit of the address is reached.
    pub(crate) fn admit(self: &Arc<Self>, address: IpAddr) -> Option<AddressPermit> {
        let network = network(address);
        let mut counts = self.counts();
        let count = counts.get(&network).copied().unwrap_or(0);
        if count >= self.max {
            return None;
        }
        counts.insert(network, count + 1);
        drop(counts);
        Some(AddressPermit(Arc::new(PermitGuard { limit: Arc::clone(self), network })))
    }

    fn counts(&self) -> MutexGuard<'_, HashMap<IpAddr, usize>> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A permit of an address. It is released when the last clone is dropped.
#[derive(Debug, Clone)]
pub(crate) struct AddressPermit(#[expect(dead_code, reason = "released on drop")] Arc<PermitGuard>);

#[derive(Debug)]
struct PermitGuard {
    limit: Arc<AddressLimit>,
    network: IpAddr,
}

impl Drop for PermitGuard {
    fn drop(&mut self) {
        if let Entry::Occupied(mut count) = self.limit.counts().entry(self.network) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn ipv6_addresses_are_counted_by_network() {
        for (one, expected) in [
            ("192.0.2.7", "192.0.2.7"),
            ("::ffff:192.0.2.7", "192.0.2.7"),
            ("2001:db8:1:2::1", "2001:db8:1:2::"),
            ("2001:db8:1:2:ffff:ffff:ffff:ffff", "2001:db8:1:2::"),
            ("2001:db8:1:3::1", "2001:db8:1:3::"),
            ("::1", "::"),
        ] {
            assert_eq!(network(address(one)), address(expected), "{one}");
        }
    }

    #[test]
    fn permits_are_limited_per_address() {
        let limit = AddressLimit::new(2);
        let ann = address("2001:db8::1");
        let first = limit.admit(ann).unwrap();
        let second = limit.admit(address("2001:db8::2")).unwrap();
        assert!(limit.admit(ann).is_none() && limit.admit(address("2001:db8::3")).is_none());
        let bob = limit.admit(address("192.0.2.7")).unwrap();
        // A clone shares the permit and keeps it alive.
        let clone = first.clone();
        assert!(limit.admit(ann).is_none());
        drop(first);
        assert!(limit.admit(ann).is_none());
        drop(clone);
        let third = limit.admit(ann).unwrap();
        drop((second, third, bob));
        assert!(limit.counts().is_empty(), "addresses without permits have no entry");
        assert!(AddressLimit::new(0).admit(ann).is_none());
    }
}
