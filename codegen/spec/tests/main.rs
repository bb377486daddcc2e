//! Tests of specs, one binary: each that is linked costs seconds.

mod expression;
mod hf;
mod hf_quantized;
mod hf_routing;
mod hostile;
mod round_trip;
mod ui;
