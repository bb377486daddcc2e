//! Operands of copies and matrix instructions.

use super::{Address, AtomicKind, Number, RowIndex};
use crate::text::StateSpace;
use moesaic_hardware::mma::MmaKind;
use moesaic_hardware::wgmma::WgmmaKind;

/// `cp.async` of 4, 8 or 16 bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct CopyAsync {
    pub to: Address,
    pub from: Address,
    pub from_generic: bool,
    pub bytes: u8,
    /// Bytes that come from memory; the others are zero.
    pub source_bytes: RowIndex,
    pub ignore: Option<(RowIndex, bool)>,
}

/// The operation of a bulk reduction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReductionOp {
    pub kind: AtomicKind,
    /// Element type; `None` in the form with a tensor map, which knows the
    /// type.
    pub ty: Option<Number>,
}

/// A bulk copy in one dimension.
#[derive(Clone, Debug, PartialEq)]
pub struct BulkOp {
    pub direction: Direction,
    pub to: Address,
    pub from: Address,
    pub bytes: RowIndex,
    pub mbarrier: Option<Address>,
    pub multicast: RowIndex,
    pub reduction: Option<ReductionOp>,
}

/// The direction of a bulk copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    GlobalToShared,
    SharedToGlobal,
    SharedToCluster,
    PrefetchL2,
}

/// A bulk copy of a box.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorCopy {
    pub direction: Direction,
    pub map: Address,
    pub shared: Address,
    pub coordinates: Vec<RowIndex>,
    pub mbarrier: Option<Address>,
    pub multicast: RowIndex,
    pub reduction: Option<ReductionOp>,
}

/// `mma.sync`.
#[derive(Clone, Debug)]
pub struct Mma {
    pub kind: MmaKind,
    pub d: Vec<RowIndex>,
    pub a: Vec<RowIndex>,
    pub b: Vec<RowIndex>,
    pub c: Vec<RowIndex>,
}

/// `ldmatrix` and `stmatrix`.
#[derive(Clone, Debug, PartialEq)]
pub struct MatrixOp {
    pub store: bool,
    pub transposed: bool,
    pub address: Address,
    pub space: StateSpace,
    pub rows: Vec<RowIndex>,
}

/// The A operand of a wgmma.
#[derive(Clone, Debug, PartialEq)]
pub enum WgmmaA {
    Descriptor(RowIndex),
    Registers(Vec<RowIndex>),
}

/// `wgmma.mma_async`.
#[derive(Clone, Debug)]
pub struct WgmmaOp {
    pub kind: WgmmaKind,
    pub d: Vec<RowIndex>,
    pub a: WgmmaA,
    pub b: RowIndex,
    /// Predicate; where false, the product overwrites D.
    pub scale_d: RowIndex,
    pub negate_a: bool,
    pub negate_b: bool,
    pub transpose_a: bool,
    pub transpose_b: bool,
}

/// Instructions of asynchronous copies and products, and of their groups.
#[derive(Clone, Debug)]
pub enum AsyncOp {
    Copy(CopyAsync),
    CopyCommit,
    /// Waits for all groups but the last ones; `None` waits for all copies.
    CopyWait(Option<u32>),
    Bulk(BulkOp),
    Tensor(TensorCopy),
    BulkCommit,
    BulkWait {
        left: u32,
        read: bool,
    },
    Wgmma(WgmmaOp),
    WgmmaFence,
    WgmmaCommit,
    WgmmaWait(u32),
}
