//! The version of the store's format.

/// The version of the store's format. It names a directory, and is a field of every file and a part
/// of every key.
pub const FORMAT_VERSION: u32 = 1;
