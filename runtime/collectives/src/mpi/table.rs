//! The MPI functions in use, for both sizes of handles.

use super::handle::{MpiHandle, Status};
use std::ffi::{c_char, c_int, c_long, c_longlong, c_void};

/// MPI's functions, independent of the handle size. All are unsafe as MPI documents them.
pub trait MpiFunctions: Send {
    fn library(&self) -> &str;
    /// Returns whether messages may have more than 2^31 bytes.
    fn large(&self) -> bool;
    unsafe fn initialized(&self, flag: *mut c_int) -> c_int;
    unsafe fn init_thread(&self, required: c_int, provided: *mut c_int) -> c_int;
    unsafe fn query_thread(&self, provided: *mut c_int) -> c_int;
    unsafe fn finalize(&self) -> c_int;
    unsafe fn library_version(&self, text: *mut c_char, length: *mut c_int) -> c_int;
    unsafe fn error_string(&self, code: c_int, text: *mut c_char, length: *mut c_int) -> c_int;
    unsafe fn comm_rank(&self, comm: MpiHandle, rank: *mut c_int) -> c_int;
    unsafe fn comm_size(&self, comm: MpiHandle, size: *mut c_int) -> c_int;
    unsafe fn comm_set_errhandler(&self, comm: MpiHandle, handler: MpiHandle) -> c_int;
    unsafe fn comm_get_attr(
        &self,
        comm: MpiHandle,
        key: c_int,
        value: *mut c_void,
        flag: *mut c_int,
    ) -> c_int;
    unsafe fn comm_idup(&self, comm: MpiHandle, new: *mut usize, request: &mut usize) -> c_int;
    unsafe fn isend(&self, from: *const c_void, message: MpiStatus, request: &mut usize) -> c_int;
    unsafe fn irecv(&self, to: *mut c_void, message: MpiStatus, request: &mut usize) -> c_int;
    unsafe fn test(&self, request: &mut usize, flag: *mut c_int, status: *mut Status) -> c_int;
    unsafe fn get_count(&self, status: *const Status, kind: MpiHandle, count: *mut c_int) -> c_int;
    unsafe fn cancel(&self, request: &mut usize) -> c_int;
    /// Creates a datatype of byte ranges, one size for each place; sizes have 31 bits unless
    /// [`MpiFunctions::large`] is true.
    unsafe fn type_hindexed(
        &self,
        sizes: &[usize],
        places: &[isize],
        kind: MpiHandle,
        new: &mut usize,
    ) -> c_int;
    unsafe fn type_commit(&self, kind: &mut usize) -> c_int;
    unsafe fn type_free(&self, kind: &mut usize) -> c_int;
}

/// The envelope of a message.
#[derive(Clone, Copy, Debug)]
pub struct MpiStatus {
    /// The number of elements of `kind`: bytes, or one datatype that lists parts.
    pub bytes: usize,
    pub kind: MpiHandle,
    pub peer: c_int,
    pub tag: c_int,
    pub comm: MpiHandle,
}

macro_rules! functions {
    ($module:ident, $Table:ident, $Native:ty) => {
        mod $module {
            use super::*;

            type Native = $Native;

            moesaic_dl::dl_table! {
                /// The functions by their names.
                pub struct $Table {
                    initialized: fn(flag: *mut c_int) -> c_int = "MPI_Initialized";
                    init_thread: fn(argc: *mut c_int, argv: *mut c_void, required: c_int, provided: *mut c_int) -> c_int = "MPI_Init_thread";
                    query_thread: fn(provided: *mut c_int) -> c_int = "MPI_Query_thread";
                    finalize: fn() -> c_int = "MPI_Finalize";
                    library_version: fn(text: *mut c_char, length: *mut c_int) -> c_int = "MPI_Get_library_version";
                    error_string: fn(code: c_int, text: *mut c_char, length: *mut c_int) -> c_int = "MPI_Error_string";
                    comm_rank: fn(comm: Native, rank: *mut c_int) -> c_int = "MPI_Comm_rank";
                    comm_size: fn(comm: Native, size: *mut c_int) -> c_int = "MPI_Comm_size";
                    comm_set_errhandler: fn(comm: Native, handler: Native) -> c_int = "MPI_Comm_set_errhandler";
                    comm_get_attr: fn(comm: Native, key: c_int, value: *mut c_void, flag: *mut c_int) -> c_int = "MPI_Comm_get_attr";
                    comm_idup: fn(comm: Native, new: *mut Native, request: *mut Native) -> c_int = "MPI_Comm_idup";
                    isend: fn(from: *const c_void, count: c_int, kind: Native, to: c_int, tag: c_int, comm: Native, request: *mut Native) -> c_int = "MPI_Isend";
                    irecv: fn(to: *mut c_void, count: c_int, kind: Native, from: c_int, tag: c_int, comm: Native, request: *mut Native) -> c_int = "MPI_Irecv";
                    test: fn(request: *mut Native, flag: *mut c_int, status: *mut Status) -> c_int = "MPI_Test";
                    get_count: fn(status: *const Status, kind: Native, count: *mut c_int) -> c_int = "MPI_Get_count";
                    cancel: fn(request: *mut Native) -> c_int = "MPI_Cancel";
                    type_hindexed: fn(count: c_int, sizes: *const c_int, places: *const isize, kind: Native, new: *mut Native) -> c_int = "MPI_Type_create_hindexed";
                    type_commit: fn(kind: *mut Native) -> c_int = "MPI_Type_commit";
                    type_free: fn(kind: *mut Native) -> c_int = "MPI_Type_free";
                }
                optional {
                    isend_large: fn(from: *const c_void, count: c_longlong, kind: Native, to: c_int, tag: c_int, comm: Native, request: *mut Native) -> c_int = "MPI_Isend_c";
                    irecv_large: fn(to: *mut c_void, count: c_longlong, kind: Native, from: c_int, tag: c_int, comm: Native, request: *mut Native) -> c_int = "MPI_Irecv_c";
                    type_hindexed_large: fn(count: c_longlong, sizes: *const c_longlong, places: *const c_longlong, kind: Native, new: *mut Native) -> c_int = "MPI_Type_create_hindexed_c";
                }
            }

            /// Calls `function` with a native handle, and keeps what it wrote.
            fn with_native(handle: &mut usize, function: impl FnOnce(*mut Native) -> c_int) -> c_int {
                let mut native = *handle as Native;
                let code = function(&mut native);
                *handle = native as usize;
                code
            }

            // SAFETY of all blocks here: the arguments are passed on, and the contract of each
            // function is the caller's.
            // of each function is the caller's.
            impl MpiFunctions for $Table {
                fn library(&self) -> &str {
                    $Table::library(self)
                }

                fn large(&self) -> bool {
                    self.isend_large.is_some() && self.irecv_large.is_some() && self.type_hindexed_large.is_some()
                }

                unsafe fn initialized(&self, flag: *mut c_int) -> c_int {
                    // SAFETY: see above.
                    unsafe { $Table::initialized(self, flag) }
                }

                unsafe fn init_thread(&self, required: c_int, provided: *mut c_int) -> c_int {
                    let none = std::ptr::null_mut;
                    // SAFETY: see above; no arguments are allowed since MPI 2.
                    unsafe { $Table::init_thread(self, none(), std::ptr::null_mut(), required, provided) }
                }

                unsafe fn query_thread(&self, provided: *mut c_int) -> c_int {
                    // SAFETY: see above.
                    unsafe { $Table::query_thread(self, provided) }
                }

                unsafe fn finalize(&self) -> c_int {
                    // SAFETY: see above.
                    unsafe { $Table::finalize(self) }
                }

                unsafe fn library_version(&self, text: *mut c_char, length: *mut c_int) -> c_int {
                    // SAFETY: see above.
                    unsafe { $Table::library_version(self, text, length) }
                }

                unsafe fn error_string(&self, code: c_int, text: *mut c_char, length: *mut c_int) -> c_int {
                    // SAFETY: see above.
                    unsafe { $Table::error_string(self, code, text, length) }
                }

                unsafe fn comm_rank(&self, comm: MpiHandle, rank: *mut c_int) -> c_int {
                    // SAFETY: see above.
                    unsafe { $Table::comm_rank(self, comm.0 as Native, rank) }
                }

                unsafe fn comm_size(&self, comm: MpiHandle, size: *mut c_int) -> c_int {
                    // SAFETY: see above.
                    unsafe { $Table::comm_size(self, comm.0 as Native, size) }
                }

                unsafe fn comm_set_errhandler(&self, comm: MpiHandle, handler: MpiHandle) -> c_int {
                    // SAFETY: see above.
                    unsafe { $Table::comm_set_errhandler(self, comm.0 as Native, handler.0 as Native) }
                }

                unsafe fn comm_get_attr(&self, comm: MpiHandle, key: c_int, value: *mut c_void, flag: *mut c_int) -> c_int {
                    // SAFETY: see above.
                    unsafe { $Table::comm_get_attr(self, comm.0 as Native, key, value, flag) }
                }

                unsafe fn comm_idup(&self, comm: MpiHandle, new: *mut usize, request: &mut usize) -> c_int {
                    // MPI may write the communicator at any time until the request is done, so it
                    // gets the caller's memory and not a temporary. Supported machines are
                    // little-endian, so an `int` is the low half of the word.
                    with_native(request, |request| {
                        // SAFETY: see above.
                        unsafe { $Table::comm_idup(self, comm.0 as Native, new.cast(), request) }
                    })
                }

                unsafe fn isend(&self, from: *const c_void, m: MpiStatus, request: &mut usize) -> c_int {
                    let (kind, comm) = (m.kind.0 as Native, m.comm.0 as Native);
                    with_native(request, |request| match self.isend_large {
                        // SAFETY: see above.
                        Some(large) => unsafe {
                            large(from, m.bytes as c_longlong, kind, m.peer, m.tag, comm, request)
                        },
                        // SAFETY: see above.
                        None => unsafe {
                            $Table::isend(self, from, m.bytes as c_int, kind, m.peer, m.tag, comm, request)
                        },
                    })
                }

                unsafe fn irecv(&self, to: *mut c_void, m: MpiStatus, request: &mut usize) -> c_int {
                    let (kind, comm) = (m.kind.0 as Native, m.comm.0 as Native);
                    with_native(request, |request| match self.irecv_large {
                        // SAFETY: see above.
                        Some(large) => unsafe {
                            large(to, m.bytes as c_longlong, kind, m.peer, m.tag, comm, request)
                        },
                        // SAFETY: see above.
                        None => unsafe {
                            $Table::irecv(self, to, m.bytes as c_int, kind, m.peer, m.tag, comm, request)
                        },
                    })
                }

                unsafe fn test(&self, request: &mut usize, flag: *mut c_int, status: *mut Status) -> c_int {
                    // SAFETY: see above.
                    with_native(request, |request| unsafe { $Table::test(self, request, flag, status) })
                }

                unsafe fn get_count(&self, status: *const Status, kind: MpiHandle, count: *mut c_int) -> c_int {
                    // SAFETY: see above.
                    unsafe { $Table::get_count(self, status, kind.0 as Native, count) }
                }

                unsafe fn cancel(&self, request: &mut usize) -> c_int {
                    // SAFETY: see above.
                    with_native(request, |request| unsafe { $Table::cancel(self, request) })
                }

                unsafe fn type_hindexed(&self, sizes: &[usize], places: &[isize], kind: MpiHandle, new: &mut usize) -> c_int {
                    let kind = kind.0 as Native;
                    with_native(new, |new| match self.type_hindexed_large {
                        Some(large) => {
                            let sizes: Vec<c_longlong> = sizes.iter().map(|n| *n as c_longlong).collect();
                            let places: Vec<c_longlong> = places.iter().map(|n| *n as c_longlong).collect();
                            // SAFETY: see above.
                            unsafe { large(sizes.len() as c_longlong, sizes.as_ptr(), places.as_ptr(), kind, new) }
                        }
                        None => {
                            let sizes: Vec<c_int> = sizes.iter().map(|n| *n as c_int).collect();
                            let count = sizes.len() as c_int;
                            // SAFETY: see above.
                            unsafe { $Table::type_hindexed(self, count, sizes.as_ptr(), places.as_ptr(), kind, new) }
                        }
                    })
                }

                unsafe fn type_commit(&self, kind: &mut usize) -> c_int {
                    // SAFETY: see above.
                    with_native(kind, |kind| unsafe { $Table::type_commit(self, kind) })
                }

                unsafe fn type_free(&self, kind: &mut usize) -> c_int {
                    // SAFETY: see above.
                    with_native(kind, |kind| unsafe { $Table::type_free(self, kind) })
                }
            }
        }

        pub use $module::$Table;
    };
}

functions!(pointers, Pointers, usize);
functions!(integers, Integers, c_int);

/// The value of the attribute with the greatest tag: a pointer to an `int`.
pub type TagBound = *const c_int;

// `MPI_Count` and `MPI_Aint` have 64 bits on every machine with 64-bit addresses.
const _: () = assert!(size_of::<c_longlong>() == 8 && size_of::<c_long>() <= 8);
