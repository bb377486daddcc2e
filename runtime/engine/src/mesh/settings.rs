//! Per-call settings that must match on all ranks; checked together with the token counts.

use crate::call::RngKey;

/// Settings of a call. Their hash travels in the upper half of the token count, so the check costs
/// no message and no byte.
#[derive(Clone, Copy, Debug)]
pub(super) struct Settings {
    pub trains: bool,
    pub rng_key: RngKey,
    pub capacity_factor: Option<f64>,
}

/// A rank's tokens, and the hash of its settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CountWord {
    pub tokens: usize,
    pub hash: u64,
}

const HALF: u32 = 32;

impl Settings {
    /// Returns the word that this rank sends: its tokens, fewer than 2^31 in any call, and the
    /// hash.
    pub fn pack(&self, tokens: usize) -> u64 {
        // A number that does not fit is too many tokens for any call, which the check of sizes
        // refuses.
        let tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
        u64::from(self.hash()) << HALF | u64::from(tokens)
    }

    /// Splits a rank's word.
    pub fn split_word(word: u64) -> CountWord {
        CountWord {
            tokens: (word & u64::from(u32::MAX)) as usize,
            hash: word >> HALF,
        }
    }

    /// Returns every setting by name. Ranks compare these when their hashes differ.
    pub fn named(&self) -> [(&'static str, String); 6] {
        let factor = self.capacity_factor.map(|factor| factor.to_string());
        [
            ("training", self.trains.to_string()),
            ("seed", self.rng_key.seed.to_string()),
            ("step", self.rng_key.step.to_string()),
            ("layer", self.rng_key.layer.to_string()),
            ("first_token", self.rng_key.first_token.to_string()),
            (
                "capacity_factor",
                factor.unwrap_or("the spec's".to_string()),
            ),
        ]
    }

    /// Returns a hash over whole numbers, mixed as in FNV-1a.
    fn hash(&self) -> u32 {
        let RngKey {
            seed,
            step,
            layer,
            first_token,
        } = self.rng_key;
        // No valid factor is NaN, so a NaN's bits stand for the spec's own factor.
        let factor = self.capacity_factor.map_or(u64::MAX, f64::to_bits);
        let numbers = [
            u64::from(self.trains),
            seed,
            step,
            layer,
            first_token,
            factor,
        ];
        let mixed = |hash: u64, number: u64| {
            let hash = (hash ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            hash ^ hash >> HALF
        };
        numbers.into_iter().fold(0xcbf2_9ce4_8422_2325, mixed) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(seed: u64, step: u64, capacity_factor: Option<f64>) -> Settings {
        Settings {
            trains: true,
            rng_key: RngKey {
                seed,
                step,
                ..RngKey::default()
            },
            capacity_factor,
        }
    }

    #[test]
    fn tokens_and_hash_come_apart_again() {
        let all = [
            settings(0, 0, None),
            settings(1, 0, None),
            settings(0, 1, None),
            settings(0, 0, Some(1.0)),
            settings(0, 0, Some(1.25)),
        ];
        let mut hashes: Vec<u64> = Vec::new();
        for settings in all {
            for tokens in [0, 33, 1 << 30] {
                assert_eq!(Settings::split_word(settings.pack(tokens)).tokens, tokens);
            }
            hashes.push(Settings::split_word(settings.pack(0)).hash);
        }
        hashes.sort_unstable();
        hashes.dedup();
        assert_eq!(hashes.len(), all.len());
    }
}
