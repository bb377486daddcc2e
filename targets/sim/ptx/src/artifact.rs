//! Artifacts: the PTX that the compiler hands to the device, with its source.

use crate::error::PtxError;
use moesaic_target::{Artifact, ArtifactReport};

/// The first bytes of an artifact; the last one is its version.
const MAGIC: &[u8; 8] = b"moesptx\x01";

/// Returns an artifact of PTX that no kernel source belongs to: for tests, and
/// to examine the output of other compilers. `source` is the text whose lines
/// `.loc` directives count; it may be empty.
pub fn artifact_of_ptx(ptx: &str, source: &str) -> Artifact {
    let texts = Texts {
        ptx: ptx.to_string(),
        source: source.to_string(),
    };
    Artifact {
        binary: texts.pack(),
        report: ArtifactReport::default(),
    }
}

/// The texts of an artifact.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Texts {
    pub ptx: String,
    /// The emitted kernel text, for the lines of findings.
    pub source: String,
}

impl Texts {
    /// Returns the magic, the length of the PTX in eight bytes, the PTX and the
    /// source.
    pub fn pack(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend((self.ptx.len() as u64).to_le_bytes());
        bytes.extend(self.ptx.as_bytes());
        bytes.extend(self.source.as_bytes());
        bytes
    }

    /// Reads the texts from an artifact's bytes: the inverse of
    /// [`Texts::pack`].
    pub fn unpack(bytes: &[u8]) -> Result<Texts, PtxError> {
        let bad = |what: &str| PtxError::Artifact(what.to_string());
        let rest = bytes
            .strip_prefix(MAGIC)
            .ok_or_else(|| bad("it starts with other bytes"))?;
        let (length, rest) = rest
            .split_first_chunk::<8>()
            .ok_or_else(|| bad("it ends too early"))?;
        let length = usize::try_from(u64::from_le_bytes(*length)).unwrap_or(usize::MAX);
        let (ptx, source) = rest
            .split_at_checked(length)
            .ok_or_else(|| bad("it ends too early"))?;
        let text = |bytes: &[u8]| {
            String::from_utf8(bytes.to_vec()).map_err(|_| bad("it holds bytes that are no text"))
        };
        Ok(Texts {
            ptx: text(ptx)?,
            source: text(source)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::Texts;

    #[test]
    fn artifacts_read_back_and_cut_ones_do_not() {
        let texts = Texts {
            ptx: ".version 9.0\n".to_string(),
            source: "KERNEL(32) k()\n".to_string(),
        };
        let bytes = texts.pack();
        assert_eq!(Texts::unpack(&bytes), Ok(texts));
        for cut in [0, 7, 12, 20] {
            assert!(Texts::unpack(&bytes[..cut]).is_err());
        }
    }
}
