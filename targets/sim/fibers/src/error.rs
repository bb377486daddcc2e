//! The reasons a launch on fibers fails.

use crate::block::ThreadOrder;
use moesaic_cpu::LoadError;
use moesaic_dl::DlError;
use std::io;

/// A launch, or the load of a module, that fails.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FiberError {
    /// The system does not load the image.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The image lacks a symbol of the prelude.
    #[error(transparent)]
    Symbol(#[from] DlError),
    /// The text was written for another GPU.
    #[error("it was written for waves of {wave} lanes, those of {arch} have {own}")]
    Wave {
        wave: i64,
        own: i64,
        arch: &'static str,
    },
    #[error("a block of {threads} threads is not 1 to {} whole waves of {wave}", 1024 / wave)]
    Threads { threads: u32, wave: u32 },
    #[error("a block takes {asked} bytes of shared memory, {arch} has {most}")]
    SharedMemory {
        asked: u32,
        most: u32,
        arch: &'static str,
    },
    #[error("`{param}` points to {address:#x}, where no buffer of this device is")]
    NoBuffer { param: String, address: u64 },
    #[error("no stacks for its threads: {0}")]
    NoStacks(#[source] io::Error),
    /// The kernel's fault, with block, thread and line.
    #[error("{0}")]
    Fault(String),
    #[error(
        "block ({}, {}): the result depends on the order of threads: {place} differs between \
         {:?} and {:?}", block[0], block[1], orders[0], orders[1]
    )]
    Order {
        block: [u64; 2],
        place: String,
        orders: [ThreadOrder; 2],
    },
}
