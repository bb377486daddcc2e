//! A kernel's input cannot be where its output goes, nor of another dtype.

use moesaic::typed::{In, Out};

moesaic::layer! {
    pub struct Tiny {
        shape = { model_dim = 64, hidden_dim = 128, experts = 8, top_k = 2 }
    }
}

fn args(x: In<f32>, weight: In<moesaic::half::bf16>) -> tiny_kernels::gate_topk::GateLogits {
    tiny_kernels::gate_topk::GateLogits {
        x,
        weight,
        logits: x,
        tokens: 1,
    }
}

fn chained(logits: Out<f32>) -> In<f32> {
    logits.into()
}

fn main() {}
