//! State dictionaries of Tutel and FastMoE.

use moesaic_spec::keys::CheckpointLibrary;
use moesaic_spec::{LayerSpec, canonical_tensors};
use moesaic_tensor::{Tensor, Tensors};
use moesaic_weights::*;
use std::path::Path;

const PLAIN: &str = "form = \"plain\"\nactivation = \"gelu\"\nbias = true";

fn spec(router: &str, experts: &str) -> LayerSpec {
    let toml = format!(
        "[shape]\nmodel_dim = 6\nhidden_dim = 5\nexperts = 4\ntop_k = 2\n\
         [router]\n{router}\n[experts]\n{experts}\n"
    );
    LayerSpec::from_toml(&toml).unwrap_or_else(|e| panic!("{}", e.render(&toml, false)))
}

/// Returns canonical tensors whose elements all differ.
fn numbered(spec: &LayerSpec) -> Tensors<'static> {
    let mut next = 0;
    let tensors = canonical_tensors(spec).into_iter().map(|tensor| {
        let count: usize = tensor.shape.iter().product();
        let values: Vec<f32> = (next..next + count).map(|i| i as f32).collect();
        next += count;
        (tensor.name, Tensor::copied(&tensor.shape, &values))
    });
    tensors.collect()
}

/// Swaps the last two dimensions.
fn swapped(tensor: &Tensor<'_>) -> Tensor<'static> {
    let mut shape = tensor.shape.clone();
    let rank = shape.len();
    shape.swap(rank - 2, rank - 1);
    let [rows, columns] = [shape[rank - 1], shape[rank - 2]];
    let values: Vec<f32> = tensor.to_f64().iter().map(|&v| v as f32).collect();
    let matrices = values.chunks(rows * columns);
    let turned = matrices
        .flat_map(|m| (0..columns).flat_map(move |c| (0..rows).map(move |r| m[r * columns + c])));
    Tensor::copied(&shape, &turned.collect::<Vec<_>>())
}

/// Returns the same elements in one dimension.
fn flat(tensor: &Tensor<'_>) -> Tensor<'static> {
    Tensor {
        shape: vec![tensor.shape.iter().product()],
        ..tensor.clone().into_static()
    }
}

/// Returns `count` experts of a tensor, from `first` on.
fn some(tensor: &Tensor<'_>, first: usize, count: usize) -> Tensor<'static> {
    let size = tensor.data.len() / tensor.shape[0];
    let mut shape = tensor.shape.clone();
    shape[0] = count;
    Tensor {
        dtype: tensor.dtype,
        shape,
        data: tensor.data[first * size..(first + count) * size]
            .to_vec()
            .into(),
    }
}

fn count(experts: i64) -> Tensor<'static> {
    Tensor::owned(&[], vec![experts])
}

/// Returns a plain layer with Tutel's names.
fn tutel(weights: &Tensors<'static>, prefix: &str) -> Tensors<'static> {
    let w = |name: &str| weights[name].clone();
    let named = [
        ("gates.0.wg.weight", w("router.weight")),
        ("experts.batched_fc1_w", w("experts.up.weight")),
        ("experts.batched_fc1_bias", w("experts.up.bias")),
        ("experts.batched_fc2_w", swapped(&w("experts.down.weight"))),
        ("experts.batched_fc2_bias", w("experts.down.bias")),
        ("_num_global_experts", count(4)),
    ];
    let named = named.into_iter();
    named
        .map(|(name, tensor)| (format!("{prefix}{name}"), tensor))
        .collect()
}

/// Returns a plain layer with FastMoE's names, one module per expert.
fn fastmoe(weights: &Tensors<'static>) -> Tensors<'static> {
    let mut dict = Tensors::from([
        (
            "gate.gate.weight".to_string(),
            weights["router.weight"].clone(),
        ),
        ("gate.gate.bias".to_string(), weights["router.bias"].clone()),
    ]);
    for (theirs, ours) in [("htoh4", "up"), ("h4toh", "down")] {
        for kind in ["weight", "bias"] {
            let tensor = &weights[&format!("experts.{ours}.{kind}")];
            for e in 0..4 {
                dict.insert(format!("experts.{e}.{theirs}.{kind}"), some(tensor, e, 1));
            }
        }
    }
    dict
}

struct Call<'a> {
    library: CheckpointLibrary,
    share: usize,
    prefix: Option<&'a str>,
    gate: Option<usize>,
}

const TUTEL: Call<'_> = Call {
    library: CheckpointLibrary::Tutel,
    share: 4,
    prefix: None,
    gate: None,
};

const FASTMOE: Call<'_> = Call {
    library: CheckpointLibrary::FastMoe,
    ..TUTEL
};

impl Call<'_> {
    fn load(&self, spec: &LayerSpec, dict: &Tensors<'_>) -> Result<Tensors<'static>, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("dict.safetensors");
        write_safetensors(&path, dict).unwrap();
        let chosen = KeyOptions {
            library: self.library,
            prefix: self.prefix.map(str::to_string),
            gate: self.gate,
        };
        let dict = Checkpoint::open(Path::new(&path)).unwrap();
        let loaded = load_keys(spec, self.share, &chosen, &dict, LoadOptions::default());
        loaded.map_err(|e| e.to_string())
    }

    fn refuses(&self, spec: &LayerSpec, dict: &Tensors<'_>, part: &str) {
        let error = self.load(spec, dict).unwrap_err();
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn tutel_layers_by_their_own_names() {
    let spec = spec("", PLAIN);
    let weights = numbered(&spec);
    for prefix in ["", "blocks.3.moe."] {
        assert_eq!(
            TUTEL.load(&spec, &tutel(&weights, prefix)).unwrap(),
            weights
        );
    }
    // A file of an early version does not store its number of experts.
    let mut legacy = tutel(&weights, "");
    legacy.remove("_num_global_experts");
    assert_eq!(TUTEL.load(&spec, &legacy).unwrap(), weights);
}

/// The oldest versions store each expert's bias as a row.
#[test]
fn tutels_oldest_biases_have_a_dimension_more() {
    let spec = spec("", PLAIN);
    let weights = numbered(&spec);
    let mut dict = tutel(&weights, "");
    for name in ["experts.batched_fc1_bias", "experts.batched_fc2_bias"] {
        let bias = dict.get_mut(name).unwrap();
        bias.shape.insert(1, 1);
    }
    assert_eq!(TUTEL.load(&spec, &dict).unwrap(), weights);
    let bias = dict.get_mut("experts.batched_fc1_bias").unwrap();
    bias.shape.swap(0, 2);
    TUTEL.refuses(&spec, &dict, "`experts.batched_fc1_bias`");
}

#[test]
fn tutel_cosine_gates_and_gated_experts() {
    let spec = spec("kind = \"cosine\"\nprojection_dim = 3", "");
    let weights = numbered(&spec);
    let w = |name: &str| weights[name].clone();
    let mut dict = Tensors::new();
    for (theirs, tensor) in [
        (
            "gates.0.cosine_projector.weight",
            w("router.projector.weight"),
        ),
        ("gates.0.cosine_projector.bias", w("router.projector.bias")),
        ("gates.0.sim_matrix", w("router.similarity")),
        ("gates.0.temperature", w("router.temperature")),
        ("experts.W_fc1", flat(&swapped(&w("experts.gate.weight")))),
        ("experts.W_fc2", flat(&swapped(&w("experts.up.weight")))),
        ("experts.W_fc3", swapped(&w("experts.down.weight"))),
    ] {
        dict.insert(theirs.to_string(), tensor);
    }
    assert_eq!(TUTEL.load(&spec, &dict).unwrap(), weights);
}

#[test]
fn fastmoe_layers_by_their_own_names() {
    let spec = spec("bias = true", PLAIN);
    let weights = numbered(&spec);
    assert_eq!(FASTMOE.load(&spec, &fastmoe(&weights)).unwrap(), weights);
    let mut fused = fastmoe(&weights);
    fused.retain(|name, _| name.starts_with("gate."));
    for (theirs, ours) in [("htoh4", "up"), ("h4toh", "down")] {
        for kind in ["weight", "bias"] {
            let tensor = weights[&format!("experts.{ours}.{kind}")].clone();
            fused.insert(format!("experts.{theirs}.{kind}"), tensor);
        }
    }
    assert_eq!(FASTMOE.load(&spec, &fused).unwrap(), weights);
}

#[test]
fn fastmoe_noisy_gates_are_columns() {
    let spec = spec("noise = 1.0\nnoise_kind = \"learned\"", PLAIN);
    let weights = numbered(&spec);
    let mut with_bias = weights.clone();
    with_bias.insert("router.bias".to_string(), Tensor::copied(&[4], &[0.0; 4]));
    let mut dict = fastmoe(&with_bias);
    dict.retain(|name, _| name.starts_with("experts."));
    dict.insert(
        "gate.w_gate".to_string(),
        swapped(&weights["router.weight"]),
    );
    dict.insert(
        "gate.w_noise".to_string(),
        swapped(&weights["router.noise.weight"]),
    );
    assert_eq!(FASTMOE.load(&spec, &dict).unwrap(), weights);
}

#[test]
fn a_rank_holds_its_share_of_the_experts() {
    let spec = spec("", PLAIN);
    let weights = numbered(&spec);
    let mut dict = tutel(&weights, "");
    let experts = dict
        .iter_mut()
        .filter(|(name, _)| name.starts_with("experts."));
    experts.for_each(|(_, tensor)| *tensor = some(tensor, 2, 2));
    let rank = Call { share: 2, ..TUTEL };
    let found = rank.load(&spec, &dict).unwrap();
    assert_eq!(found["router.weight"], weights["router.weight"]);
    let down = &weights["experts.down.weight"];
    assert_eq!(found["experts.down.weight"], some(down, 2, 2));
    TUTEL.refuses(&spec, &dict, "has shape [2, 5, 6], expected [4, 5, 6]");
}

#[test]
fn which_layer_and_gate_has_to_be_clear() {
    let spec = spec("", PLAIN);
    let weights = numbered(&spec);
    let mut two = tutel(&weights, "a.");
    two.extend(tutel(&weights, "b."));
    TUTEL.refuses(&spec, &two, "there are several layers, name one: `a`, `b`");
    let named = |prefix| Call {
        prefix: Some(prefix),
        ..TUTEL
    };
    assert_eq!(named("b").load(&spec, &two).unwrap(), weights);
    assert_eq!(named("b.").load(&spec, &two).unwrap(), weights);
    named("c").refuses(&spec, &two, "no layer `c`, there are: `a`, `b`");
    let mut gates = tutel(&weights, "");
    let other = Tensor::copied(&[4, 6], &[0.5; 24]);
    gates.insert("gates.1.wg.weight".to_string(), other.clone());
    TUTEL.refuses(&spec, &gates, "the layer has gates [0, 1], name one");
    let second = Call {
        gate: Some(1),
        ..TUTEL
    };
    assert_eq!(second.load(&spec, &gates).unwrap()["router.weight"], other);
    TUTEL.refuses(
        &spec,
        &fastmoe_plain(),
        "no name ends with `experts.batched_fc1_w`",
    );
}

fn fastmoe_plain() -> Tensors<'static> {
    fastmoe(&numbered(&spec("bias = true", PLAIN)))
}

#[test]
fn nothing_of_the_layer_is_left_out() {
    let without = spec("", "form = \"plain\"\nactivation = \"gelu\"");
    let weights = numbered(&spec("", PLAIN));
    let dict = tutel(&weights, "");
    TUTEL.refuses(
        &without,
        &dict,
        "the layer has `experts.batched_fc1_bias`, `experts.batched_fc2_bias`, the spec has no",
    );
    let gate = spec("", PLAIN);
    FASTMOE.refuses(
        &gate,
        &fastmoe_plain(),
        "the layer has `gate.gate.bias`, the spec has no",
    );
    let biased = spec("bias = true", PLAIN);
    TUTEL.refuses(&biased, &dict, "no tensor for the spec's `router.bias`");
    let mut fewer = dict;
    fewer.insert("_num_global_experts".to_string(), count(8));
    TUTEL.refuses(
        &gate,
        &fewer,
        "`_num_global_experts` is [8.0], the spec has 4 experts",
    );
}
