//! Size limits of a valid spec.
//!
//! Kernels rely on them: positions inside one weight matrix, expert ids, and row numbers inside an
//! expert fit 32-bit integers, and the product of any two sizes fits 64 bits.

/// Largest `model_dim`, `hidden_dim` and `output_dim`, and largest width that a router projects
/// tokens to.
pub const MAX_DIM: usize = 65_536;

/// Most elements of one expert's weight matrix, and of the router's table: offsets inside it must
/// fit an `i32`.
pub const MAX_MATRIX: usize = i32::MAX as usize;

/// Most experts that a router scores, identity experts included. The scan keeps two counters of
/// each in a thread block's 48 KB of shared memory. `top_k` may be anything from 1 to their number.
pub const MAX_EXPERTS: usize = 4096;

/// Most experts of `select = { expert-choice = c }` and `{ sinkhorn = n }`.
pub const MAX_BALANCED_EXPERTS: usize = 1024;

/// Most shared experts.
pub const MAX_SHARED: usize = 16;

/// Most rows of the table of a table router.
pub const MAX_TABLE_ROWS: usize = 1 << 24;

/// Most rows per expert of a fixed capacity: locations are `i32`.
pub const MAX_CAPACITY_ROWS: usize = i32::MAX as usize;

/// Largest capacity factor, and the negative of the smallest. A factor equal
/// to the number of experts already gives every assignment a row.
pub const MAX_CAPACITY_FACTOR: f64 = MAX_EXPERTS as f64;

/// Largest alignment of the capacity.
pub const MAX_ALIGN: usize = 4096;

/// Most rounds of `select = { sinkhorn = n }`; each is two launches.
pub const MAX_SINKHORN_ROUNDS: usize = 64;

/// Longest name in bytes.
pub const MAX_NAME: usize = 100;

/// The most tokens of a block that agrees on its experts.
pub const MAX_BLOCK_TOKENS: usize = 65_536;
