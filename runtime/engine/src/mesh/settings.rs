//! What of a call has to be the same on all ranks, besides the layer.

use crate::call::RngKey;

/// Settings of a call. A hash of them travels in the upper half of the number of tokens, so
/// that they cost no message and no byte.
#[derive(Clone, Copy, Debug)]
pub(super) struct Settings {
    pub trains: bool,
    pub rng_key: RngKey,
    pub capacity_factor: Option<f64>,
}

const HALF: u32 = 32;

impl Settings {
    /// What this rank tells: its tokens, of which calls have fewer than 2^31, and the hash.
    pub fn with(&self, tokens: usize) -> u64 {
        let tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
        u64::from(self.hash()) << HALF | u64::from(tokens)
    }

    /// The tokens of what a rank has told, and the hash.
    pub fn parted(told: u64) -> (usize, u64) {
        ((told & u64::from(u32::MAX)) as usize, told >> HALF)
    }

    /// Where hashes differ: all of them, by name, to be compared.
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

    /// FNV-1a, by numbers.
    fn hash(&self) -> u32 {
        let RngKey {
            seed,
            step,
            layer,
            first_token,
        } = self.rng_key;
        // A NaN, which is no factor, for the spec's own.
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
                assert_eq!(Settings::parted(settings.with(tokens)).0, tokens);
            }
            hashes.push(Settings::parted(settings.with(0)).1);
        }
        hashes.sort_unstable();
        hashes.dedup();
        assert_eq!(hashes.len(), all.len());
    }
}
