//! The shape of a launch.

use std::fmt;

/// The shape of a launch, in a driver's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchShape {
    /// Blocks in x and y.
    pub grid: [u32; 2],
    /// Threads per block.
    pub threads: u32,
    /// Dynamic shared memory in bytes.
    pub shared_bytes: u32,
    /// Blocks per cluster, in x.
    pub cluster: u32,
    /// Whether blocks may start before the earlier launches have ended.
    pub dependent: bool,
}

impl fmt::Display for LaunchShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [x, y] = self.grid;
        write!(
            f,
            "grid {x} x {y}, {} threads, {} bytes of dynamic shared memory",
            self.threads, self.shared_bytes
        )?;
        match self.cluster {
            1 => Ok(()),
            blocks => write!(f, ", clusters of {blocks}"),
        }
    }
}
