//! The only home of dlopen: library search and typed symbol tables.
