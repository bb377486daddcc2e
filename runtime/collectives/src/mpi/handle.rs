//! Handles and statuses of MPI, whatever the library.

/// A communicator, request, datatype or error handler: a pointer or an `int`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MpiHandle(pub usize);

/// A buffer for a status of any library; the standard's has 32 bytes and is the largest.
#[repr(C, align(16))]
#[derive(Clone, Copy, Default)]
pub struct Status([u64; 8]);
