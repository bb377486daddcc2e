//! Checkpoints in, canonical tensors out.
