//! Files that differ from what the layer reads: other dimension orders, unused tensors, values out
//! of range, missing shards of other layers.

use moesaic_kernel::DType;
use moesaic_spec::{LayerSpec, canonical_tensors, hf};
use moesaic_tensor::{Tensor, Tensors, WeightSource};
use moesaic_weights::*;
use std::fs;

/// Writes tensors to a file and opens it.
fn file(tensors: &Tensors<'_>) -> (tempfile::TempDir, Checkpoint) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    write_safetensors(&path, tensors).unwrap();
    let opened = Checkpoint::open(&path).unwrap();
    (dir, opened)
}

fn numbers(shape: &[usize], first: usize) -> Tensor<'static> {
    let count: usize = shape.iter().product();
    let values: Vec<f32> = (first..first + count).map(|v| v as f32).collect();
    Tensor::copied(shape, &values)
}

fn canonical(spec: &LayerSpec) -> Tensors<'static> {
    let all = canonical_tensors(spec).into_iter();
    all.map(|tensor| (tensor.name, numbers(&tensor.shape, 1)))
        .collect()
}

fn spec(more: &str) -> LayerSpec {
    let shape = "shape = { model_dim = 4, hidden_dim = 3, experts = 2, top_k = 1 }";
    LayerSpec::from_toml(&format!("{shape}\n{more}")).unwrap()
}

/// Swaps the last two dimensions.
fn swapped(tensor: &Tensor<'_>) -> Tensor<'static> {
    let [e, a, b] = tensor.shape[..] else {
        panic!("{:?}", tensor.shape)
    };
    let from = tensor.to_f64();
    let each = (0..e * b * a).map(|i| from[i / (a * b) * a * b + i % a * b + i / a % b] as f32);
    Tensor::copied(&[e, b, a], &each.collect::<Vec<f32>>())
}

/// Qwen3-VL-MoE is published transposed, and others save it as it is in memory. Every shape reads
/// the same from both, even if one of the two tensors is square.
#[test]
fn the_other_tensor_tells_the_order_of_a_square_one() {
    let root = "model.language_model.layers.0.mlp";
    for (d, h) in [(4, 2), (4, 4), (6, 3), (5, 5), (4, 3), (2, 4), (1, 1)] {
        let config = format!(
            r#"{{"model_type": "qwen3_vl_moe", "text_config": {{"model_type": "qwen3_vl_moe_text",
                "hidden_size": {d}, "moe_intermediate_size": {h}, "num_experts": 2,
                "num_experts_per_tok": 1}}}}"#
        );
        let import = hf::import(&config, 0).unwrap();
        let (gate_up, down) = (numbers(&[2, 2 * h, d], 0), numbers(&[2, d, h], 100));
        let load = |gate_up: &Tensor<'static>, down: &Tensor<'static>| {
            let tensors = [
                (format!("{root}.gate.weight"), numbers(&[2, d], 0)),
                (format!("{root}.experts.gate_up_proj"), gate_up.clone()),
                (format!("{root}.experts.down_proj"), down.clone()),
            ];
            let (_dir, file) = file(&tensors.into_iter().collect());
            load_import(&import, &file, LoadOptions::default())
        };
        let rows = load(&gate_up, &down).unwrap();
        assert_eq!(rows["experts.down.weight"], down, "{d} {h}");
        let columns = load(&swapped(&gate_up), &swapped(&down)).unwrap();
        assert_eq!(rows, columns, "{d} {h}");
    }
}

/// If no tensor tells the order, none is guessed.
#[test]
fn an_order_that_nothing_tells_is_refused() {
    let root = "model.layers.0.mlp";
    let config = r#"{"model_type": "qwen3_vl_moe_text", "hidden_size": 4,
        "moe_intermediate_size": 2, "num_experts": 2, "num_experts_per_tok": 1}"#;
    let import = hf::import(config, 0).unwrap();
    let mut tensors = Tensors::new();
    tensors.insert(format!("{root}.gate.weight"), numbers(&[2, 4], 0));
    tensors.insert(
        format!("{root}.experts.gate_up_proj"),
        numbers(&[2, 4, 4], 0),
    );
    for e in 0..2 {
        let name = format!("{root}.experts.{e}.down_proj.weight");
        tensors.insert(name, numbers(&[4, 2], 0));
    }
    let (_dir, file) = file(&tensors);
    let error = load_import(&import, &file, LoadOptions::default()).unwrap_err();
    let said = error.to_string();
    assert!(matches!(error, WeightsError::Ambiguous { .. }), "{said}");
    assert!(said.contains("has shape [2, 4, 4], which fits both as it is and transposed"));
}

/// A flat tensor may be split, but a reordered one is not what the recipe means.
#[test]
fn a_reshape_does_not_reorder() {
    let config = r#"{"model_type": "dbrx", "d_model": 4, "n_layers": 1, "ffn_config":
        {"ffn_hidden_size": 3, "moe_num_experts": 2, "moe_top_k": 1}}"#;
    let import = hf::import(config, 0).unwrap();
    let load = |w1: &[usize]| {
        let root = "transformer.blocks.0.ffn";
        let mut tensors = Tensors::new();
        tensors.insert(format!("{root}.router.layer.weight"), numbers(&[2, 4], 0));
        tensors.insert(format!("{root}.experts.mlp.w1"), numbers(w1, 0));
        for name in ["v1", "w2"] {
            tensors.insert(format!("{root}.experts.mlp.{name}"), numbers(&[6, 4], 0));
        }
        let (_dir, file) = file(&tensors);
        load_import(&import, &file, LoadOptions::default())
    };
    for shape in [&[6, 4][..], &[24], &[2, 3, 4], &[1, 6, 4]] {
        load(shape).unwrap_or_else(|error| panic!("{shape:?}: {error}"));
    }
    for shape in [&[4, 6][..], &[3, 8], &[2, 4, 3], &[3, 2, 4]] {
        let said = load(shape).unwrap_err().to_string();
        assert!(said.contains("expected [2, 3, 4], flat or not"), "{said}");
    }
}

#[test]
fn tensors_that_the_spec_has_no_use_for_are_refused() {
    let plain = spec("experts = { form = \"plain\" }");
    let cases = [
        (
            "experts.down.bias",
            "(`bias = true` under [experts] uses it)",
        ),
        ("router.bias", "(`bias = true` under [router] uses it)"),
        (
            "router.select_bias",
            "(`select_bias = true` under [router] uses it)",
        ),
        (
            "experts.gate.weight",
            "(`form = \"gated\"` under [experts] uses it)",
        ),
        (
            "shared.0.up.weight",
            "([[shared]] 0, counted from 0, uses it)",
        ),
        ("select_bias", "(did you mean `router.select_bias`?)"),
        (
            "experts.dwon.weight",
            "(did you mean `experts.down.weight`?)",
        ),
        ("expert.up.weight", "(did you mean `experts.up.weight`?)"),
        ("zigzag", ""),
    ];
    let mut all = canonical(&plain);
    // Optimizer state is not part of the layer.
    all.insert("optimizer.step".to_string(), numbers(&[1], 0));
    for (name, hint) in cases {
        let mut tensors = canonical(&plain);
        tensors.insert(name.to_string(), numbers(&[1], 0));
        all.insert(name.to_string(), numbers(&[1], 0));
        let (_dir, file) = file(&tensors);
        let error = load_canonical(&plain, &file, LoadOptions::default()).unwrap_err();
        let start = format!("has a tensor that the layer does not use, `{name}` {hint}");
        assert!(error.to_string().contains(start.trim_end()), "{error}");
        let options = LoadOptions {
            allow_extra: true,
            ..LoadOptions::default()
        };
        let loaded = load_canonical(&plain, &file, options).unwrap();
        assert_eq!(loaded, canonical(&plain));
    }
    let (_dir, file) = file(&all);
    let error = load_canonical(&plain, &file, LoadOptions::default()).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("9 tensors that the layer does not use"),
        "{error}"
    );
    assert!(error.to_string().contains("and 1 more"), "{error}");
}

#[test]
fn a_missing_tensor_names_the_misspelt_one() {
    let spec = spec("");
    let mut tensors = canonical(&spec);
    let down = tensors.remove("experts.down.weight").unwrap();
    tensors.insert("experts.dwon.weight".to_string(), down);
    let (_dir, file) = file(&tensors);
    let error = load_canonical(&spec, &file, LoadOptions::default()).unwrap_err();
    let said = error.to_string();
    assert!(
        said.ends_with(
            "no tensor for `experts.down.weight`; it has `experts.dwon.weight`: is that the one?"
        ),
        "{said}"
    );
}

/// In a whole model, only tensors of the layer's own block are checked.
#[test]
fn a_model_may_have_other_tensors_than_those_of_the_block() {
    let config = r#"{"model_type": "mixtral", "hidden_size": 4, "intermediate_size": 3,
        "num_local_experts": 2, "num_experts_per_tok": 1, "num_hidden_layers": 12}"#;
    let import = hf::import(config, 1).unwrap();
    let root = "model.layers.1.block_sparse_moe";
    let mut tensors = Tensors::new();
    tensors.insert(format!("{root}.gate.weight"), numbers(&[2, 4], 0));
    for e in 0..2 {
        for (leaf, shape) in [("w1", [3, 4]), ("w2", [4, 3]), ("w3", [3, 4])] {
            tensors.insert(
                format!("{root}.experts.{e}.{leaf}.weight"),
                numbers(&shape, 0),
            );
        }
    }
    for beside in [
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.10.block_sparse_moe.gate.e_score_correction_bias",
        "model.layers.1.block_sparse_moe.experts.0.w1.input_scale",
        "router.bias",
    ] {
        tensors.insert(beside.to_string(), numbers(&[2], 0));
    }
    let load = |tensors: &Tensors<'_>| {
        let (_dir, file) = file(tensors);
        load_import(&import, &file, LoadOptions::default()).map(drop)
    };
    load(&tensors).unwrap();
    for stray in ["gate.bias", "experts.1.w2.bias", "experts.2.w1.weight"] {
        let mut tensors = tensors.clone();
        tensors.insert(format!("{root}.{stray}"), numbers(&[2], 0));
        let error = load(&tensors).unwrap_err().to_string();
        assert!(
            error.contains(&format!("does not use, `{root}.{stray}`")),
            "{error}"
        );
    }
}

/// A layer is read if its own shards exist, whatever else the index names. A missing shard that is
/// needed is named.
#[test]
fn shards_of_other_layers_need_not_be_there() {
    let dir = tempfile::tempdir().unwrap();
    let config = r#"{"model_type": "mixtral", "hidden_size": 4, "intermediate_size": 3,
        "num_local_experts": 2, "num_experts_per_tok": 1, "num_hidden_layers": 3}"#;
    let mut tensors = Tensors::new();
    let mut index = Vec::new();
    for layer in 0..3 {
        let root = format!("model.layers.{layer}.block_sparse_moe");
        let mut own = Tensors::new();
        own.insert(format!("{root}.gate.weight"), numbers(&[2, 4], layer));
        for e in 0..2 {
            for (leaf, shape) in [("w1", [3, 4]), ("w2", [4, 3]), ("w3", [3, 4])] {
                own.insert(
                    format!("{root}.experts.{e}.{leaf}.weight"),
                    numbers(&shape, layer),
                );
            }
        }
        let shard = format!("model-{layer}.safetensors");
        index.extend(own.keys().map(|name| format!("\"{name}\": \"{shard}\"")));
        if layer == 1 {
            write_safetensors(dir.path().join(&shard), &own).unwrap();
            tensors = own;
        }
    }
    // Truncated, as by an unfinished copy.
    fs::write(dir.path().join("model-2.safetensors"), [1, 2, 3]).unwrap();
    let text = format!(
        "\u{feff}{{\"metadata\": NaN, \"weight_map\": {{{}}}}}",
        index.join(",")
    );
    fs::write(dir.path().join("model.safetensors.index.json"), text).unwrap();
    let file = Checkpoint::open(dir.path()).unwrap();
    let load = |layer| {
        load_import(
            &hf::import(config, layer).unwrap(),
            &file,
            LoadOptions::default(),
        )
    };
    let loaded = load(1).unwrap();
    assert_eq!(
        loaded["router.weight"],
        tensors["model.layers.1.block_sparse_moe.gate.weight"]
    );
    let gone = load(0).unwrap_err();
    assert!(matches!(gone, WeightsError::MissingShard { .. }), "{gone}");
    assert!(
        gone.to_string()
            .contains("model-0.safetensors, which is missing"),
        "{gone}"
    );
    assert!(
        load(2)
            .unwrap_err()
            .to_string()
            .contains("model-2.safetensors is damaged")
    );
    // The shard may arrive later.
    let name = "model.layers.0.block_sparse_moe.gate.weight";
    assert!(file.has(name) && file.tensor(name).is_none());
}

/// The largest and smallest magnitudes of each type, and their neighbours that round away.
#[test]
fn values_out_of_range_are_counted_and_refused() {
    let cases = [
        (
            DType::F16,
            [65504.0, 65519.9, 65520.0, 1e5],
            [6e-8, 2.9803e-8, 2.9802e-8, 1e-9],
        ),
        (
            DType::Bf16,
            [3.38e38, 3.3961e38, 3.3962e38, f32::MAX],
            [1e-40, 4.7e-41, 4.5e-41, 1e-45],
        ),
    ];
    for (dtype, large, small) in cases {
        let mut spec = spec("");
        spec.precision.weights = dtype;
        let mut tensors = canonical(&spec);
        let mut values = vec![1.0f32; 24];
        for (at, value) in large.into_iter().chain(small).enumerate() {
            values[at * 3] = if at % 2 == 0 { value } else { -value };
        }
        values[1] = f32::INFINITY;
        values[2] = f32::NAN;
        tensors.insert(
            "experts.up.weight".to_string(),
            Tensor::copied(&[2, 3, 4], &values),
        );
        let (_dir, file) = file(&tensors);
        let options = LoadOptions {
            narrow: true,
            ..LoadOptions::default()
        };
        let reader = LayerReader::canonical(&spec, &file, options).unwrap();
        for error in [
            reader.load().unwrap_err().to_string(),
            reader
                .rows("experts.up.weight", 0..1)
                .unwrap_err()
                .to_string(),
        ] {
            let said = format!("to {dtype} makes 2 of its finite values infinite and 2 of");
            assert!(error.contains(&said), "{error}");
        }
        let options = LoadOptions {
            allow_infinite: true,
            ..options
        };
        let reader = LayerReader::canonical(&spec, &file, options).unwrap();
        let loaded = reader.load().unwrap();
        reader.rows("experts.up.weight", 1..2).unwrap();
        let got = loaded["experts.up.weight"].to_f64();
        let infinite = got
            .iter()
            .zip(&values)
            .filter(|(g, v)| g.is_infinite() && v.is_finite());
        let zero = got
            .iter()
            .zip(&values)
            .filter(|(g, v)| **g == 0.0 && **v != 0.0);
        assert_eq!((infinite.count(), zero.count()), (2, 2), "{dtype}: {got:?}");
        let text: Vec<String> = reader.rounded().iter().map(|r| r.to_string()).collect();
        let said = format!(
            "experts.up.weight, rounded to {dtype}: 2 values became infinite, 2 values became zero"
        );
        assert_eq!(text, [said]);
    }
}
