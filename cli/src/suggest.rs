//! Suggestions for misspelt words.

/// Returns the word of `known` that is closest to `word`, if it is close enough to be a
/// misspelling.
pub fn closest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let scored = known
        .into_iter()
        .map(|candidate| (strsim::levenshtein(word, candidate), candidate));
    let (best, candidate) = scored.min_by_key(|(distance, _)| *distance)?;
    (best <= word.chars().count() / 4 + 1).then_some(candidate)
}

/// Returns the GPU of `known` that `word` means: the longest name that it begins with (`a100x`,
/// `H100 SXM`), else the first that it begins (`mi300`) or that it is but for one character
/// (`mi30x`), else the nearest with the same number. Another number is another GPU, however close
/// the words are.
pub fn gpu<'a>(word: &str, known: &[&'a str]) -> Option<&'a str> {
    let asked = plain(word);
    let each = || known.iter().copied();
    let begun = each().filter(|name| asked.starts_with(&plain(name)));
    begun
        .max_by_key(|name| name.len())
        .or_else(|| each().find(|name| asked.len() > 2 && plain(name).starts_with(&asked)))
        .or_else(|| each().find(|name| lacks_one(&asked, &plain(name))))
        .or_else(|| same_number(&asked, each()))
}

/// Returns a GPU's name in small letters, without what people put between its parts or before it.
pub fn plain(name: &str) -> String {
    let name = name.replace([' ', '-', '_'], "").to_lowercase();
    let vendors = ["nvidia", "geforce", "amd", "radeon", "instinct", "tesla"];
    let bare = vendors.iter().fold(&*name, |name, vendor| {
        name.strip_prefix(vendor).unwrap_or(name)
    });
    bare.to_string()
}

/// Returns whether `word` is `name` without one of its characters.
fn lacks_one(word: &str, name: &str) -> bool {
    word.len() + 1 == name.len() && strsim::levenshtein(word, name) == 1
}

/// Returns the closest word of `known` with the same number in it as `word`.
fn same_number<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let number = |text: &str| -> String { text.chars().filter(char::is_ascii_digit).collect() };
    let own = number(word);
    let same = known.into_iter().filter(|name| number(name) == own);
    closest(word, same).filter(|_| !own.is_empty())
}

#[cfg(test)]
mod tests {
    use super::{closest, gpu};

    #[test]
    fn near_words_are_found_and_far_ones_are_not() {
        let known = ["cuda:sm_90a", "cuda:sm_80", "rocm:gfx942"];
        assert_eq!(closest("cuda:sm90a", known), Some("cuda:sm_90a"));
        assert_eq!(closest("rocm:gfx924", known), Some("rocm:gfx942"));
        assert_eq!(closest("metal", known), None);
    }

    #[test]
    fn gpus_are_meant_by_their_numbers() {
        let known = ["A10", "A100", "B300", "H100", "V100", "MI300X", "RTX 4090"];
        let meant = |word| gpu(word, &known).unwrap_or("none");
        for (word, name) in [
            ("mi300", "MI300X"),
            ("mi30x", "MI300X"),
            ("h10", "H100"),
            ("a10g", "A10"),
            ("a100x", "A100"),
            ("NVIDIA A100-SXM4-80GB", "A100"),
            ("rtx-4090ti", "RTX 4090"),
            ("h900", "none"),
            ("h", "none"),
        ] {
            assert_eq!(meant(word), name, "{word}");
        }
    }
}
