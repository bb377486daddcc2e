//! 64-bit FNV-1a: equal inputs hash equally on every machine. It detects accidents, not
//! attackers.

/// Hashes byte strings together with their boundaries.
pub(crate) fn of(parts: &[&[u8]]) -> u64 {
    parts.iter().fold(START, |hash, part| {
        with(hash, part.len(), part.iter().copied())
    })
}

/// Hashes numbers as [`of`] hashes their bytes, without a copy.
pub(crate) fn of_numbers(numbers: impl Iterator<Item = u64> + Clone) -> u64 {
    let length = numbers.clone().count() * size_of::<u64>();
    with(START, length, numbers.flat_map(u64::to_le_bytes))
}

const START: u64 = 0xcbf2_9ce4_8422_2325;

fn with(hash: u64, length: usize, bytes: impl Iterator<Item = u8>) -> u64 {
    let length = (length as u64).to_le_bytes().into_iter();
    length.chain(bytes).fold(hash, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_hash_as_their_bytes() {
        let numbers = [7u64, 0, 1 << 40];
        let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
        assert_eq!(of_numbers(numbers.into_iter()), of(&[&bytes]));
        assert_ne!(of(&[&bytes]), of(&[&bytes[..8], &bytes[8..]]));
    }
}
