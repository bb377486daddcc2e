//! The products of a warpgroup.

use std::collections::VecDeque;

/// The products of four warps.
#[derive(Default)]
pub struct WarpGroup {
    pub queue: VecDeque<Product>,
    /// Number of products that each warp has issued.
    pub issued: [u32; 4],
    pub executed: u32,
    /// For each warp, its issued products at each commit.
    pub commits: [VecDeque<u32>; 4],
}

/// A product that is not yet executed, or not yet issued by all four warps.
pub struct Product {
    pub pc: u32,
    pub a: u64,
    pub b: u64,
    pub accumulate: bool,
    pub issued: u32,
}
