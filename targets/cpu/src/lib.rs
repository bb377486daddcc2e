//! The CPU target: the system C compiler, dlopen, rayon.
