//! Registers of a thread, counted: a tile that asks for more than there are is taken
//! smaller. Compilers use what is free as they please, so that a count says less than what
//! they report; rooms are set by what they were seen to spill.

/// What a thread holds while it makes results of its sums.
pub(super) struct Held {
    /// f32 sums.
    pub sums: usize,
    /// Factors of one step.
    pub factors: usize,
    /// Rows of which it keeps the address.
    pub addresses: usize,
    /// Rows of which it keeps the weight, and where the weight is.
    pub weights: usize,
}

impl Held {
    fn registers(&self) -> usize {
        self.sums + self.factors + 2 * (self.addresses + self.weights)
    }
}

/// The most columns, by halves, from `most` to `least`, with which a thread holds no more
/// than there is room for; the least, if none is small enough.
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
