//! Hash slots of a cluster.

/// The number of hash slots.
const SLOTS: u16 = 16_384;

/// Returns the hash slot of a key or shard channel: CRC16 of the name, or of its `{tag}` if it has one that is not empty.
pub(super) fn hash_slot(name: &[u8]) -> u16 {
    crc16(tag(name).unwrap_or(name)) % SLOTS
}

/// Returns what is between the first `{` and the next `}`, unless it is empty.
fn tag(name: &[u8]) -> Option<&[u8]> {
    let rest = &name[name.iter().position(|byte| *byte == b'{')? + 1..];
    let tag = &rest[..rest.iter().position(|byte| *byte == b'}')?];
    (!tag.is_empty()).then_some(tag)
}

/// CRC-16/XMODEM.
fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc: u16, byte| {
        (0..8).fold(crc ^ u16::from(*byte) << 8, |crc, _| if crc & 0x8000 == 0 { crc << 1 } else { crc << 1 ^ 0x1021 })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_those_of_the_cluster_specification() {
        assert_eq!(crc16(b"123456789"), 0x31c3);
        // As `CLUSTER KEYSLOT` returns them.
        for (name, slot) in
            [("", 0), ("foo", 12_182), ("somekey", 11_058), ("foo{hash_tag}", 2515), ("bar{hash_tag}", 2515)]
        {
            assert_eq!(hash_slot(name.as_bytes()), slot, "{name}");
        }
        let same = [("{user1000}.following", "user1000"), ("foo{{bar}}zap", "{bar"), ("foo{bar}{zap}", "bar")];
        for (name, tag) in same {
            assert_eq!(hash_slot(name.as_bytes()), hash_slot(tag.as_bytes()), "{name}");
        }
        for whole in ["foo{}{bar}", "foo{bar", "foo}bar{"] {
            assert_eq!(hash_slot(whole.as_bytes()), crc16(whole.as_bytes()) % SLOTS, "{whole}");
        }
    }
}
