//! The functions of NCCL and RCCL in use. Both libraries export the same names, except for
//! all-to-all.

use crate::{CommElement, Reduction};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;

/// A return code.
pub type NcclResult = c_int;

pub const SUCCESS: NcclResult = 0;
pub const IN_PROGRESS: NcclResult = 7;

/// A communicator of the library.
pub type RawComm = *mut c_void;
/// A stream of the driver.
pub type RawStream = *mut c_void;

/// The bytes of an id.
pub const ID_BYTES: usize = 128;

/// The id by which the ranks of a communicator find each other. It is passed by value.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct UniqueId(pub [u8; ID_BYTES]);

/// The configuration of a communicator. Libraries read as many bytes as `size` says and fill in
/// the rest, so the oldest version's structure serves all.
#[derive(Debug)]
#[repr(C)]
pub struct NcclConfig {
    pub size: usize,
    pub magic: c_uint,
    pub version: c_uint,
    pub blocking: c_int,
    pub cluster_blocks: c_int,
    pub least_blocks: c_int,
    pub most_blocks: c_int,
    pub network: *const c_char,
    pub split_share: c_int,
    /// Padding in the oldest structure, a field in later ones; unset in either.
    pub traffic_class: c_int,
}

const MAGIC: c_uint = 0xcafe_beef;
/// The value of an unset field.
const UNDEFINED: c_int = c_int::MIN;

impl NcclConfig {
    /// Returns the configuration in which calls return at once.
    pub fn non_blocking() -> NcclConfig {
        NcclConfig {
            size: size_of::<NcclConfig>(),
            magic: MAGIC,
            version: OLDEST.0 as c_uint,
            blocking: 0,
            cluster_blocks: UNDEFINED,
            least_blocks: UNDEFINED,
            most_blocks: UNDEFINED,
            network: std::ptr::null(),
            split_share: UNDEFINED,
            traffic_class: UNDEFINED,
        }
    }
}

/// A version in the library's format: 21805 is 2.18.5.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub c_int);

/// The first version with configurations, non-blocking calls and splits.
pub const OLDEST: Version = Version(21800);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Before 2.9, the minor version had one digit less.
        let (major, rest) = match self.0 {
            ..10000 => (self.0 / 1000, self.0 % 1000),
            _ => (self.0 / 10000, self.0 % 10000),
        };
        write!(f, "{major}.{}.{}", rest / 100, rest % 100)
    }
}

/// The colour of a rank that joins no group.
pub const NO_COLOR: c_int = -1;

/// The type of untyped bytes.
pub const BYTE: c_int = 1;

/// Returns the library's constant for a type.
pub fn kind_of(element: CommElement) -> c_int {
    match element {
        CommElement::U8 => BYTE,
        CommElement::I32 => 2,
        CommElement::I64 => 4,
        CommElement::F16 => 6,
        CommElement::F32 => 7,
        CommElement::Bf16 => 9,
    }
}

/// Returns the library's constant for a reduction.
pub fn op_of(reduction: Reduction) -> c_int {
    match reduction {
        Reduction::Sum => 0,
        Reduction::Max => 2,
        Reduction::Min => 3,
    }
}

moesaic_dl::dl_table! {
    /// The functions by their names. Addresses are device memory.
    pub struct NcclTable {
        version: fn(version: *mut c_int) -> NcclResult = "ncclGetVersion";
        unique_id: fn(id: *mut UniqueId) -> NcclResult = "ncclGetUniqueId";
        init: fn(comm: *mut RawComm, ranks: c_int, id: UniqueId, rank: c_int, config: *mut NcclConfig) -> NcclResult = "ncclCommInitRankConfig";
        split: fn(comm: RawComm, color: c_int, key: c_int, new: *mut RawComm, config: *mut NcclConfig) -> NcclResult = "ncclCommSplit";
        finalize: fn(comm: RawComm) -> NcclResult = "ncclCommFinalize";
        destroy: fn(comm: RawComm) -> NcclResult = "ncclCommDestroy";
        abort: fn(comm: RawComm) -> NcclResult = "ncclCommAbort";
        async_error: fn(comm: RawComm, code: *mut NcclResult) -> NcclResult = "ncclCommGetAsyncError";
        count: fn(comm: RawComm, ranks: *mut c_int) -> NcclResult = "ncclCommCount";
        user_rank: fn(comm: RawComm, rank: *mut c_int) -> NcclResult = "ncclCommUserRank";
        error_string: fn(code: NcclResult) -> *const c_char = "ncclGetErrorString";
        last_error: fn(comm: RawComm) -> *const c_char = "ncclGetLastError";
        group_start: fn() -> NcclResult = "ncclGroupStart";
        group_end: fn() -> NcclResult = "ncclGroupEnd";
        send: fn(from: u64, count: usize, kind: c_int, peer: c_int, comm: RawComm, stream: RawStream) -> NcclResult = "ncclSend";
        receive: fn(to: u64, count: usize, kind: c_int, peer: c_int, comm: RawComm, stream: RawStream) -> NcclResult = "ncclRecv";
        all_gather: fn(from: u64, to: u64, count: usize, kind: c_int, comm: RawComm, stream: RawStream) -> NcclResult = "ncclAllGather";
        broadcast: fn(from: u64, to: u64, count: usize, kind: c_int, root: c_int, comm: RawComm, stream: RawStream) -> NcclResult = "ncclBroadcast";
        all_reduce: fn(from: u64, to: u64, count: usize, kind: c_int, op: c_int, comm: RawComm, stream: RawStream) -> NcclResult = "ncclAllReduce";
        reduce_scatter: fn(from: u64, to: u64, count: usize, kind: c_int, op: c_int, comm: RawComm, stream: RawStream) -> NcclResult = "ncclReduceScatter";
    }
    optional {
        all_to_all_nccl: fn(from: u64, to: u64, count: usize, kind: c_int, comm: RawComm, stream: RawStream) -> NcclResult = "ncclAlltoAll";
        all_to_all_rccl: fn(from: u64, to: u64, count: usize, kind: c_int, comm: RawComm, stream: RawStream) -> NcclResult = "ncclAllToAll";
        revoke: fn(comm: RawComm, flags: c_int) -> NcclResult = "ncclCommRevoke";
    }
}

/// The type of the all-to-all function.
pub type AllToAllFn =
    unsafe extern "C" fn(u64, u64, usize, c_int, RawComm, RawStream) -> NcclResult;

impl NcclTable {
    /// Returns the all-to-all function, where the library has one: NCCL since 2.28, RCCL.
    pub fn all_to_all(&self) -> Option<AllToAllFn> {
        self.all_to_all_nccl.or(self.all_to_all_rccl)
    }

    /// Returns the library's text for a code, and its last error.
    ///
    /// # Safety
    /// `comm` is null or a communicator that is not destroyed.
    pub unsafe fn words(&self, code: NcclResult, comm: RawComm) -> String {
        let text = |words: *const c_char| {
            if words.is_null() {
                return String::new();
            }
            // SAFETY: the library's own strings are zero-terminated and never freed.
            let text = unsafe { CStr::from_ptr(words) }.to_string_lossy();
            text.trim().to_string()
        };
        // SAFETY: any code is allowed.
        let words = text(unsafe { self.error_string(code) });
        // SAFETY: null is allowed, and the rest is the caller's contract.
        match &*text(unsafe { self.last_error(comm) }) {
            "" => format!("{words} (code {code})"),
            last => format!("{words} (code {code}): {last}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cudarc::nccl::sys;
    use std::mem::offset_of;

    #[test]
    fn versions_read_as_people_say_them() {
        assert_eq!(Version(23203).to_string(), "2.32.3");
        assert_eq!(OLDEST.to_string(), "2.18.0");
        assert_eq!(Version(2804).to_string(), "2.8.4");
    }

    /// cudarc's bindings are generated from the headers of each version.
    #[test]
    fn structures_are_those_of_the_header() {
        type Theirs = sys::ncclConfig_t;
        assert_eq!(size_of::<NcclConfig>(), 48);
        assert_eq!(align_of::<NcclConfig>(), align_of::<Theirs>());
        for (ours, theirs) in [
            (offset_of!(NcclConfig, size), offset_of!(Theirs, size)),
            (offset_of!(NcclConfig, magic), offset_of!(Theirs, magic)),
            (offset_of!(NcclConfig, version), offset_of!(Theirs, version)),
            (
                offset_of!(NcclConfig, blocking),
                offset_of!(Theirs, blocking),
            ),
            (
                offset_of!(NcclConfig, cluster_blocks),
                offset_of!(Theirs, cgaClusterSize),
            ),
            (
                offset_of!(NcclConfig, least_blocks),
                offset_of!(Theirs, minCTAs),
            ),
            (
                offset_of!(NcclConfig, most_blocks),
                offset_of!(Theirs, maxCTAs),
            ),
            (offset_of!(NcclConfig, network), offset_of!(Theirs, netName)),
            (
                offset_of!(NcclConfig, split_share),
                offset_of!(Theirs, splitShare),
            ),
            (
                offset_of!(NcclConfig, traffic_class),
                offset_of!(Theirs, trafficClass),
            ),
        ] {
            assert_eq!(ours, theirs);
        }
        assert_eq!(size_of::<UniqueId>(), size_of::<sys::ncclUniqueId>());
        assert_eq!(align_of::<UniqueId>(), align_of::<sys::ncclUniqueId>());
    }

    #[test]
    fn numbers_are_those_of_the_header() {
        use sys::ncclDataType_t as OpKind;
        for (element, kind) in [
            (CommElement::F32, OpKind::ncclFloat32),
            (CommElement::Bf16, OpKind::ncclBfloat16),
            (CommElement::F16, OpKind::ncclFloat16),
            (CommElement::I32, OpKind::ncclInt32),
            (CommElement::I64, OpKind::ncclInt64),
            (CommElement::U8, OpKind::ncclUint8),
        ] {
            assert_eq!(kind_of(element), kind as c_int, "{element}");
        }
        for (reduction, op) in [
            (Reduction::Sum, sys::ncclRedOp_t::ncclSum),
            (Reduction::Max, sys::ncclRedOp_t::ncclMax),
            (Reduction::Min, sys::ncclRedOp_t::ncclMin),
        ] {
            assert_eq!(op_of(reduction), op as c_int, "{reduction}");
        }
        assert_eq!(SUCCESS, sys::ncclResult_t::ncclSuccess as NcclResult);
        assert_eq!(IN_PROGRESS, sys::ncclResult_t::ncclInProgress as NcclResult);
    }

    /// A compile-time check that cudarc's functions take the arguments that ours take. Never
    /// called.
    #[allow(dead_code)]
    unsafe fn signatures_are_those_of_the_header(comm: sys::ncclComm_t, stream: sys::cudaStream_t) {
        let (from, to) = (std::ptr::null::<c_void>(), std::ptr::null_mut::<c_void>());
        let kind = sys::ncclDataType_t::ncclUint8;
        let op = sys::ncclRedOp_t::ncclSum;
        let id = sys::ncclUniqueId { internal: [0; 128] };
        let mut new: sys::ncclComm_t = std::ptr::null_mut();
        let mut number: c_int = 0;
        let mut code = sys::ncclResult_t::ncclSuccess;
        // SAFETY: never called.
        unsafe {
            sys::ncclGetVersion(&mut number);
            sys::ncclCommInitRankConfig(&mut new, 1 as c_int, id, 0 as c_int, std::ptr::null_mut());
            sys::ncclCommSplit(comm, 0 as c_int, 0 as c_int, &mut new, std::ptr::null_mut());
            sys::ncclCommGetAsyncError(comm, &mut code);
            sys::ncclCommCount(comm, &mut number);
            sys::ncclCommUserRank(comm, &mut number);
            sys::ncclSend(from, 1usize, kind, 0 as c_int, comm, stream);
            sys::ncclRecv(to, 1usize, kind, 0 as c_int, comm, stream);
            sys::ncclAllGather(from, to, 1usize, kind, comm, stream);
            sys::ncclAlltoAll(from, to, 1usize, kind, comm, stream);
            sys::ncclBroadcast(from, to, 1usize, kind, 0 as c_int, comm, stream);
            sys::ncclAllReduce(from, to, 1usize, kind, op, comm, stream);
            sys::ncclReduceScatter(from, to, 1usize, kind, op, comm, stream);
            sys::ncclCommRevoke(comm, 0 as c_int);
            sys::ncclGetErrorString(code);
            sys::ncclGetLastError(comm);
        }
    }
}
