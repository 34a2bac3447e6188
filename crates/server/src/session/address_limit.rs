//! A limit of what one address may have at a time: sockets, or connections that have not logged in.
//!
//! An IPv4 client has one address. An IPv6 client has a /64 at least, and can use any address in it, so a /64 counts as one.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The bits of an IPv6 address that name the network of a client.
const IPV6_NETWORK: u128 = !0 << 64;

/// Returns the address under which the clients of an address are counted: itself, or the first of its /64.
pub(crate) fn network(address: IpAddr) -> IpAddr {
    // An IPv4 client of an IPv6 socket is the same host.
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & IPV6_NETWORK).into(),
        address @ IpAddr::V4(_) => address,
    }
}

/// A limit of permits per address.
#[derive(Debug)]
pub(crate) struct AddressLimit {
    max: usize,
    /// Never zero: an address without permits has no entry, so there are no more entries than permits.
    counts: Mutex<HashMap<IpAddr, usize>>,
}

impl AddressLimit {
    pub(crate) fn new(max: usize) -> Arc<Self> {
        Arc::new(Self { max, counts: Mutex::default() })
    }

    /// Returns a permit, or none if the address has as many as it may have.
    pub(crate) fn admit(self: &Arc<Self>, address: IpAddr) -> Option<AddressPermit> {
        let network = network(address);
        let mut counts = self.counts();
        let count = counts.get(&network).copied().unwrap_or(0);
        if count >= self.max {
            return None;
        }
        counts.insert(network, count + 1);
        drop(counts);
        Some(AddressPermit(Arc::new(Counted { limit: Arc::clone(self), network })))
    }

    fn counts(&self) -> MutexGuard<'_, HashMap<IpAddr, usize>> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Counts for its address until it is dropped. A clone is the same permit.
#[derive(Debug, Clone)]
pub(crate) struct AddressPermit(#[expect(dead_code, reason = "it counts while it lives")] Arc<Counted>);

#[derive(Debug)]
struct Counted {
    limit: Arc<AddressLimit>,
    network: IpAddr,
}

impl Drop for Counted {
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
    fn an_ipv6_client_is_its_network() {
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
    fn an_address_gets_as_many_permits_as_it_may_have() {
        let limit = AddressLimit::new(2);
        let ann = address("2001:db8::1");
        let first = limit.admit(ann).unwrap();
        let second = limit.admit(address("2001:db8::2")).unwrap();
        assert!(limit.admit(ann).is_none() && limit.admit(address("2001:db8::3")).is_none());
        let bob = limit.admit(address("192.0.2.7")).unwrap();
        // A clone is no other permit, and holds it.
        let clone = first.clone();
        assert!(limit.admit(ann).is_none());
        drop(first);
        assert!(limit.admit(ann).is_none());
        drop(clone);
        let third = limit.admit(ann).unwrap();
        drop((second, third, bob));
        assert!(limit.counts().is_empty(), "nothing is kept of addresses without a permit");
        assert!(AddressLimit::new(0).admit(ann).is_none());
    }
}
