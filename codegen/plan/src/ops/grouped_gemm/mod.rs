//! `grouped_gemm` and its backward GEMMs.
//!
//! The forward pass keeps x, the pre-activations, and the routing record. With `dout` the rows of
//! the output's gradient (not weighted), `w` a row's weight, `a` its activation and `P = dout ·
//! down`:
//!
//! ```text
//! dw = <P, a> (+ <dout, down bias>)        hidden = w · a
//! dgate, dup = act'(gate, up) · w · P      drows = dgate · gate + dup · up
//! ```
//!
//! so that no kernel needs an expert's output again: the gradient of `<dout, a · downᵀ>` moves to
//! the left operand. Behind a norm of outputs `dout` has w in it, and the norm gives `dw`.

mod config;
mod decode;
pub(crate) mod desc;
pub(crate) mod dgrad;
mod entries;
mod fused_shared;
mod latent;
mod operators;
mod steps;
mod tiles;
pub(crate) mod wgrad;

pub use config::{CpuGemm, GemmFamily, GroupedGemmConfig};
pub use desc::{CodePanel, ExpertGemm, FusedShared, GroupedGemmDesc, Nonlinearity};
pub use dgrad::GroupedGemmDgradDesc;
pub(crate) use entries::expert_axis;
pub(crate) use latent::DOWN as LATENT_DOWN;
pub use wgrad::GroupedGemmWgradDesc;
pub(crate) use wgrad::has_empty_tokens;
