//! Suggestions for misspelled keys and values.

/// The closest of `known`, if it is close enough to be what was meant.
#[doc(hidden)]
pub fn closest<'a>(word: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let word = plain(word);
    let letters = word.chars().count();
    let allowed = allowed(letters);
    // Words of other lengths are far away whatever their letters, so skip the costly distance.
    let near = |candidate: &&str| plain(candidate).chars().count().abs_diff(letters) <= allowed;
    let near = known.filter(near);
    let scored = near.map(|candidate| (distance(&word, &plain(candidate)), candidate));
    let (best, candidate) = scored.min_by_key(|(distance, _)| *distance)?;
    (best <= allowed).then_some(candidate)
}

/// Returns the optimal string alignment distance: the least number of insertions, deletions,
/// replacements and swaps of neighbours that make `b` of `a`.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut rows = vec![vec![0; b.len() + 1]; a.len() + 1];
    rows[0] = (0..=b.len()).collect();
    for i in 1..=a.len() {
        rows[i][0] = i;
        for j in 1..=b.len() {
            let replaced = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut least = replaced.min(rows[i - 1][j] + 1).min(rows[i][j - 1] + 1);
            let swap = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
            if swap {
                least = least.min(rows[i - 2][j - 2] + 1);
            }
            rows[i][j] = least;
        }
    }
    rows[a.len()][b.len()]
}

/// Typing errors tolerated in a word of that many letters.
fn allowed(letters: usize) -> usize {
    match letters {
        0..3 => 0,
        3..6 => 1,
        6..10 => 2,
        _ => 3,
    }
}

/// Returns the word in lower case without separators, so `TopK`, `top-k` and `top_k` are equal.
fn plain(word: &str) -> String {
    let letters = word.chars().filter(|c| !matches!(c, '-' | '_' | ' '));
    letters.flat_map(char::to_lowercase).collect()
}

/// Keys of Hugging Face configurations and of other systems: their spelling, the path of the key
/// here, and how to write it.
const KEY_ALIASES: &[(&str, &str, &str)] = &[
    ("num_experts_per_tok", "shape.top_k", "top_k"),
    ("num_experts_per_token", "shape.top_k", "top_k"),
    ("moe_top_k", "shape.top_k", "top_k"),
    ("moe_topk", "shape.top_k", "top_k"),
    ("k", "shape.top_k", "top_k"),
    ("hidden_size", "shape.model_dim", "model_dim"),
    ("d_model", "shape.model_dim", "model_dim"),
    ("intermediate_size", "shape.hidden_dim", "hidden_dim"),
    ("moe_intermediate_size", "shape.hidden_dim", "hidden_dim"),
    ("ffn_dim", "shape.hidden_dim", "hidden_dim"),
    ("d_ff", "shape.hidden_dim", "hidden_dim"),
    ("num_experts", "shape.experts", "experts"),
    ("num_local_experts", "shape.experts", "experts"),
    ("n_routed_experts", "shape.experts", "experts"),
    ("routed_scaling_factor", "router.scale", "scale"),
    (
        "norm_topk_prob",
        "router.renormalize",
        "renormalize = \"sum\"",
    ),
    ("scoring_func", "router.score", "score"),
    ("score_func", "router.score", "score"),
    ("n_group", "router.groups", "groups.count"),
    ("topk_group", "router.groups", "groups.keep"),
    (
        "router_logit_softcapping",
        "router.logit_softcap",
        "logit_softcap",
    ),
    ("router_jitter_noise", "router.jitter", "jitter"),
    ("vocab_size", "router.table_rows", "table_rows"),
    ("hidden_act", "experts.activation", "activation"),
    ("swiglu_limit", "experts.clamp", "clamp"),
    ("mlp_up_softcap", "experts.up_softcap", "up_softcap"),
    ("swiglu_alpha", "experts.alpha", "alpha"),
    ("zero_expert_num", "experts.identity", "identity"),
    ("n_shared_experts", "shared", "[[shared]]"),
    (
        "shared_expert_intermediate_size",
        "shared",
        "[[shared]] hidden_dim",
    ),
    ("router_aux_loss_coef", "losses", "[[losses]] coefficient"),
    ("capacity_factor", "capacity.factor", "factor"),
    (
        "eval_capacity_factor",
        "capacity.eval_factor",
        "eval_factor",
    ),
    ("expert_capacity", "capacity.rows", "rows"),
    ("dtype", "precision.weights", "weights"),
    ("torch_dtype", "precision.weights", "weights"),
];

/// Returns the key that another system calls `word`, as a path and as written.
pub(crate) fn key_alias(word: &str) -> Option<(&'static str, &'static str)> {
    let found = KEY_ALIASES.iter().find(|(alias, ..)| *alias == word)?;
    Some((found.1, found.2))
}

/// Values as other systems spell them.
const VALUE_ALIASES: &[(&str, &str)] = &[
    ("float32", "f32"),
    ("fp32", "f32"),
    ("float", "f32"),
    ("float16", "f16"),
    ("fp16", "f16"),
    ("half", "f16"),
    ("bfloat16", "bf16"),
    ("swish", "silu"),
    ("gelu_new", "gelu-tanh"),
    ("gelu_pytorch_tanh", "gelu-tanh"),
    ("gelu_tanh", "gelu-tanh"),
    ("swiglu", "gated"),
    ("geglu", "gated"),
    ("swiglu", "silu"),
    ("geglu", "gelu"),
    ("reglu", "relu"),
    ("mlp", "plain"),
    ("ffn", "plain"),
    ("sqrtsoftplus", "sqrt-softplus"),
    ("softmax_topk", "softmax-selected"),
    ("l1", "p-norm"),
    ("bpr", "batch-prioritized"),
    ("hash", "table"),
    ("none", "dropless"),
];

/// Returns the value meant by `word`: another system's spelling of one of `known`, or the closest
/// of them.
pub(crate) fn value(word: &str, known: &[&'static str]) -> Option<&'static str> {
    let lower = word.to_lowercase();
    let alias = VALUE_ALIASES
        .iter()
        .find(|(alias, meant)| *alias == lower && known.contains(meant));
    let close = || closest(word, known.iter().copied());
    alias.map(|(_, meant)| *meant).or_else(close)
}

/// Returns true for the names of gated forms that say their activation too.
pub(crate) fn is_gated_form(word: &str) -> bool {
    ["swiglu", "geglu", "reglu"].contains(&word.to_lowercase().as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances() {
        let cases = [
            ("", "", 0),
            ("", "abc", 3),
            ("topk", "topk", 0),
            ("tpok", "topk", 1),
            ("kitten", "sitting", 3),
            ("experts", "expert", 1),
        ];
        for (a, b, expected) in cases {
            assert_eq!(distance(a, b), expected, "{a} {b}");
            assert_eq!(distance(b, a), expected, "{b} {a}");
        }
    }

    #[test]
    fn near_words_are_found_and_far_ones_are_not() {
        let known = ["model_dim", "hidden_dim", "experts", "top_k", "output_dim"];
        let find = |word| closest(word, known.into_iter());
        assert_eq!(find("TopK"), Some("top_k"));
        assert_eq!(find("modle_dim"), Some("model_dim"));
        assert_eq!(find("expert"), Some("experts"));
        assert_eq!(find("temperature"), None);
        assert_eq!(find("x"), None);
        assert_eq!(find(""), None);
    }

    #[test]
    fn values_know_other_spellings() {
        assert_eq!(value("BFLOAT16", &["f32", "bf16"]), Some("bf16"));
        assert_eq!(value("swiglu", &["gated", "plain"]), Some("gated"));
        assert_eq!(value("swiglu", &["silu", "relu"]), Some("silu"));
        assert_eq!(value("GEGLU", &["silu", "gelu"]), Some("gelu"));
        assert_eq!(value("slot_major", &["slot-major"]), Some("slot-major"));
        assert_eq!(value("tanh", &["silu", "relu"]), None);
    }
}
