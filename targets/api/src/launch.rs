//! The values of a launch.

/// Launch geometry, evaluated for one token count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchDims {
    /// Blocks in x and y.
    pub grid: [u64; 2],
    /// Threads per block.
    pub threads: u32,
    /// Dynamic shared memory in bytes.
    pub shared_bytes: u32,
    /// Adjacent blocks in x that form a cluster; 1 without clusters.
    pub cluster: u32,
}

/// An address in device memory. For the CPU it is an ordinary address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ptr(pub u64);

/// A kernel argument.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arg {
    /// An address in device memory.
    Ptr(Ptr),
    /// A 64-bit integer.
    I64(i64),
    /// A float.
    F32(f32),
    /// A dense row-major tensor, which the device encodes into a tensor map.
    TensorMap {
        /// The address of its first element.
        base: Ptr,
        /// Its sizes, innermost first; 1 beyond the rank of the map.
        dims: [u64; 5],
    },
}

/// The size of an encoded tensor map in bytes.
pub const MAP_BYTES: usize = 128;

/// An encoded tensor map.
pub type MapBytes = [u8; MAP_BYTES];
