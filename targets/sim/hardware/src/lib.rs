//! Pure functions for the tensor cores, matrix cores, TMA and barriers of GPUs.
//!
//! The simulators execute instructions with these functions, and the probe
//! compares hardware with them. Lanes are arrays: `[[u32; 32]]` is a list of
//! registers, each with its 32 lanes.
//!
//! | module | contents |
//! |---|---|
//! | [`float`] | f32 to and from bf16, f16, tf32, fp8 |
//! | [`mma`] | `mma.sync` fragments and products |
//! | [`matrix`] | `ldmatrix` and `stmatrix` |
//! | [`swizzle`] | the XOR patterns of shared memory |
//! | [`tensor_map`] | tensor maps, by the rules of the driver |
//! | [`tma`] | the moves of a box copy, and reductions |
//! | [`wgmma`] | descriptors, operands and products of a warpgroup |
//! | [`mbarrier`] | the state machine of a barrier in shared memory |
//! | [`mfma`] | the matrix instructions of AMD: MFMA and WMMA |
//! | [`mfma`] | matrix instructions of AMD: MFMA and WMMA |
//!
//! This crate is an internal part of `moesaic` and changes without notice.

pub mod float;
pub mod matrix;
pub mod mbarrier;
pub mod mfma;
pub mod mma;
mod product;
pub mod swizzle;
pub mod tensor_map;
#[cfg(test)]
mod testing;
pub mod tma;
pub mod wgmma;

/// A 32-bit register of a warp: one value per lane.
pub type Lanes = [u32; 32];
