//! The identity of a kernel.

use crate::hash;
use crate::version::FORMAT_VERSION;
use hmac_sha256::Hash;
use moesaic_kernel::Target;
use std::fmt;
use std::str::FromStr;

/// Everything that can change a kernel's binary. Paths, times and host names are not parts, so that
/// the same parts on another machine are the same kernel.
#[derive(Clone, Copy, Debug)]
pub struct KeyParts<'a> {
    /// The target.
    pub target: Target,
    /// Description and configuration, in one canonical spelling.
    pub config: &'a str,
    /// The rendered source.
    pub source: &'a str,
    /// Options that change the output, or the sources that are accepted.
    pub flags: &'a str,
    /// The compiler's fingerprint for the target.
    pub compiler: &'a str,
}

/// The address of a kernel in a store: a hash of its text, target, options and compiler.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KernelKey([u8; 32]);

impl KernelKey {
    /// Hashes the parts. Each is preceded by its length, so two different lists of parts never hash
    /// the same bytes.
    #[doc(hidden)]
    pub fn new(parts: &KeyParts<'_>) -> KernelKey {
        let target = parts.target.to_string();
        let mut hash = Hash::new();
        hash.update(FORMAT_VERSION.to_le_bytes());
        for part in [
            &target,
            parts.config,
            parts.source,
            parts.flags,
            parts.compiler,
        ] {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        KernelKey(hash.finalize())
    }

    /// Returns the key as 64 lower-case hexadecimal digits.
    pub fn hex(&self) -> String {
        hash::to_hex(&self.0)
    }

    pub(crate) fn bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

/// Text that is not a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a kernel key is 64 lower-case hexadecimal digits")]
pub struct NotAKey;

impl FromStr for KernelKey {
    type Err = NotAKey;

    fn from_str(text: &str) -> Result<KernelKey, NotAKey> {
        hash::from_hex(text).map(KernelKey).ok_or(NotAKey)
    }
}

impl fmt::Display for KernelKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.hex())
    }
}

impl fmt::Debug for KernelKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({})", self.hex())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use moesaic_kernel::CpuIsa;

    const PARTS: KeyParts<'static> = KeyParts {
        target: Target::Cpu(CpuIsa::Avx2),
        config: "config",
        source: "source",
        flags: "flags",
        compiler: "gcc 12",
    };

    #[test]
    fn every_part_counts_and_none_runs_into_the_next() {
        let keys = [
            KernelKey::new(&PARTS),
            KernelKey::new(&KeyParts {
                target: Target::Cpu(CpuIsa::Neon),
                ..PARTS
            }),
            KernelKey::new(&KeyParts {
                config: "configs",
                source: "ource",
                ..PARTS
            }),
            KernelKey::new(&KeyParts { flags: "", ..PARTS }),
            KernelKey::new(&KeyParts {
                source: "",
                ..PARTS
            }),
            KernelKey::new(&KeyParts {
                compiler: "gcc 13",
                ..PARTS
            }),
        ];
        for (i, key) in keys.iter().enumerate() {
            assert!(keys[..i].iter().all(|other| other != key), "{i}");
        }
    }

    #[test]
    fn keys_do_not_change_between_releases() {
        let hex = "aea2";
        assert_eq!(&KernelKey::new(&PARTS).hex()[..4], hex);
    }

    #[test]
    fn hex_reads_back_and_nothing_else_does() {
        let key = KernelKey::new(&PARTS);
        assert_eq!(key.hex().parse(), Ok(key));
        let upper = key.hex().to_uppercase();
        for bad in [&upper, "", "../../etc/passwd", &key.hex()[1..]] {
            assert_eq!(bad.parse::<KernelKey>(), Err(NotAKey), "{bad}");
        }
    }
}
