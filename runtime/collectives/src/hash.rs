//! 64-bit FNV-1a: equal inputs hash equally on every machine. It detects accidents, not
//! attackers.

/// Hashes byte strings together with their boundaries.
pub(crate) fn of(parts: &[&[u8]]) -> u64 {
    let length = |part: &&[u8]| (part.len() as u64).to_le_bytes();
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    for part in parts {
        for byte in length(part).iter().chain(part.iter()) {
            hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
    hash
}
