//! Tests of specs in one binary, because linking each binary costs seconds.

mod expression;
mod hf;
mod hf_quantized;
mod hf_routing;
mod hf_served;
mod hostile;
mod published;
mod round_trip;
mod ui;
