//! Doc comments of generated items.

use moesaic_kernel::Size;
use moesaic_plan::TensorPlan;
use moesaic_spec::LayerSpec;
use proc_macro2::TokenStream;
use quote::quote;

/// The longest line of a doc comment.
const WIDTH: usize = 88;

/// Returns `///` lines, with long lines broken.
pub(crate) fn doc(text: &str) -> TokenStream {
    let lines = text.lines().flat_map(wrap);
    quote!(#(#[doc = #lines])*)
}

fn wrap(line: &str) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in line.split_whitespace() {
        let last = lines.len() - 1;
        if lines[last].len() + word.len() < WIDTH || lines[last].is_empty() {
            lines[last] += &format!(" {word}")
        } else {
            lines.push(format!(" {word}"))
        }
    }
    lines
}

/// Describes the layer in a few lines.
pub(crate) fn layer(spec: &LayerSpec) -> String {
    let (shape, precision) = (&spec.shape, &spec.precision);
    let shared = match spec.shared.len() {
        0 => String::new(),
        1 => ", 1 shared expert".to_string(),
        n => format!(", {n} shared experts"),
    };
    format!(
        "A Mixture-of-Experts layer, generated from the spec `{}`.\n\n\
         {} experts, {} per token{shared}; width {} → {} → {}; weights {}, activations {}.",
        spec.name.replace('`', "'").escape_default(),
        shape.experts,
        shape.top_k,
        shape.model_dim,
        shape.hidden_dim,
        spec.output_dim(),
        precision.weights,
        precision.activations,
    )
}

/// Returns name, shape and dtype of a tensor: "`router.weight`, f32 `[8, 64]`".
pub(crate) fn tensor(tensor: &TensorPlan) -> String {
    format!(
        "`{}`, {} `{}`",
        tensor.name,
        tensor.dtype,
        shape(&tensor.shape)
    )
}

/// Returns a shape with the token count as `T`.
fn shape(sizes: &[Size]) -> String {
    let list: Vec<String> = sizes.iter().map(Size::to_string).collect();
    format!("[{}]", list.join(", "))
}

/// Returns a path as people write it: `moesaic::typed` for `::moesaic::typed`.
pub(crate) fn path(path: &syn::Path) -> String {
    quote!(#path)
        .to_string()
        .replace(' ', "")
        .trim_start_matches("::")
        .to_string()
}

/// Returns the meaning of a layer's input or output.
pub(crate) fn meaning(name: &str) -> &'static str {
    match name {
        "x" => "The tokens",
        "token_ids" => "The vocabulary id of each token",
        "y" => "The result",
        "router.logits" => "Router logits",
        "topk_ids" => "The experts of each token, best first",
        "topk_weights" => "The weights of these experts",
        "counts" => "Assignments per expert, before dropping",
        "offsets" => "The first row of each expert, and the number of rows",
        "locations" => "The index of each assignment among the rows of its expert; -1 when dropped",
        "slot_rows" => "The row of each assignment; -1 when dropped",
        "row_slots" => "The assignment of each row",
        "capacity" => "The most rows that an expert accepts in this call",
        "overflow" => "Assignments that were dropped",
        "dy" => "The gradient of the result",
        "dx" => "The gradient of the tokens",
        "grad.topk_weights" => "The gradient of the experts' weights",
        "grad.router.logits" => "The gradient of the router logits",
        name if name.starts_with("loss.") => "An auxiliary loss, without its coefficient",
        _ => "A tensor",
    }
}
