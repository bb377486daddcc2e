//! The binary interfaces of MPI libraries, where they differ.
//!
//! MPI 5 defines a standard ABI. Open MPI 4 and 5 have their own, and so do MPICH 3 and 4 with
//! Intel MPI and other descendants. No field of a status is ever read, so one buffer of the
//! largest size serves all.

use super::handle::MpiHandle;
use super::table::{Integers, MpiFunctions, Pointers};
use moesaic_dl::{DlError, Library};
use std::ffi::{c_int, c_void};
use std::path::Path;

/// The constants of a library that are used here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Abi {
    /// Its name: `the standard ABI of MPI 5`.
    pub name: &'static str,
    pub comm_world: MpiHandle,
    pub byte: MpiHandle,
    pub errors_return: MpiHandle,
    pub any_source: c_int,
    pub thread_serialized: c_int,
    pub tag_ub: c_int,
}

const STANDARD: Abi = Abi {
    name: "the standard ABI of MPI 5",
    comm_world: MpiHandle(0x101),
    byte: MpiHandle(0x247),
    errors_return: MpiHandle(0x143),
    any_source: -1,
    thread_serialized: 2048,
    tag_ub: 501,
};

/// The name of Open MPI's interface.
pub const OPEN_MPIS_ABI: &str = "Open MPI's ABI";

/// Handles are `int`.
const MPICH: Abi = Abi {
    name: "MPICH's ABI",
    comm_world: MpiHandle(0x4400_0000),
    byte: MpiHandle(0x4c00_010d),
    errors_return: MpiHandle(0x5400_0001),
    any_source: -2,
    thread_serialized: 2,
    tag_ub: 0x6440_0001,
};

/// Handles are addresses of the library's own objects.
fn open_mpi(library: &Library) -> Result<Abi, DlError> {
    // SAFETY: only the symbol's address is taken.
    let address = |symbol: &str| unsafe { library.symbol::<*const c_void>(symbol) };
    Ok(Abi {
        name: OPEN_MPIS_ABI,
        comm_world: MpiHandle(address("ompi_mpi_comm_world")?.addr()),
        byte: MpiHandle(address("ompi_mpi_byte")?.addr()),
        errors_return: MpiHandle(address("ompi_mpi_errors_return")?.addr()),
        any_source: -1,
        thread_serialized: 2,
        tag_ub: 0,
    })
}

/// Loads the library's functions and constants.
///
/// A file named `libmpi_abi` has the standard interface, whatever other symbols it exports. Among
/// the others, Open MPI is recognized by its exported objects.
pub fn load(library: Library) -> Result<(Box<dyn MpiFunctions>, Abi), DlError> {
    let file = Path::new(library.name()).file_name().unwrap_or_default();
    if file.to_string_lossy().starts_with("libmpi_abi") {
        // SAFETY: the signatures are those of the standard, whose handles are pointers.
        return Ok((Box::new(unsafe { Pointers::load(library)? }), STANDARD));
    }
    match open_mpi(&library) {
        // SAFETY: as above; Open MPI's handles are pointers, too.
        Ok(abi) => Ok((Box::new(unsafe { Pointers::load(library)? }), abi)),
        // SAFETY: MPICH's handles are `int`; a library that is no MPI lacks the functions.
        Err(_) => Ok((Box::new(unsafe { Integers::load(library)? }), MPICH)),
    }
}
