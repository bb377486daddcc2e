//! The members of groups, from numbers that ranks have gathered.

/// A group that is split off.
pub(crate) struct SubGroup {
    /// The members, by rank in the world.
    pub members: Vec<usize>,
    /// This rank's index among them.
    pub rank: usize,
}

/// Returns the ranks of a colour, ordered by key, then by rank. `numbers` holds colour and key of
/// each rank.
pub(crate) fn chosen(numbers: &[i64], color: i64) -> Vec<usize> {
    let pairs = numbers.as_chunks::<2>().0.iter().enumerate();
    let mut chosen: Vec<(i64, usize)> = pairs
        .filter(|(_, [own, _])| *own == color)
        .map(|(rank, [_, key])| (*key, rank))
        .collect();
    chosen.sort_unstable();
    chosen.into_iter().map(|(_, rank)| rank).collect()
}

/// Splits gathered bytes into `each` numbers for each rank.
pub(crate) fn numbers(all: &[u8], each: usize, ranks: usize) -> Vec<Vec<u64>> {
    let (numbers, _) = all.as_chunks::<8>();
    let of = |rank: usize| {
        let own = numbers[rank * each..].iter().take(each);
        own.map(|n| u64::from_le_bytes(*n)).collect()
    };
    (0..ranks).map(of).collect()
}
