//! Kernel templates, embedded.
