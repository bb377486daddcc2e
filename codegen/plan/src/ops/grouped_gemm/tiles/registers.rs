//! An estimate of the registers of a thread, by which a tile that would spill is made smaller.
//! Compilers use free registers as they please, so a kernel's report may show more than this count;
//! the limits come from spills that compilers reported.

/// The registers of a thread in its epilogue.
pub(super) struct Held {
    /// f32 sums.
    pub sums: usize,
    /// Registers of the fragments of one step.
    pub factors: usize,
    /// Rows whose address a thread keeps.
    pub addresses: usize,
    /// Rows whose weight a thread keeps, with the address of the weight.
    pub weights: usize,
}

impl Held {
    fn registers(&self) -> usize {
        self.sums + self.factors + 2 * (self.addresses + self.weights)
    }
}

/// Returns the most columns, halved from `most` down to `least`, with which a thread stays within
/// `room`; `least` if none does.
pub(super) fn widest(
    [least, most]: [usize; 2],
    room: usize,
    held: impl Fn(usize) -> Held,
) -> usize {
    let mut columns = most;
    while columns > least && held(columns).registers() > room {
        columns /= 2;
    }
    columns
}
