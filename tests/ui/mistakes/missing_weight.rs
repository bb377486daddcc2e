//! A tensor that the spec does not have, and one that is left out.

moesaic::layer! {
    pub struct Plain {
        [shape]
        model_dim = 64
        hidden_dim = 128
        experts = 8
        top_k = 2

        [experts]
        form = "plain"
    }
}

fn weights<'a>(
    router_weight: &'a [[f32; 64]; 8],
    up: &'a [[[f32; 64]; 128]; 8],
) -> PlainWeights<'a> {
    PlainWeights {
        router_weight,
        experts_gate_weight: up,
        experts_up_weight: up,
    }
}

fn main() {}
