//! From a kernel plan to kernel source text.
