//! What TOML has and Rust tokens have not, and the other way round.

moesaic::layer! {
    pub struct Comment {
        # A comment.
        [shape]
    }
}

moesaic::layer! {
    pub struct Commas {
        shape = { model_dim = 64, hidden_dim = 128, experts = 8, top_k = 2 },
    }
}

moesaic::layer! {
    pub struct Suffix {
        shape = { model_dim = 64usize, hidden_dim = 128, experts = 8, top_k = 2 }
    }
}

moesaic::layer! {
    pub struct NoSpec;
}

fn main() {}
