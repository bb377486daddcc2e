//! The weight tensors of a layer, by canonical name.

use crate::{Biases, ExpertForm, LayerSpec, NoiseKind, RouterInput, RouterWeight, SharedGate};
use moesaic_kernel::DType;

/// The name of the weight of `experts.output_norm_eps`.
const EXPERT_NORM: &str = "expert_norm.weight";

/// A weight tensor that a layer expects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// The canonical name: `experts.up.weight`.
    pub name: String,
    /// Element type in device memory.
    pub dtype: DType,
    /// Sizes, outermost first; row major.
    pub shape: Vec<usize>,
    /// Its meaning, in one line.
    pub meaning: &'static str,
}

/// A tensor that the layer would not read: a bias, say, that its spec does not have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("is no weight of the spec, which has: {}", known.join(", "))]
pub struct UnknownWeight {
    /// The names of the spec's weights.
    pub known: Vec<String>,
}

/// Checks that a layer has a weight of this name. With quantized experts every name below
/// `experts.` passes, because their codes have other names where a device takes them as numbers.
///
/// # Errors
/// [`UnknownWeight`] lists the names that there are.
pub fn check_weight_name(spec: &LayerSpec, name: &str) -> Result<(), UnknownWeight> {
    let weights = canonical_tensors(spec);
    let quantized = spec.precision.experts.is_some() && name.starts_with("experts.");
    if quantized || weights.iter().any(|weight| weight.name == name) {
        return Ok(());
    }
    let known = weights.into_iter().map(|weight| weight.name).collect();
    Err(UnknownWeight { known })
}

/// Returns every weight tensor of the layer, in a fixed order.
///
/// Gate and up are always separate here. Loading splits fused checkpoint layouts.
pub fn canonical_tensors(spec: &LayerSpec) -> Vec<TensorSpec> {
    let mut list = router_tensors(spec);
    let shape = &spec.shape;
    let sizes = ExpertSizes {
        experts: Some(shape.experts),
        model: spec.expert_input_dim(),
        hidden: shape.hidden_dim,
        output: spec.expert_output_dim(),
    };
    list.extend(expert_tensors(spec, "experts", &sizes, spec.experts.bias));
    if spec.experts.output_norm_eps.is_some() {
        // Not below `experts.`, where every tensor has a part for each expert.
        list.push(TensorSpec {
            name: EXPERT_NORM.to_string(),
            dtype: DType::F32,
            shape: vec![spec.expert_output_dim()],
            meaning: "factor on each expert's output before it is normalised",
        });
    }
    list.extend(latent_tensors(spec));
    for (index, shared) in spec.shared.iter().enumerate() {
        let sizes = ExpertSizes {
            experts: None,
            model: shape.model_dim,
            hidden: shared.hidden_dim,
            output: spec.output_dim(),
        };
        let prefix = format!("shared.{index}");
        let biases = spec.shared_bias(index);
        list.extend(expert_tensors(spec, &prefix, &sizes, biases));
        list.extend(shared_gate_tensors(spec, shared.gate, &prefix));
    }
    list
}

/// Returns the dtype of a weight's gradient, by the weight's name: that of `expert_gradients` for the
/// matrices of routed and shared experts, and f32 for all others.
pub fn gradient_dtype(spec: &LayerSpec, weight: &str) -> DType {
    let is_matrix = |name: &str| {
        let (owner, part) = name.strip_suffix(".weight")?.rsplit_once('.')?;
        let owned = owner == "experts" || owner.starts_with("shared.");
        Some(owned && matches!(part, "gate" | "up" | "down"))
    };
    match is_matrix(weight) {
        Some(true) => spec.precision.expert_gradients,
        _ => DType::F32,
    }
}

fn router_tensors(spec: &LayerSpec) -> Vec<TensorSpec> {
    let of_kind = |list: &'static [RouterWeight]| {
        list.iter().map(|weight| TensorSpec {
            name: weight.name.to_string(),
            dtype: weight.dtype,
            shape: weight.shape.iter().map(|axis| axis.size(spec)).collect(),
            meaning: weight.meaning,
        })
    };
    let logits = spec.logits().map_or(&[][..], |logits| logits.weights);
    let mut list: Vec<TensorSpec> = of_kind(logits).collect();
    list.extend(option_tensors(spec));
    list.extend(of_kind(spec.router.kind.def().choice_weights));
    list
}

/// Returns the weights that options add to every kind of router.
fn option_tensors(spec: &LayerSpec) -> Vec<TensorSpec> {
    let (router, model, experts) = (&spec.router, spec.shape.model_dim, spec.routed_experts());
    let mut list = Vec::new();
    let mut push = |name: &str, shape: &[usize], meaning| {
        list.push(TensorSpec {
            name: name.to_string(),
            dtype: DType::F32,
            shape: shape.to_vec(),
            meaning,
        });
    };
    if router.bias {
        push("router.bias", &[experts], "bias of the logits");
    }
    if router.select_bias {
        push(
            "router.select_bias",
            &[experts],
            "added to scores for selection only",
        );
    }
    if router.noise > 0.0 && router.noise_kind == NoiseKind::Learned {
        push(
            "router.noise.weight",
            &[experts, model],
            "projection of tokens to the scale of the noise",
        );
    }
    if router.entropy.is_some() {
        push(
            "router.load",
            &[experts],
            "share of the assignments that each expert got lately",
        );
    }
    if router.input == RouterInput::RmsScaled {
        push(
            "router.input_scale",
            &[model],
            "scale of the normalised router input",
        );
    }
    if router.expert_scale {
        push(
            "router.expert_scale",
            &[experts],
            "factor on the weight of each expert",
        );
    }
    list
}

fn shared_gate_tensors(spec: &LayerSpec, gate: SharedGate, prefix: &str) -> Vec<TensorSpec> {
    let of = |part: &str, shape: Vec<usize>, meaning| TensorSpec {
        name: format!("{prefix}.router.{part}"),
        dtype: DType::F32,
        shape,
        meaning,
    };
    let model = spec.shape.model_dim;
    let own = "projection of the shared expert's own gate";
    let pair = "projection to the weights of routed experts and of this one";
    match gate {
        SharedGate::None => vec![],
        SharedGate::Sigmoid => vec![of("weight", vec![1, model], own)],
        SharedGate::Residual => vec![
            of("weight", vec![2, model], pair),
            of("bias", vec![2], "bias of both"),
        ],
    }
}

fn latent_tensors(spec: &LayerSpec) -> Vec<TensorSpec> {
    let Some(latent) = &spec.latent else {
        return Vec::new();
    };
    let of = |name: &str, shape: &[usize], meaning| TensorSpec {
        name: format!("latent.{name}"),
        dtype: spec.precision.weights,
        shape: shape.to_vec(),
        meaning,
    };
    let (model, output) = (spec.shape.model_dim, spec.output_dim());
    let down = "projection of tokens to the width of routed experts";
    let up = "projection of their sum to the width of the output";
    let mut list = vec![
        of("down.weight", &[latent.dim, model], down),
        of("up.weight", &[output, latent.dim], up),
    ];
    if latent.bias {
        list.push(of("down.bias", &[latent.dim], "bias of the way down"));
        list.push(of("up.bias", &[output], "bias of the way up"));
    }
    let norms = [
        (latent.norm_eps, "norm", "scale of the normalised sum"),
        (
            latent.input_norm_eps,
            "input_norm",
            "scale of the normalised input of experts",
        ),
    ];
    for (_, norm, meaning) in norms.iter().filter(|(eps, _, _)| eps.is_some()) {
        list.push(TensorSpec {
            dtype: DType::F32,
            ..of(&format!("{norm}.weight"), &[latent.dim], meaning)
        });
    }
    list
}

/// Sizes of one set of experts; `experts` is `None` for a shared expert.
struct ExpertSizes {
    experts: Option<usize>,
    model: usize,
    hidden: usize,
    output: usize,
}

fn expert_tensors(
    spec: &LayerSpec,
    prefix: &str,
    sizes: &ExpertSizes,
    biases: Biases,
) -> Vec<TensorSpec> {
    let matrix = |part: &str, rows: usize, columns: usize, meaning| {
        let of = |end: &str, dtype, size: [usize; 2], meaning| TensorSpec {
            name: format!("{prefix}.{part}.{end}"),
            dtype,
            shape: sizes.experts.into_iter().chain(size).collect(),
            meaning,
        };
        let Some(format) = spec.precision.format_of(&format!("{prefix}.{part}.weight")) else {
            return vec![of(
                "weight",
                spec.precision.weights,
                [rows, columns],
                meaning,
            )];
        };
        let parts = format.tensors([rows, columns]).into_iter();
        let parts = parts.map(|part| {
            let meaning = match part.end {
                "weight" => meaning,
                _ => part.meaning,
            };
            of(part.end, part.dtype, part.shape, meaning)
        });
        parts.collect()
    };
    let bias = |part: &str, rows: usize, meaning| TensorSpec {
        name: format!("{prefix}.{part}.bias"),
        dtype: spec.precision.weights,
        shape: sizes.experts.into_iter().chain([rows]).collect(),
        meaning,
    };
    let mut list = Vec::new();
    let gated = spec.experts.form == ExpertForm::Gated;
    if gated {
        list.extend(matrix("gate", sizes.hidden, sizes.model, "gate projection"));
    }
    list.extend(matrix("up", sizes.hidden, sizes.model, "up projection"));
    list.extend(matrix(
        "down",
        sizes.output,
        sizes.hidden,
        "down projection",
    ));
    if biases.up() && gated {
        list.push(bias("gate", sizes.hidden, "bias of the gate projection"));
    }
    if biases.up() {
        list.push(bias("up", sizes.hidden, "bias of the up projection"));
    }
    if biases.down() {
        list.push(bias("down", sizes.output, "bias of the down projection"));
    }
    list
}
