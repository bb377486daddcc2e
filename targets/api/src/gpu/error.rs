//! The reasons for which a GPU's vendor refuses a binary, a kernel or a launch.

use super::{Fault, LaunchShape};
use crate::{Ptr, SharedError};
use moesaic_kernel::TensorMap;
use std::error::Error;
use std::fmt;

/// A binary, a kernel or a launch that a [`Vendor`](super::Vendor) refuses.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum VendorError {
    /// The bytes are not a complete binary.
    #[error("{0}")]
    Binary(#[source] SharedError),
    /// The driver refuses so much shared memory.
    #[error("{bytes} bytes of dynamic shared memory are refused: {}", fault.words)]
    SharedMemory {
        /// The dynamic shared memory that the kernel needs.
        bytes: i32,
        /// The driver's error.
        fault: Fault,
    },
    /// The driver refuses clusters of more blocks than every GPU grants.
    #[error("clusters of {blocks} are refused: {}", fault.words)]
    Clusters {
        /// Blocks per cluster.
        blocks: u32,
        /// The driver's error.
        fault: Fault,
    },
    /// The GPU, or its driver, has no clusters.
    #[error("it runs in clusters of {blocks} blocks, which {lacking}")]
    NoClusters {
        /// Blocks per cluster.
        blocks: u32,
        /// The missing part: `AMD GPUs do not have`.
        lacking: &'static str,
    },
    /// No GPU has clusters of so many blocks.
    #[error("clusters of {blocks} blocks are too large; the most are {most}")]
    LargeCluster {
        /// Blocks per cluster.
        blocks: u32,
        /// The most that there can be.
        most: u32,
    },
    /// The grid is no whole number of clusters.
    #[error(
        "{} blocks in x are not whole clusters of {}; {shape}", shape.grid[0], shape.cluster
    )]
    PartOfCluster {
        /// The launch.
        shape: LaunchShape,
    },
    /// The grid has more threads than the driver can count.
    #[error(
        "a grid of {blocks} blocks of {threads} threads is too large: HIP has at most {} \
         threads in x",
        u32::MAX
    )]
    LargeGrid {
        /// Blocks in x.
        blocks: u32,
        /// Threads per block.
        threads: u32,
    },
    /// The GPUs of this vendor have no tensor maps.
    #[error("AMD GPUs have no tensor maps")]
    NoTensorMaps,
    /// A tensor map breaks a rule, or the driver refuses it.
    #[error(transparent)]
    TensorMap(Box<TensorMapError>),
}

/// A tensor map that cannot be encoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorMapError {
    /// The map.
    pub map: TensorMap,
    /// The address of the tensor.
    pub base: Ptr,
    /// The tensor's sizes, innermost first.
    pub sizes: [u64; 5],
    /// The violated rule, or the driver's message.
    pub problem: String,
}

impl fmt::Display for TensorMapError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rank = usize::from(self.map.rank.min(5));
        write!(
            f,
            "tensor map over {} {:?} at {:#x} in boxes of {:?}, swizzle {:?}: {}",
            self.map.dtype.name(),
            &self.sizes[..rank],
            self.base.0,
            &self.map.tile[..rank],
            self.map.swizzle,
            self.problem
        )
    }
}

impl Error for TensorMapError {}
