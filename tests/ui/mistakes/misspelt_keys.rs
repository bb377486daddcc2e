//! One error per problem, each with a suggestion.

moesaic::layer! {
    pub struct Misspelt {
        [shape]
        modle_dim = 64
        hidden_dim = 128
        experts = 8
        top_k = 2

        [router]
        score = "softmx"

        [rooter]
        bias = true
    }
}

fn main() {}
