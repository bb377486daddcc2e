//! The XOR patterns that spread the 16-byte chunks of a row over the banks.
//!
//! | pattern | address bits that change | XOR with bits | repeats after |
//! |---|---|---|---|
//! | 32 bytes | 4 | 7 | 256 bytes |
//! | 64 bytes | 4, 5 | 7, 8 | 512 bytes |
//! | 128 bytes | 4, 5, 6 | 7, 8, 9 | 1024 bytes |

/// An arrangement of 16-byte chunks in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Swizzle {
    /// Chunks stay in place.
    None,
    /// Within spans of 32 bytes.
    B32,
    /// Within spans of 64 bytes.
    B64,
    /// Within spans of 128 bytes.
    B128,
}

impl Swizzle {
    /// Every pattern.
    pub const ALL: [Swizzle; 4] = [Swizzle::None, Swizzle::B32, Swizzle::B64, Swizzle::B128];

    /// Returns the bytes of the span within which chunks trade places; 16 for
    /// none.
    pub const fn span(self) -> u32 {
        match self {
            Swizzle::None => 16,
            Swizzle::B32 => 32,
            Swizzle::B64 => 64,
            Swizzle::B128 => 128,
        }
    }

    /// Returns the bytes after which the pattern repeats; 16 for none.
    pub const fn atom(self) -> u32 {
        match self {
            Swizzle::None => 16,
            _ => self.span() * 8,
        }
    }

    /// Returns the swizzled address of the byte at the plain shared-memory
    /// address `address`. The pattern depends on the address itself, not on the
    /// start of a tile. The function is its own inverse.
    pub const fn apply(self, address: u32) -> u32 {
        // `span - 16` selects as many bits from bit 4 on as the pattern has;
        // the same number of bits from bit 7 on, the 128-byte line within the
        // atom, is XORed into them (PTX ISA, "Swizzling Modes").
        address ^ ((address >> 3) & (self.span() - 16))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table above, spelled out bit by bit.
    fn by_bits(swizzle: Swizzle, address: u32) -> u32 {
        let bits = match swizzle {
            Swizzle::None => 0,
            Swizzle::B32 => 1,
            Swizzle::B64 => 2,
            Swizzle::B128 => 3,
        };
        (0..bits).fold(address, |a, bit| {
            a ^ (((address >> (7 + bit)) & 1) << (4 + bit))
        })
    }

    #[test]
    fn each_pattern_is_its_table() {
        for swizzle in Swizzle::ALL {
            for address in 0..4096 {
                assert_eq!(swizzle.apply(address), by_bits(swizzle, address));
            }
        }
    }

    #[test]
    fn patterns_are_involutions_within_span_and_atom() {
        for swizzle in Swizzle::ALL {
            for address in 0..4096 {
                let there = swizzle.apply(address);
                assert_eq!(swizzle.apply(there), address);
                assert_eq!(there / swizzle.span(), address / swizzle.span());
                assert_eq!(there % 16, address % 16);
                let next = swizzle.apply(address + swizzle.atom());
                assert_eq!(next, there + swizzle.atom());
            }
        }
    }

    #[test]
    fn a_column_of_chunks_meets_every_place_of_the_span() {
        for swizzle in [Swizzle::B32, Swizzle::B64, Swizzle::B128] {
            let lines = swizzle.atom() / 128;
            let places: Vec<u32> = (0..lines).map(|l| swizzle.apply(l * 128) % 128).collect();
            let expected: Vec<u32> = (0..lines).map(|l| l * 16).collect();
            assert_eq!(places, expected);
        }
    }
}
