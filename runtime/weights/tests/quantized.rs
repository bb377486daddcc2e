//! Layers of quantized checkpoints equal their bf16 twins, byte for byte.

use crate::quantizer::{By, Fp8, In, Tensors, e2m1, e4m3, fp4, random};
use crate::support::relative_error;
use moesaic_kernel::DType;
use moesaic_reference::{Input, Weights, forward};
use moesaic_spec::hf::{self, Import};
use moesaic_spec::testing::SampleRng;
use moesaic_tensor::WeightSource;
use moesaic_weights::{Checkpoint, LayerReader, LoadOptions, load_import};
use safetensors::tensor::Dtype;
use serde_json::{Value, json};
use std::fs;

/// Imports a configuration with and without its `quantization_config`.
fn imports(config: &Value, quantized: &Value) -> [Import; 2] {
    let mut with = config.clone();
    with["quantization_config"] = quantized.clone();
    [&with, config].map(|config| {
        let import = hf::import(&config.to_string(), 0);
        import.unwrap_or_else(|e| panic!("{config}: {e}"))
    })
}

/// Checks that both files give the same layer, whole and by rows of experts, in bf16 without
/// options. In f32, each value is its code's number, which bf16 rounds.
fn same(what: &str, config: &Value, quantized: &Value, codes: &Tensors, twin: &Tensors) {
    let dir = tempfile::tempdir().unwrap();
    let codes = codes.write(&dir.path().join("codes.safetensors"));
    let twin = twin.write(&dir.path().join("twin.safetensors"));
    let [ours, theirs] = imports(config, quantized);
    assert_eq!(ours.spec, theirs.spec, "{what}");
    let options = LoadOptions::default();
    let reader = LayerReader::of_import(&ours, &codes, options);
    let reader = reader.unwrap_or_else(|e| panic!("{what}: {e}"));
    let wanted = load_import(&theirs, &twin, options).unwrap();
    assert_eq!(reader.load().unwrap(), wanted, "{what}");
    for (name, tensor) in &wanted {
        let rows = tensor.shape[0];
        for range in [
            0..1,
            rows - 1..rows,
            rows / 2..rows,
            1.min(rows)..rows.min(3),
        ] {
            let part = reader.rows(name, range.clone()).unwrap();
            assert_eq!(part, tensor.rows(range).unwrap(), "{what}: {name}");
        }
    }
    crate::stored::check(what, &ours, &codes, 0);
    let mut wide = ours;
    wide.spec.precision.weights = DType::F32;
    let wide = LayerReader::of_import(&wide, &codes, options)
        .unwrap()
        .load()
        .unwrap();
    for (name, tensor) in &wanted {
        let rounded = wide[name].to_f64().into_iter();
        let rounded = rounded.map(|v| moesaic_tensor::round_float(tensor.dtype, v));
        assert!(rounded.eq(tensor.to_f64()), "{what}: {name}");
    }
}

/// Returns a small DeepSeek-V3's configuration.
fn deepseek(model: usize, hidden: usize, experts: usize) -> Value {
    json!({
        "model_type": "deepseek_v3", "torch_dtype": "bfloat16", "hidden_size": model,
        "moe_intermediate_size": hidden, "n_routed_experts": experts, "num_experts_per_tok": 2,
        "n_group": 1, "topk_group": 1, "num_hidden_layers": 1, "first_k_dense_replace": 0,
    })
}

const BLOCK: &str = "model.layers.0.mlp.";

/// Returns DeepSeek's block: experts and shared experts in FP8, the router in bf16.
fn fp8_block(model: usize, hidden: usize, experts: usize, how: Fp8) -> [Tensors; 2] {
    let [mut codes, mut twin] = [Tensors::default(), Tensors::default()];
    let rng = &mut SampleRng::new(how.seed);
    codes.kept(
        &mut twin,
        &format!("{BLOCK}gate.weight"),
        &[experts, model],
        rng,
    );
    let bias = format!("{BLOCK}gate.e_score_correction_bias");
    let values = random(rng, &[experts]);
    codes.f32(&bias, &[experts], &values);
    twin.f32(&bias, &[experts], &values);
    let all = (0..experts).map(|e| format!("experts.{e}"));
    for (at, under) in all.chain(["shared_experts".to_string()]).enumerate() {
        for (part, size) in [
            ("gate", [hidden, model]),
            ("up", [hidden, model]),
            ("down", [model, hidden]),
        ] {
            let seed = how.seed + 7 * at as u64;
            let name = format!("{BLOCK}{under}.{part}_proj.weight");
            codes.fp8(&mut twin, &name, size, &Fp8 { seed, ..how });
        }
    }
    [codes, twin]
}

fn fine_grained(block: Value) -> Value {
    json!({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
           "weight_block_size": block})
}

fn compressed(strategy: &str, block: Value) -> Value {
    let weights = json!({"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": true,
                         "block_structure": block});
    json!({"quant_method": "compressed-tensors", "format": "float-quantized",
           "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
           "ignore": ["lm_head", "re:.*gate$"]})
}

fn inverse(name: &str) -> String {
    format!("{name}_scale_inv")
}

fn plain(name: &str) -> String {
    format!("{name}_scale")
}

fn apart(name: &str) -> String {
    name.replace(".weight", ".scale")
}

/// The published block size on matrices that are no multiple of it, and random block sizes.
#[test]
fn blocks_of_fp8_are_their_numbers() {
    let mut rng = SampleRng::new(11);
    for case in 0..12 {
        let (block, model, hidden) = match case {
            0 => ([128, 128], 136, 130),
            1 => ([128, 128], 128, 256),
            2 => ([128, 128], 40, 24),
            // Wider than one decoding run.
            3 => ([2, 300], 610, 5),
            _ => {
                let block = [rng.between(1, 20), rng.between(1, 40)];
                (block, rng.between(1, 70), rng.between(1, 50))
            }
        };
        let how = Fp8 {
            by: By::Block(block),
            scales: rng.pick(&[In::F32, In::Bf16, In::E8m0, In::Bytes]),
            bare: false,
            called: rng.pick(&[inverse as fn(&str) -> String, plain, apart]),
            seed: case,
        };
        let experts = rng.between(2, 4);
        let [codes, twin] = fp8_block(model, hidden, experts, how);
        let what = format!(
            "{case}: {model} x {hidden} by {block:?} in {:?}",
            how.scales
        );
        let config = deepseek(model, hidden, experts);
        let quantized = if case % 2 == 0 {
            fine_grained(json!(block))
        } else {
            compressed("block", json!(block))
        };
        same(&what, &config, &quantized, &codes, &twin);
    }
}

/// One scale per tensor or per row, with and without ones in its shape.
#[test]
fn rows_and_tensors_of_fp8_are_their_numbers() {
    for (seed, (by, quantized)) in [
        (By::Row, compressed("channel", Value::Null)),
        (By::Matrix, compressed("tensor", Value::Null)),
        (By::Row, fine_grained(Value::Null)),
        (By::Matrix, fine_grained(Value::Null)),
        // An old checkpoint, whose configuration does not mention blocks.
        (
            By::Matrix,
            json!({"quant_method": "fp8", "activation_scheme": "static"}),
        ),
    ]
    .into_iter()
    .enumerate()
    {
        for bare in [false, true] {
            let how = Fp8 {
                by,
                scales: if bare { In::F32 } else { In::Bf16 },
                bare,
                called: plain,
                seed: seed as u64,
            };
            let [codes, twin] = fp8_block(30, 22, 3, how);
            let what = format!("{by:?}, {quantized}");
            same(&what, &deepseek(30, 22, 3), &quantized, &codes, &twin);
        }
    }
}

/// Fused, transposed experts keep scales for the blocks of their own layout.
#[test]
fn fused_experts_of_fp8_are_turned_with_their_scales() {
    let (model, hidden, experts, block) = (21, 10, 3, [8, 6]);
    let config = json!({
        "model_type": "llama4_text", "torch_dtype": "bfloat16", "hidden_size": model,
        "intermediate_size": hidden, "num_local_experts": experts, "num_experts_per_tok": 1,
        "num_hidden_layers": 1,
    });
    let [mut codes, mut twin] = [Tensors::default(), Tensors::default()];
    let under = "model.layers.0.feed_forward.";
    let mut rng = SampleRng::new(5);
    codes.kept(
        &mut twin,
        &format!("{under}router.weight"),
        &[experts, model],
        &mut rng,
    );
    for (part, size) in [
        ("gate", [hidden, model]),
        ("up", [hidden, model]),
        ("down", [model, hidden]),
    ] {
        let name = format!("{under}shared_expert.{part}_proj.weight");
        codes.kept(&mut twin, &name, &size, &mut rng);
    }
    for (name, size) in [
        ("gate_up_proj", [model, 2 * hidden]),
        ("down_proj", [hidden, model]),
    ] {
        let name = format!("{under}experts.{name}");
        let (mut all, mut scales, mut values) = (vec![], vec![], vec![]);
        let mut grid = [0, 0];
        for _ in 0..experts {
            let numbers = random(&mut rng, &size);
            let made = crate::quantizer::fp8(&numbers, size, By::Block(block), In::F32);
            all.extend(made.codes);
            scales.extend(made.scales);
            values.extend(made.values);
            grid = made.grid;
        }
        codes.put(&name, Dtype::F8_E4M3, &[experts, size[0], size[1]], all);
        codes.put(
            &inverse(&name),
            Dtype::F32,
            &[experts, grid[0], grid[1]],
            scales,
        );
        twin.bf16(&name, &[experts, size[0], size[1]], &values);
    }
    same(
        "llama4",
        &config,
        &fine_grained(json!(block)),
        &codes,
        &twin,
    );
}

/// Adds a tensor as MXFP4 `[experts, rows, columns]` and as bf16 `[experts, columns, rows]`.
fn mxfp4(files: [&mut Tensors; 2], name: &str, shape: [usize; 3], rng: &mut SampleRng) {
    let [experts, rows, columns] = shape;
    let (mut bytes, mut scales, mut turned) = (vec![], vec![], vec![]);
    for _ in 0..experts {
        let values = random(rng, &[rows, columns]);
        let made = fp4(&values, [rows, columns], In::E8m0);
        bytes.extend(made.codes);
        scales.extend(made.scales);
        for column in 0..columns {
            turned.extend((0..rows).map(|row| made.values[row * columns + column]));
        }
    }
    let [codes, twin] = files;
    let groups = columns / 32;
    codes.put(
        &format!("{name}_blocks"),
        Dtype::U8,
        &[experts, rows, groups, 16],
        bytes,
    );
    codes.put(
        &format!("{name}_scales"),
        Dtype::U8,
        &[experts, rows, groups],
        scales,
    );
    twin.bf16(name, &[experts, columns, rows], &turned);
}

fn gpt_oss(model: usize, hidden: usize, experts: usize) -> (Value, [Tensors; 2]) {
    let [mut codes, mut twin] = [Tensors::default(), Tensors::default()];
    let mut rng = SampleRng::new((model + hidden + experts) as u64);
    for (name, shape) in [
        ("router.weight", &[experts, model][..]),
        ("router.bias", &[experts]),
        ("experts.gate_up_proj_bias", &[experts, 2 * hidden]),
        ("experts.down_proj_bias", &[experts, model]),
    ] {
        codes.kept(&mut twin, &format!("{BLOCK}{name}"), shape, &mut rng);
    }
    for (name, shape) in [
        ("gate_up_proj", [experts, 2 * hidden, model]),
        ("down_proj", [experts, model, hidden]),
    ] {
        let name = format!("{BLOCK}experts.{name}");
        mxfp4([&mut codes, &mut twin], &name, shape, &mut rng);
    }
    let config = json!({
        "model_type": "gpt_oss", "torch_dtype": "bfloat16", "hidden_size": model,
        "intermediate_size": hidden, "num_local_experts": experts, "num_experts_per_tok": 2,
        "num_hidden_layers": 1,
    });
    (config, [codes, twin])
}

#[test]
fn mxfp4_is_its_numbers() {
    for (model, hidden, experts) in [(64, 32, 4), (32, 96, 3), (96, 64, 2)] {
        let (config, [codes, twin]) = gpt_oss(model, hidden, experts);
        let what = format!("{model} x {hidden}");
        let quantized = json!({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]});
        same(&what, &config, &quantized, &codes, &twin);
        let [ours, plain] = imports(&config, &quantized);
        assert_eq!(ours.notes.len(), plain.notes.len() + 1);
        // Without a named type, as in gpt-oss' config.
        let mut bare = config.clone();
        bare.as_object_mut().unwrap().remove("torch_dtype");
        let [ours, plain] = imports(&bare, &quantized).map(|import| import.spec.precision.weights);
        assert_eq!([ours, plain], [DType::Bf16, DType::F32]);
    }
}

/// DeepSeek-V4: experts in FP4 with a scale per 32 columns, shared experts in FP8.
#[test]
fn fp4_in_rows_is_its_numbers() {
    let (model, hidden, experts) = (64, 32, 3);
    let config = json!({
        "model_type": "deepseek_v4", "torch_dtype": "bfloat16", "hidden_size": model,
        "moe_intermediate_size": hidden, "n_routed_experts": experts, "num_experts_per_tok": 2,
        "num_hidden_layers": 1, "num_hash_layers": 0,
    });
    let [mut codes, mut twin] = [Tensors::default(), Tensors::default()];
    let mut rng = SampleRng::new(9);
    let under = "layers.0.ffn.";
    codes.kept(
        &mut twin,
        &format!("{under}gate.weight"),
        &[experts, model],
        &mut rng,
    );
    codes.kept(
        &mut twin,
        &format!("{under}gate.bias"),
        &[experts],
        &mut rng,
    );
    for (part, size) in [
        ("w1", [hidden, model]),
        ("w3", [hidden, model]),
        ("w2", [model, hidden]),
    ] {
        for e in 0..experts {
            let name = format!("{under}experts.{e}.{part}.weight");
            let made = fp4(&random(&mut rng, &size), size, In::E8m0);
            codes.put(&name, Dtype::I8, &[size[0], size[1] / 2], made.codes);
            codes.put(&apart(&name), Dtype::F8_E8M0, &made.grid, made.scales);
            twin.bf16(&name, &size, &made.values);
        }
        let how = Fp8 {
            by: By::Block([128, 128]),
            scales: In::E8m0,
            bare: false,
            called: apart,
            seed: 3,
        };
        codes.fp8(
            &mut twin,
            &format!("{under}shared_experts.{part}.weight"),
            size,
            &how,
        );
    }
    let mut quantized = fine_grained(json!([128, 128]));
    quantized["scale_fmt"] = json!("ue8m0");
    same("deepseek_v4", &config, &quantized, &codes, &twin);
}

/// Every code, with a scale that causes no rounding.
#[test]
fn every_code_is_its_number() {
    let (model, hidden) = (256, 1);
    let bytes: Vec<u8> = (0..=255).collect();
    let one = 1f32.to_le_bytes().to_vec();
    let [mut codes, _] = fp8_block(
        model,
        hidden,
        2,
        Fp8 {
            by: By::Matrix,
            scales: In::F32,
            bare: true,
            called: inverse,
            seed: 0,
        },
    );
    let name = format!("{BLOCK}experts.0.gate_proj.weight");
    codes.put(&name, Dtype::F8_E4M3, &[hidden, model], bytes);
    codes.put(&inverse(&name), Dtype::F32, &[1, 1], one);
    let dir = tempfile::tempdir().unwrap();
    let file = codes.write(&dir.path().join("codes.safetensors"));
    let [import, _] = imports(
        &deepseek(model, hidden, 2),
        &fine_grained(json!([128, 256])),
    );
    let loaded = load_import(&import, &file, LoadOptions::default()).unwrap();
    let gate = loaded["experts.gate.weight"].to_f64();
    for (code, found) in (0..=255u8).zip(&gate) {
        match code & 0x7f {
            0x7f => assert!(found.is_nan(), "{code:#x}"),
            _ => assert_eq!(
                found.to_bits(),
                f64::from(e4m3(code)).to_bits(),
                "{code:#x}"
            ),
        }
    }
    let values: Vec<f32> = (0..16).map(e2m1).collect();
    assert_eq!(values[..8], [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]);
}

/// Each checkpoint of `tests/oracle/quantized` decodes to transformers' values, to the bit, and the
/// layer computes its block's results.
#[test]
fn transformers_dequantizes_so() {
    let root = crate::archive::folder("quantized");
    for name in ["deepseek_v3", "gpt_oss", "qwen3_moe"] {
        let dir = root.join(name);
        let text = fs::read_to_string(dir.join("config.json")).unwrap();
        let mut config: Value = serde_json::from_str(&text).unwrap();
        let ours = hf::import(&text, 1).unwrap();
        config
            .as_object_mut()
            .unwrap()
            .remove("quantization_config");
        let theirs = hf::import(&config.to_string(), 1).unwrap();
        let options = LoadOptions::default();
        let found = load_import(&ours, &Checkpoint::open(&dir).unwrap(), options).unwrap();
        let file = Checkpoint::open(dir.join("dequantized.safetensors")).unwrap();
        assert_eq!(
            found,
            load_import(&theirs, &file, options).unwrap(),
            "{name}"
        );
        let block = Checkpoint::open(dir.join("block.safetensors")).unwrap();
        let x = block.read("x").unwrap();
        let input = Input {
            tokens: x.shape[0],
            x: x.to_f64(),
            ..Input::default()
        };
        let mut spec = ours.spec;
        (spec.precision.weights, spec.precision.activations) = (DType::F32, DType::F32);
        let y = forward(&spec, &Weights::from(&found), &input).y;
        let error = relative_error(&y, &block.read("y").unwrap().to_f64());
        assert!(error < 2e-6, "{name}: {error:e}");
    }
}

/// Returns the error for a file.
fn refusal(import: &Import, codes: &Tensors) -> String {
    let dir = tempfile::tempdir().unwrap();
    let file = codes.write(&dir.path().join("w"));
    let refused = LayerReader::of_import(import, &file, LoadOptions::default());
    let said = refused.expect_err("it does not fit").to_string();
    said.replace(&dir.path().join("w").display().to_string(), "FILE")
}

#[test]
fn broken_fp8_is_refused_with_one_reason() {
    let how = Fp8 {
        by: By::Block([8, 16]),
        scales: In::F32,
        bare: false,
        called: inverse,
        seed: 1,
    };
    let [whole, _] = fp8_block(40, 20, 2, how);
    let [import, plain] = imports(&deepseek(40, 20, 2), &fine_grained(json!([8, 16])));
    let up = format!("{BLOCK}experts.1.up_proj.weight");
    let refused = |change: &dyn Fn(&mut Tensors)| {
        let mut broken = whole.clone();
        change(&mut broken);
        refusal(&import, &broken)
    };
    let of_scales = |shape: &'static [usize], dtype: Dtype| {
        let bytes = vec![0; shape.iter().product::<usize>() * dtype.bitsize() / 8];
        refused(&|file| file.put(&inverse(&up), dtype, shape, bytes.clone()))
    };
    assert_eq!(
        refused(&|file| drop(file.0.remove(&inverse(&up)))),
        format!(
            "FILE has no tensor for `experts.up.weight`; `{up}` is there, its scales are not: \
             looked for `{up}_scale_inv`, `{up}_scale`, `{0}.scale`, `{0}.qscale_weight`, \
             `{up}_weight_scale`",
            up.strip_suffix(".weight").unwrap()
        )
    );
    let none = refused(&|file| file.0.retain(|name, _| !name.ends_with("_scale_inv")));
    assert_eq!(none.lines().count(), 1, "{none}");
    for shape in [&[3, 2][..], &[3, 4], &[3, 3, 1], &[9], &[0, 3]] {
        assert_eq!(
            of_scales(shape, Dtype::F32),
            format!("`{up}_scale_inv` in FILE has shape {shape:?}, expected [3, 3], being scales")
        );
    }
    let expected = "expected f32, f16, bf16 or f8_e8m0, being scales";
    for (dtype, said) in [(Dtype::I64, "i64"), (Dtype::F8_E4M3, "f8_e4m3")] {
        let found = format!("`{up}_scale_inv` in FILE has elements of type {said}, {expected}");
        assert_eq!(of_scales(&[3, 3], dtype), found);
    }
    assert_eq!(
        refused(&|file| file.put(&up, Dtype::F8_E5M2, &[20, 40], vec![0; 800])),
        format!("`{up}` in FILE has elements of type f8_e5m2, expected f8_e4m3, f32, f16 or bf16")
    );
    assert_eq!(
        refused(&|file| file.put(&up, Dtype::F8_E4M3, &[24, 40], vec![0; 960])),
        format!("`{up}` in FILE has shape [24, 40], expected numbers of shape [20, 40]")
    );
    assert_eq!(
        refused(&|file| file.put(&up, Dtype::F8_E4M3, &[800], vec![0; 800])),
        format!(
            "`{up}` in FILE has shape [800], expected at least two dimensions: only matrices are \
             quantized"
        )
    );
    let unsaid = refusal(&plain, &whole);
    let first = "experts.0.gate_proj.weight` in FILE has elements of type f8_e4m3, expected f32, \
                 f16 or bf16, or a quantization_config in config.json, which says how numbers of \
                 8 bits were made";
    assert!(unsaid.contains(first), "{unsaid}");
}

#[test]
fn broken_mxfp4_is_refused_with_one_reason() {
    let (config, [whole, _]) = gpt_oss(64, 32, 2);
    let [import, _] = imports(&config, &json!({"quant_method": "mxfp4"}));
    let down = format!("{BLOCK}experts.down_proj");
    let refused = |change: &dyn Fn(&mut Tensors)| {
        let mut broken = whole.clone();
        change(&mut broken);
        refusal(&import, &broken)
    };
    let put = |end: &str, dtype: Dtype, shape: &'static [usize]| {
        let bytes = vec![0; shape.iter().product::<usize>() * dtype.bitsize() / 8];
        refused(&|file| file.put(&format!("{down}{end}"), dtype, shape, bytes.clone()))
    };
    assert_eq!(
        refused(&|file| drop(file.0.remove(&format!("{down}_scales")))),
        format!(
            "FILE has no tensor for `experts.down.weight`; `{down}_blocks` is there, its scales \
             are not: looked for `{down}_scales`"
        )
    );
    assert_eq!(
        put("_scales", Dtype::U8, &[2, 64, 2]),
        format!("`{down}_scales` in FILE has shape [2, 64, 2], expected [2, 64, 1], being scales")
    );
    assert_eq!(
        put("_blocks", Dtype::U8, &[2, 64, 16]),
        format!("`{down}_scales` in FILE has shape [2, 64, 1], expected [2, 64], being scales")
    );
    assert_eq!(
        put("_blocks", Dtype::U8, &[2, 64, 1, 8]),
        format!(
            "`{down}_blocks` in FILE has shape [2, 64, 1, 8], expected […, groups, 16], being \
             codes of 4 bits in groups of 32"
        )
    );
    assert_eq!(
        put("_blocks", Dtype::I8, &[2, 64, 1, 16]),
        format!(
            "`{down}_blocks` in FILE has elements of type i8, expected u8, being codes of 4 bits"
        )
    );
    let without = refused(&|file| file.0.retain(|name, _| !name.contains("_proj_blocks")));
    assert!(without.contains("experts.gate_up_proj_blocks"), "{without}");
}
