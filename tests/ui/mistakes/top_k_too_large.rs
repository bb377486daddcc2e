//! The value at fault is underlined in the TOML.

moesaic::layer! {
    /// Nine of eight experts.
    pub struct TooMany {
        [shape]
        model_dim = 64
        hidden_dim = 128
        experts = 8
        top_k = 9
    }
}

fn main() {}
