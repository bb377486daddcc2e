//! From a layer spec to kernel descriptions, configurations and the order they run in.
