//! Recipes that assemble a canonical tensor from those of a GGUF file.

use super::GgufError;
use super::block::Block;
use crate::hf::{Alternative, Codes, TensorParts, TensorSource, TensorStep, half_of};
use crate::{LayerSpec, TensorSpec, canonical_tensors};

/// Name prefixes of the tensors that belong to the MoE block.
const OWN: [&str; 3] = ["ffn_gate_inp", "exp_probs_b", "ffn_gate_tid2eid"];

/// Returns one recipe for each canonical tensor of the layer.
pub(super) fn sources(spec: &LayerSpec, block: &Block<'_>) -> Result<Vec<TensorSource>, GgufError> {
    let source = |tensor: TensorSpec| {
        let alternatives = alternatives(spec, block, &tensor);
        if alternatives.is_empty() {
            Err(GgufError::MissingTensor {
                tensor: format!("{}, as GGUF would have it", tensor.name),
            })
        } else {
            Ok(TensorSource {
                name: tensor.name,
                alternatives,
            })
        }
    };
    let sources: Result<Vec<TensorSource>, GgufError> =
        canonical_tensors(spec).into_iter().map(source).collect();
    let sources = sources?;
    check_all_read(&sources, block)?;
    Ok(sources)
}

/// Returns the forms in which files hold a tensor.
fn alternatives(spec: &LayerSpec, block: &Block<'_>, tensor: &TensorSpec) -> Vec<Alternative> {
    let one = |end: &str, steps: &[TensorStep]| {
        let first = TensorStep::Dequantize(Codes::new(&[], Vec::new()));
        Alternative {
            parts: TensorParts::One(block.name(end)),
            steps: [&[first], steps].concat(),
        }
    };
    let path: Vec<&str> = tensor.name.split('.').collect();
    let (part, kind, after) = match path.as_slice() {
        ["router", "weight"] => return vec![one("ffn_gate_inp.weight", &[])],
        ["router", "bias"] => return vec![one("ffn_gate_inp.bias", &[])],
        ["router", "select_bias"] => {
            return ["exp_probs_b.bias", "exp_probs_b"]
                .map(|end| one(end, &[]))
                .to_vec();
        }
        ["shared", "0", "router", "weight"] => {
            let flat = TensorStep::Reshape(tensor.shape.clone());
            return vec![one("ffn_gate_inp_shexp.weight", &[flat])];
        }
        ["experts", part, kind] => (*part, *kind, "exps"),
        ["shared", "0", part, kind] => (*part, *kind, "shexp"),
        _ => return Vec::new(),
    };
    let mut ways = vec![one(&format!("ffn_{part}_{after}.{kind}"), &[])];
    let half = ["gate", "up"].iter().position(|half| *half == part);
    if let Some(half) = half {
        // The convert script can fuse gate and up, with the rows of gate first.
        let axis = tensor.shape.len() - if kind == "bias" { 1 } else { 2 };
        let half = half_of(axis, half, tensor.shape[axis], false);
        ways.push(one(&format!("ffn_gate_up_{after}.{kind}"), &[half]));
    }
    if after == "exps" {
        // Files from before April 2024 have one tensor per expert.
        ways.push(Alternative {
            parts: TensorParts::PerExpert {
                before: block.name(&format!("ffn_{part}.")),
                after: format!(".{kind}"),
                first: 0,
                count: spec.shape.experts,
            },
            ..one("", &[])
        });
    }
    ways
}

/// Refuses a file with tensors of experts or router that no recipe reads, such as a bias that the
/// family lacks, or scales beside the experts.
fn check_all_read(sources: &[TensorSource], block: &Block<'_>) -> Result<(), GgufError> {
    let read = sources.iter().flat_map(|source| &source.alternatives);
    let read: Vec<String> = read.flat_map(Alternative::names).collect();
    let start = block.name("");
    let own = |name: &&String| {
        let Some(end) = name.strip_prefix(&start) else {
            return false;
        };
        let module = end.split('.').next().unwrap_or_default();
        let experts = module.ends_with("_exps") || module.ends_with("_shexp");
        experts || OWN.iter().any(|own| module.starts_with(own))
    };
    let mut own = block.metadata.tensors.keys().filter(own);
    match own.find(|name| !read.contains(name)) {
        None => Ok(()),
        Some(name) => Err(GgufError::StrayTensor {
            tensor: name.clone(),
            architecture: block.architecture.to_string(),
        }),
    }
}
