//! Compiles, caches, loads and runs layers.
