//! SHA-256, the hash of keys and files.

use hmac_sha256::Hash;

/// Returns the hash of `parts`, one after the other.
pub(crate) fn of<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> [u8; 32] {
    let mut hash = Hash::new();
    for part in parts {
        hash.update(part);
    }
    hash.finalize()
}

/// Returns a hash as 64 lower-case hexadecimal digits.
pub(crate) fn to_hex(hash: &[u8; 32]) -> String {
    hash.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns the hash of 64 lower-case hexadecimal digits, and `None` for any other text.
pub(crate) fn from_hex(text: &str) -> Option<[u8; 32]> {
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    };
    if text.len() != 64 {
        return None;
    }
    let mut hash = [0; 32];
    for (byte, pair) in hash.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
        *byte = digit(pair[0])? << 4 | digit(pair[1])?;
    }
    Some(hash)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first example of FIPS 180-2.
    #[test]
    fn hashes_are_those_of_the_standard() {
        let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        let hash = of([b"a", b"bc" as &[u8]]);
        assert_eq!(to_hex(&hash), abc);
        assert_eq!(from_hex(abc), Some(hash));
    }

    #[test]
    fn other_texts_are_no_hash() {
        let hex = "0".repeat(64);
        for bad in [
            &hex[1..],
            &hex.replace('0', "A"),
            &hex.replacen("00", "é", 1),
        ] {
            assert_eq!(from_hex(bad), None, "{bad}");
        }
    }
}
