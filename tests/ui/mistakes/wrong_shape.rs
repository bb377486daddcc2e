//! A weight of another shape is another type.

moesaic::layer! {
    pub struct Tiny {
        shape = { model_dim = 64, hidden_dim = 128, experts = 8, top_k = 2 }
    }
}

fn weights<'a>(router: &'a [[f32; 8]; 64], rest: &TinyWeights<'a>) -> TinyWeights<'a> {
    TinyWeights {
        router_weight: router,
        ..*rest
    }
}

fn forward(layer: &Tiny, x: &[[f32; 32]]) {
    let _ = layer.forward(x);
}

fn forward_half(layer: &Tiny, x: &[[moesaic::half::f16; 64]]) {
    let _ = layer.forward(x);
}

fn main() {}
