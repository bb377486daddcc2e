//! The f64 reference of the whole layer, written for reading.
