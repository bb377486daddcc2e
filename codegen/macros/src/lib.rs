//! The layer! macro.
