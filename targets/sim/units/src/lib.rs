//! What the matrix units, copy engines and barriers of GPUs do, as pure
//! functions.
