//! `moesaic run` against outside data and against the reference.

use crate::common::*;
use moesaic::weights::Checkpoint;
use moesaic::{DType, Tensor, Tensors};
use std::path::Path;

/// A case of tests/oracle/hf: y within 2e-5 of the largest element, and the
/// same experts. The oracle lists the experts of a token in ascending order.
fn oracle(case: &str, layer: &str) {
    let (dir, scratch) = (repository("tests/oracle/hf").join(case), scratch());
    let (expected, output) = (
        dir.join("block.safetensors"),
        scratch.path().join("y.safetensors"),
    );
    let mut call = command();
    call.args(["run", "--target", "cpu", "--layer", layer, "--hf"])
        .arg(&dir);
    finish(
        call.arg("--input")
            .arg(&expected)
            .arg("--output")
            .arg(&output),
    )
    .ok();
    let (dtype, shape, found) = load(&output, "y");
    let (_, expected_shape, wanted) = load(&expected, "y");
    assert_eq!((dtype, &shape), (DType::F32, &expected_shape));
    let scale = wanted.iter().fold(0f64, |most, v| most.max(v.abs()));
    let worst = found
        .iter()
        .zip(&wanted)
        .fold(0f64, |most, (f, w)| most.max((f - w).abs()));
    assert!(worst <= 2e-5 * scale, "{case}: {:.1e}", worst / scale);
    let (ids, wanted) = (load(&output, "topk_ids"), load(&expected, "topk_ids"));
    assert_eq!((ids.0, &ids.1), (wanted.0, &wanted.1), "{case}");
    assert_eq!(ascending(&ids), wanted.2, "{case}");
    let counts: f64 = load(&output, "counts").2.iter().sum();
    assert_eq!(counts as usize, load(&output, "topk_ids").2.len());
}

/// The ids of each token in ascending order.
fn ascending((_, shape, ids): &(DType, Vec<usize>, Vec<f64>)) -> Vec<f64> {
    let row = |row: &[f64]| {
        let mut row = row.to_vec();
        row.sort_by(f64::total_cmp);
        row
    };
    ids.chunks(shape[1]).flat_map(row).collect()
}

#[test]
fn mixtral() {
    oracle("mixtral", "1");
}

#[test]
fn qwen2_moe() {
    oracle("qwen2_moe", "0");
}

#[test]
fn qwen3_moe() {
    oracle("qwen3_moe", "1");
}

#[test]
fn olmoe() {
    oracle("olmoe", "0");
}

#[test]
fn gpt_oss() {
    oracle("gpt_oss", "0");
}

#[test]
fn deepseek_v3() {
    oracle("deepseek_v3", "1");
}

/// `moesaic run` on layer 1 of a model.
fn of_model(dir: &Path, input: &Path, output: &Path, more: &[&str]) -> Finished {
    let mut call = command();
    call.args(["run", "--target", "cpu", "--layer", "1", "--hf"])
        .arg(dir);
    call.arg("--input").arg(input).arg("--output").arg(output);
    finish(call.args(more))
}

/// Asserts that y of two files differs by less than a part of the largest element.
fn near(found: &Path, wanted: &Path, most: f64) {
    let (found, wanted) = (load(found, "y").2, load(wanted, "y").2);
    let scale = wanted.iter().fold(0f64, |most, v| most.max(v.abs()));
    let near = |(f, w): (&f64, &f64)| (f - w).abs() <= most * scale;
    assert!(found.iter().zip(&wanted).all(near));
}

/// A quantized model that is dequantized gives, to the byte, the output of the model which
/// transformers dequantized to bf16. Its codes give the same to the rounding of bf16, and in f32
/// what transformers' block gave.
#[test]
fn quantized_models() {
    for model in ["deepseek_v3", "gpt_oss", "qwen3_moe"] {
        let (quantized, scratch) = (repository("tests/oracle/quantized").join(model), scratch());
        let [input, weights, config] = [
            "block.safetensors",
            "dequantized.safetensors",
            "config.json",
        ]
        .map(|name| quantized.join(name));
        let plain = scratch.path().join("model");
        std::fs::create_dir(&plain).unwrap();
        std::fs::copy(weights, plain.join("model.safetensors")).unwrap();
        let text = std::fs::read_to_string(config).unwrap();
        let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
        config
            .as_object_mut()
            .unwrap()
            .remove("quantization_config");
        write(&plain, "config.json", &config.to_string());
        let run = |dir: &Path, name: &str, more: &[&str], note: &str| {
            let output = scratch.path().join(name);
            let finished = of_model(dir, &input, &output, more);
            assert!(finished.stderr.contains(note), "{}", finished.stderr);
            finished.ok();
            output
        };
        let quantized = &quantized;
        let dequantize = ["--dequantize", "bf16"];
        let ours = run(
            quantized,
            "ours",
            &dequantize,
            "the checkpoint's weights are quantized",
        );
        let theirs = run(&plain, "theirs", &[], "");
        let bytes = [&ours, &theirs].map(|path| std::fs::read(path).unwrap());
        assert!(bytes[0] == bytes[1], "{model}");
        let stored = "the experts are multiplied as they are stored";
        near(&run(quantized, "codes", &[], stored), &theirs, 0.02);
        if model == "gpt_oss" {
            let f32s = run(quantized, "f32", &["--precision", "f32"], stored);
            near(&f32s, &input, 2e-5);
        }
    }
}

/// What is not read is one line with the exit code of an input that is wrong.
#[test]
fn other_quantizations_are_refused() {
    let dir = scratch();
    let config = r#"{"model_type": "mixtral", "quantization_config": {"quant_method": "hqq"}}"#;
    write(dir.path(), "config.json", config);
    let [input, output] = ["x", "y"].map(|name| dir.path().join(name));
    let expected = "mixtral: the quantization is not supported (hqq); supported are fp8";
    of_model(dir.path(), &input, &output, &[]).fails(2, &[expected]);
}

#[test]
fn a_spec_and_a_weight_file_agree_with_the_reference() {
    let small = Small::new();
    let report = small.run(&["--reference", "--json"]).json();
    assert!(
        report["reference"]["y_error"].as_f64().unwrap() < 1e-5,
        "{report}"
    );
    assert_eq!(report["reference"]["tokens_with_other_experts"], 0);
    assert_eq!(report["tokens"], 7);
    let names = ["counts", "router.logits", "topk_ids", "topk_weights", "y"];
    let tensors = report["tensors"].as_array().unwrap();
    assert_eq!(
        tensors
            .iter()
            .map(|t| t["name"].as_str().unwrap())
            .collect::<Vec<_>>(),
        names
    );
    assert_eq!(load(&small.output, "router.logits").1, [7, 5]);
    assert_eq!(load(&small.output, "counts").0, DType::I64);
}

#[test]
fn y_comes_in_the_type_of_the_activations_and_weights_round_only_when_asked() {
    let small = Small::new();
    small.refuses(
        &["--precision", "bf16"],
        &[
            "is f32, the spec stores it as bf16",
            "hint: --narrow rounds the values",
        ],
    );
    let finished = small.run(&["--precision", "bf16", "--narrow", "--reference", "--json"]);
    assert!(
        finished
            .stderr
            .contains("x is f32 and is rounded to the layer's bf16")
    );
    let error = finished.json()["reference"]["y_error"].as_f64().unwrap();
    assert!(error > 1e-7 && error < 0.02, "{error}");
    assert_eq!(load(&small.output, "y").0, DType::Bf16);
}

/// What the weights hold beside, and beyond, what the layer can: said, and taken when asked.
#[test]
fn weights_without_a_use_or_out_of_range_are_refused() {
    let small = Small::new();
    let mut weights = small_weights();
    weights.insert("experts.down.bias".to_string(), tensor(&[5, 20], 6));
    let up = weights.get_mut("experts.up.weight").unwrap();
    let mut values: Vec<f32> = up.to_f64().iter().map(|v| *v as f32).collect();
    (values[0], values[1], values[2]) = (1e5, -1e5, 1e-9);
    *up = Tensor::copied(&[5, 12, 20], &values);
    save(small.weights.parent().unwrap(), "w.safetensors", &weights);
    small.refuses(
        &[],
        &[
            "`experts.down.bias` (`bias = true` under [experts] uses it)",
            "hint: --allow-extra ignores such tensors",
        ],
    );
    let f16 = ["--precision", "f16", "--narrow", "--allow-extra"];
    for part in [
        "to f16 makes 2 of its finite values infinite and 1 of its others zero",
        "hint: --allow-infinite lets them become infinite",
    ] {
        small.run(&f16).fails_after_warning(2, part);
    }
    let finished = small.run(&[&f16[..], &["--allow-infinite"]].concat());
    let note = "rounded to f16: 2 values became infinite, 1 value became zero";
    assert!(finished.stderr.contains(note), "{}", finished.stderr);
}

#[test]
fn a_capacity_adds_places() {
    let spec = format!("{SMALL}capacity = {{ mode = \"bounded\", factor = 0.5 }}\n");
    let small = Small::of(&spec);
    let report = small.run(&["--reference", "--json"]).json();
    assert!(
        report["reference"]["y_error"].as_f64().unwrap() < 1e-5,
        "{report}"
    );
    let places = load(&small.output, "locations").2;
    let dropped = places.iter().filter(|place| **place < 0.0).count();
    assert!(dropped > 0);
    assert_eq!(report["dropped"], dropped);
    assert_eq!(load(&small.output, "overflow").2, [dropped as f64]);
    assert_eq!(load(&small.output, "capacity").1, [1]);
}

#[test]
fn no_tokens_are_no_problem() {
    let mut small = Small::new();
    let empty = Tensor {
        dtype: DType::F32,
        shape: vec![0, 20],
        data: Vec::new().into(),
    };
    small.input = save(
        small.dir.path(),
        "none.safetensors",
        &[("x".to_string(), empty)].into(),
    );
    small.run(&[]).ok();
    assert_eq!(load(&small.output, "y").1, [0, 20]);
    assert_eq!(load(&small.output, "counts").2, [0.0; 5]);
}

#[test]
fn a_nan_stays_with_its_token() {
    let mut small = Small::new();
    let mut x = values(7 * 20, 5);
    x[3 * 20 + 4] = f32::NAN;
    let input = [("x".to_string(), Tensor::copied(&[7, 20], &x))].into();
    small.run(&[]).ok();
    let clean = load(&small.output, "y").2;
    small.input = save(small.dir.path(), "nan.safetensors", &input);
    small.run(&[]).ok();
    let y = load(&small.output, "y").2;
    for token in 0..7 {
        let row = token * 20..token * 20 + 20;
        match token {
            3 => assert!(y[row].iter().all(|v| v.is_nan())),
            _ => assert_eq!(y[row.clone()], clean[row]),
        }
    }
}

#[test]
fn routers_that_take_more_than_tokens() {
    let spec = format!("{SMALL}router = {{ kind = \"external\" }}\n");
    let mut small = Small::of(&spec);
    small.refuses(&[], &["has no tensor `topk_ids`; it has x"]);
    let mut input = small_input();
    let ids: Vec<i64> = (0..14).map(|i| i * 3 % 5).collect();
    input.insert("topk_ids".to_string(), Tensor::copied(&[7, 2], &ids));
    input.insert("topk_weights".to_string(), tensor(&[7, 2], 9));
    small.input = save(small.dir.path(), "routed.safetensors", &input);
    let report = small.run(&["--reference", "--json"]).json();
    assert!(
        report["reference"]["y_error"].as_f64().unwrap() < 1e-5,
        "{report}"
    );
    input.insert(
        "topk_ids".to_string(),
        Tensor::copied(&[7, 2], &[1i64 << 40; 14]),
    );
    small.input = save(small.dir.path(), "far.safetensors", &input);
    std::fs::remove_file(&small.output).unwrap();
    small.refuses(
        &[],
        &["far.safetensors has 1099511627776 at element 0, which no i32 can be"],
    );
}

#[test]
fn a_warm_cache_compiles_nothing_and_strict_needs_one() {
    let small = Small::new();
    let cold = scratch();
    let cache = cold.path().to_str().unwrap();
    small.run(&["--strict", "--cache", cache]).fails(
        1,
        &[
            "is not in the cache and compiling is off",
            "moesaic precompile --spec",
        ],
    );
    assert!(!small.output.exists());
    let first = small.run(&["--cache", cache, "--json"]).json();
    assert_eq!(first["kernels"]["from_cache"], 0);
    let second = small.run(&["--cache", cache, "--strict", "--json"]).json();
    assert_eq!(second["kernels"]["compiled"], 0);
    assert_eq!(
        second["kernels"]["from_cache"],
        first["kernels"]["compiled"]
    );
}

/// A small layer whose router decides by more than its logits.
const CHOOSING: &str = "shape = { model_dim = 20, hidden_dim = 12, experts = 5, top_k = 2 }\n\
                        router = { score = \"sigmoid\", renormalize = \"sum\", scale = 2.5 }\n";

/// A run has one router: it does not give all tokens to it in silence.
#[test]
fn routers_of_tokens_are_refused() {
    let small = Small::new();
    let mut input = small_input();
    input.insert("router_ids".to_string(), Tensor::owned(&[7], vec![0i32; 7]));
    save(small.dir.path(), "x.safetensors", &input);
    small.refuses(&[], &["`router_ids`", "forward_by_token"]);
}

/// vLLM's array of one layer gives the same bytes, in one process and over ranks.
#[test]
fn an_array_of_expert_ids_replays() {
    let small = Small::of(CHOOSING);
    let record = small.dir.path().join("routed_experts.npy");
    let path = record.to_str().unwrap();
    small.run(&["--record", path]).ok();
    let header = std::fs::read(&record).unwrap();
    assert!(header.starts_with(b"\x93NUMPY") && header.len() == 128 + 7 * 2);
    let once = ["y", "topk_ids", "topk_weights"].map(|name| load(&small.output, name));
    for more in [&[][..], &["--ranks", "2"], &["--reference"]] {
        std::fs::remove_file(&small.output).unwrap();
        small.run(&[&["--replay", path], more].concat()).ok();
        let again = ["y", "topk_ids", "topk_weights"].map(|name| load(&small.output, name));
        assert_eq!(again, once, "{more:?}");
    }
}

/// A record replays on another instruction set and another mesh: the same experts, and what follows
/// from them as near as sums of another order are; to the bit where the instruction set is one.
#[test]
fn an_array_replays_on_other_targets_and_meshes() {
    let small = Small::of(CHOOSING);
    let record = small.dir.path().join("routed_experts.npy");
    let path = record.to_str().unwrap();
    small.run(&["--record", path]).ok();
    let of = |name| load(&small.output, name).2;
    let (ids, once) = (of("topk_ids"), ["y", "topk_weights"].map(of));
    // Other weights of the router choose others, so the ids below are the record's.
    let mut weights = small_weights();
    let gate = &weights["router.weight"];
    let turned: Vec<f32> = gate.to_f32().iter().rev().copied().collect();
    let turned = Tensor::owned(&gate.shape.clone(), turned);
    for other in [false, true] {
        if other {
            weights.insert("router.weight".to_string(), turned.clone());
            save(small.dir.path(), "w.safetensors", &weights);
        }
        let mut portable = None;
        for mesh in [
            &[][..],
            &["--ranks", "2"],
            &["--ranks", "2", "--mesh", "expert_tp=2"],
        ] {
            std::fs::remove_file(&small.output).unwrap();
            let mut portable_run = small.command_on("cpu:portable");
            finish(portable_run.args(["--replay", path]).args(mesh)).ok();
            assert_eq!(of("topk_ids"), ids, "{mesh:?}");
            let found = ["y", "topk_weights"].map(of);
            let first = portable.get_or_insert_with(|| found.clone());
            // Ranks that own whole experts add up as one process does; shards add up in parts.
            if !mesh.contains(&"--mesh") {
                assert_eq!(found, *first, "{mesh:?}");
            }
            let near = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-4 * (1.0 + b.abs());
            let same = found.iter().flatten().zip(once.iter().flatten()).all(near);
            assert_eq!(same, !other, "{mesh:?}");
        }
    }
}

/// Kernels for a record's table are compiled ahead, by the options that a strict run names.
#[test]
fn a_strict_replay_of_an_array_names_what_precompile_needs() {
    let small = Small::of(CHOOSING);
    let record = small.dir.path().join("routed_experts.npy");
    let (path, cache) = (record.to_str().unwrap(), small.dir.path().join("ahead"));
    small.run(&["--record", path]).ok();
    std::fs::remove_file(&small.output).unwrap();
    let strict = [
        "--replay",
        path,
        "--strict",
        "--cache",
        cache.to_str().unwrap(),
    ];
    let option = format!("--replay={path}");
    small.run(&strict).fails(1, &[&option]);
    let precompile = |options: &[&str]| {
        let all = [
            &["precompile", "--target", "cpu", "--cache", strict[4]],
            options,
        ]
        .concat();
        with_spec(&all, &small.spec).ok()
    };
    precompile(&["--replay"]);
    small.run(&strict).fails(1, &[&option]);
    precompile(&[&option]);
    small.run(&strict).ok();
}

/// A run takes one layer of a record, and with `token_ids` some of its tokens.
#[test]
fn a_run_takes_a_layer_and_tokens_of_an_array() {
    let small = Small::of(CHOOSING);
    let record = small.dir.path().join("routed_experts.npy");
    // Layer 1 of 9 tokens: experts t mod 5 and the next.
    let id = |place: usize| (place / 4 + place % 2 + (place / 2 + 1) % 2) % 5;
    let ids: Vec<u8> = (0..9 * 2 * 2).map(|place| id(place) as u8).collect();
    let head = "{'descr': '|u1', 'fortran_order': False, 'shape': (9, 2, 2), }";
    let mut bytes = b"\x93NUMPY\x01\x00\x76\x00".to_vec();
    bytes.extend(format!("{head:<117}\n").bytes().chain(ids));
    std::fs::write(&record, bytes).unwrap();
    let path = record.to_str().unwrap();
    small.refuses(&["--replay", path], &["has 2 layers", "--replay-layer"]);
    let of_layer = ["--replay", path, "--replay-layer", "1"];
    small.refuses(
        &of_layer,
        &["the record has 9 tokens, and the input 7", "token_ids"],
    );
    let none = ["--replay", path, "--replay-layer", "2"];
    small.refuses(&none, &["the record has layers 0 to 1 and not 2"]);
    let mut input = small_input();
    let places = vec![8i32, 0, 3, 1, 1, 7, 2];
    input.insert("token_ids".to_string(), Tensor::owned(&[7], places.clone()));
    save(small.dir.path(), "x.safetensors", &input);
    small.run(&of_layer).ok();
    let chosen = load(&small.output, "topk_ids").2;
    let want = places.iter().flat_map(|place| [place % 5, (place + 1) % 5]);
    assert_eq!(chosen, want.map(f64::from).collect::<Vec<_>>());
    let safetensors = small.dir.path().join("record").display().to_string();
    let wrong = ["--replay", &safetensors, "--replay-layer", "1"];
    std::fs::remove_file(&small.output).unwrap();
    small.refuses(&wrong, &["names a layer of an .npy record"]);
}

/// A record of a run, replayed, gives the same output without a router.
#[test]
fn a_record_replays() {
    let small = Small::of(
        "shape = { model_dim = 20, hidden_dim = 12, experts = 5, top_k = 2 }\n\
         router = { score = \"sigmoid\", renormalize = \"sum\", scale = 2.5 }\n\
         capacity = { mode = \"fixed\", rows = 2, order = \"batch-prioritized\", \
         renormalize_after_drop = true }\n",
    );
    let record = small.dir.path().join("record.safetensors");
    let path = record.to_str().unwrap();
    let said = small.run(&["--stats", "--record", path]).ok();
    assert!(said.contains("by slot") && said.contains("#####"), "{said}");
    let drops = load(&record, "drops").2;
    assert!(drops.iter().sum::<f64>() >= 4.0, "{drops:?}");
    let once = load(&small.output, "y");
    let said = small.run(&["--json", "--replay", path]).json();
    assert_eq!(
        said["routing"]["masked_slots"],
        drops.iter().sum::<f64>() as u64
    );
    assert_eq!(load(&small.output, "y"), once);
    std::fs::remove_file(&small.output).unwrap();
    // Ids are whole numbers, and counts those of the layer's experts.
    let held = Checkpoint::open(&record).unwrap();
    for (name, tensor, part) in [
        (
            "topk_ids",
            tensor(&held.read("topk_ids").unwrap().shape, 3),
            "is f32, expected i32",
        ),
        (
            "locations",
            tensor(&held.read("locations").unwrap().shape, 3),
            "is f32, expected i32",
        ),
        (
            "counts",
            Tensor::owned(&[6], vec![0i64; 6]),
            "has shape [6], expected [5]",
        ),
    ] {
        let names = held.names().map(str::to_string);
        let read = names.map(|name| (name.clone(), held.read(&name).unwrap().into_static()));
        let mut wrong: Tensors<'_> = read.collect();
        wrong.insert(name, tensor);
        let other = save(small.dir.path(), "other.safetensors", &wrong);
        small.refuses(&["--replay", other.to_str().unwrap()], &[name, part]);
    }
    // A record of other tokens is refused.
    let other = tensor(&[3, 20], 5);
    save(
        small.dir.path(),
        "x.safetensors",
        &[("x".to_string(), other)].into(),
    );
    small.refuses(&["--replay", path], &["`topk_ids`", "[3, 2]"]);
}

/// `moesaic run --random` on the CPU with a spec alone, into a file of the directory.
fn random(small: &Small, output: &str, more: &[&str]) -> Finished {
    let mut call = command();
    call.current_dir(small.dir.path())
        .args(["run", "--target", "cpu", "--output", output, "--spec"]);
    finish(call.arg(&small.spec).args(more))
}

/// A spec alone runs: its weights are those that the library draws from the seed.
#[test]
fn random_weights_need_no_file() {
    let small = Small::new();
    let spec = std::fs::read_to_string(&small.spec).expect("the spec");
    let spec = moesaic::LayerSpec::from_toml(&spec).expect("a valid spec");
    let drawn = moesaic::Init::Linear.weights(&spec, 7);
    let path = save(small.dir.path(), "drawn.safetensors", &drawn);
    let y = |output: &str| load(&small.dir.path().join(output), "y");
    let input = small.input.to_string_lossy().into_owned();
    let weights = path.to_string_lossy().into_owned();
    random(&small, "a", &["--random", "7", "--input", &input]).ok();
    random(&small, "b", &["--weights", &weights, "--input", &input]).ok();
    random(&small, "c", &["--random", "--input", &input]).ok();
    assert_eq!(y("a"), y("b"), "the library's weights");
    assert_ne!(y("a"), y("c"), "another seed");
}

/// Without an input tokens are drawn, too, and what a call needs beside them; alike for ranks.
#[test]
fn random_tokens_need_no_file() {
    let small = Small::new();
    let found = |output: &str, name: &str| load(&small.dir.path().join(output), name);
    let text = random(&small, "a", &["--random", "--reference"]).ok();
    assert!(text.contains("reference"), "{text}");
    assert_eq!(found("a", "y").1[0], 16);
    random(&small, "b", &["--random=3", "--tokens=5", "--grad"]).ok();
    assert_eq!(found("b", "dx").1[0], 5);
    random(&small, "c", &["--random=3", "--tokens=5", "--ranks=2"]).ok();
    random(&small, "d", &["--random=3", "--tokens=5"]).ok();
    assert_eq!(found("c", "y"), found("d", "y"), "on two ranks");
    random(&small, "e", &["--random", "--tokens=0"]).ok();
    assert_eq!(found("e", "y").1[0], 0);
}

/// Routers of every kind, codes and losses have what they need.
#[test]
fn random_runs_take_every_kind_of_input() {
    let small = Small::new();
    let shape = "shape = { model_dim = 32, hidden_dim = 32, experts = 4, top_k = 2 }\n";
    for rest in [
        "router = { kind = 'table', table_rows = 9 }",
        "router = { kind = 'external' }",
        "router = { token_mask = true }",
        "precision = { experts = 'int8' }",
        "[[losses]]\nkind = 'sequence'\ncoefficient = 0.1",
        "[[losses]]\nkind = 'global'\ncoefficient = 0.1",
    ] {
        std::fs::write(&small.spec, format!("{shape}{rest}\n")).expect("a temporary file");
        random(&small, "y", &["--random", "--training"]).ok();
        random(&small, "y", &["--random", "--training", "--ranks=2"]).ok();
    }
}
