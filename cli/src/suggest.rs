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

/// Returns the closest word of `known` with the same number in it as `word`: the number of a GPU is
/// what it is, and never a misspelling.
pub fn same_number<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let number = |text: &str| -> String { text.chars().filter(char::is_ascii_digit).collect() };
    let own = number(word);
    let same = known.into_iter().filter(|name| number(name) == own);
    closest(word, same).filter(|_| !own.is_empty())
}

#[cfg(test)]
mod tests {
    use super::closest;

    #[test]
    fn near_words_are_found_and_far_ones_are_not() {
        let known = ["cuda:sm_90a", "cuda:sm_80", "rocm:gfx942"];
        assert_eq!(closest("cuda:sm90a", known), Some("cuda:sm_90a"));
        assert_eq!(closest("rocm:gfx924", known), Some("rocm:gfx942"));
        assert_eq!(closest("metal", known), None);
    }
}
