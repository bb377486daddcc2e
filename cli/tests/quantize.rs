//! `moesaic quantize`, and `moesaic run` on what it wrote.

use crate::common::*;
use moesaic::{DType, Tensor, Tensors};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

const WIDTH: usize = 128;
const HIDDEN: usize = 64;
const EXPERTS: usize = 4;

/// A full-precision model of one layer, and an input for it.
struct Model {
    dir: tempfile::TempDir,
    input: PathBuf,
}

impl Model {
    fn new() -> Model {
        let dir = scratch();
        let config = json!({
            "model_type": "qwen3_moe", "hidden_size": WIDTH, "moe_intermediate_size": HIDDEN,
            "num_experts": EXPERTS, "num_experts_per_tok": 2, "num_hidden_layers": 1,
            "norm_topk_prob": true,
        });
        let model = dir.path().join("model");
        std::fs::create_dir(&model).expect("a folder");
        write(&model, "config.json", &config.to_string());
        let mut tensors = Tensors::new();
        let mut put = |name: String, shape: &[usize]| {
            let seed = tensors.len() as u32;
            let values: Vec<f32> = tensor(shape, seed)
                .to_f32()
                .iter()
                .map(|v| v / 9.0)
                .collect();
            let tensor = Tensor::rounded(DType::Bf16, shape, &values).into_static();
            tensors.insert(name, tensor);
        };
        put(
            "model.layers.0.mlp.gate.weight".to_string(),
            &[EXPERTS, WIDTH],
        );
        for expert in 0..EXPERTS {
            let root = format!("model.layers.0.mlp.experts.{expert}.");
            put(format!("{root}gate_proj.weight"), &[HIDDEN, WIDTH]);
            put(format!("{root}up_proj.weight"), &[HIDDEN, WIDTH]);
            put(format!("{root}down_proj.weight"), &[WIDTH, HIDDEN]);
        }
        save(&model, "model.safetensors", &tensors);
        let x = Tensors::from([("x".to_string(), tensor(&[64, WIDTH], 99))]);
        let input = save(dir.path(), "x.safetensors", &x);
        Model { dir, input }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("model")
    }

    fn quantize(&self, output: &Path, args: &[&str]) -> Finished {
        let mut call = command();
        call.args(["quantize", "--hf"]).arg(self.path());
        finish(call.arg("--output").arg(output).args(args))
    }

    /// y of a model in f32, and what the command said.
    fn run(&self, model: &Path, args: &[&str]) -> (Vec<f64>, String) {
        let output = self.dir.path().join("y.safetensors");
        let gguf = model.extension().is_some_and(|end| end == "gguf");
        let mut call = command();
        call.args([
            "run",
            "--target",
            "cpu",
            "--layer",
            "0",
            "--precision",
            "f32",
        ]);
        call.arg(if gguf { "--gguf" } else { "--hf" }).arg(model);
        call.arg("--input").arg(&self.input);
        let finished = finish(call.arg("--output").arg(&output).args(args));
        let said = finished.stderr.clone();
        finished.ok();
        (load(&output, "y").2, said)
    }
}

fn relative_rms(found: &[f64], wanted: &[f64]) -> f64 {
    let squares = found.iter().zip(wanted).map(|(f, w)| (f - w) * (f - w));
    (squares.sum::<f64>() / wanted.iter().map(|w| w * w).sum::<f64>()).sqrt()
}

/// Quantizes, runs the codes, and compares with what the command printed of y.
fn check(model: &Model, wanted: &[f64], output: &str, args: &[&str]) {
    let output = model.dir.path().join(output);
    let said = model
        .quantize(&output, &[args, &["--json"]].concat())
        .json();
    assert_eq!(said["y"]["tokens"], 16);
    let printed = said["y"]["relative_rms"].as_f64().expect("a number");
    let (found, notes) = model.run(&output, &[]);
    assert!(
        notes.contains("the experts are multiplied as they are stored ("),
        "{args:?}: {notes}"
    );
    // Other tokens have nearly the same error.
    let off = relative_rms(&found, wanted);
    assert!(
        (0.7..1.4).contains(&(off / printed)),
        "{args:?}: y is off by {off}, {printed} was printed"
    );
    let (numbers, _) = model.run(&output, &["--dequantize", "f32"]);
    let off = relative_rms(&found, &numbers);
    assert!(off < 2e-6, "{args:?}: codes and numbers differ by {off}");
}

#[test]
fn what_was_quantized_runs_as_codes() {
    let model = Model::new();
    let (wanted, _) = model.run(&model.path(), &[]);
    for (output, args) in [
        ("fp8", &["--format", "fp8"][..]),
        ("mxfp4", &["--format", "MXFP4"]),
        ("nvfp4", &["--format", "nvfp4"]),
        ("int4", &["--format", "int4", "--group", "32"]),
        ("awq", &["--format", "awq", "--group", "64"]),
        ("gptq", &["--format", "gptq", "--group", "64"]),
        ("q8_0.gguf", &["--format", "q8_0"]),
        ("q4_k.gguf", &["--format", "q4_k"]),
        ("mxfp4.gguf", &["--format", "mxfp4"]),
    ] {
        check(&model, &wanted, output, args);
    }
}

/// The text has the error of the worst matrix and of y; a second call keeps what the first one made.
#[test]
fn the_second_call_keeps_the_first_ones_files() {
    let model = Model::new();
    let output = model.dir.path().join("int8");
    let text = model.quantize(&output, &["--format", "int8", "-v"]).ok();
    for part in [
        "MATRIX",
        "model.layers.0.mlp.experts.3.down_proj.weight",
        "12 matrices to int8: relative RMS error 0.00",
        "y of layer 0 for 16 random tokens: relative RMS error 0.0",
    ] {
        assert!(text.contains(part), "{part:?} is not in:\n{text}");
    }
    let before = std::fs::read(output.join("model.safetensors")).expect("it is there");
    let again = model.quantize(&output, &["--format", "int8", "--tokens", "0", "--json"]);
    assert!(
        again
            .stderr
            .contains("model.safetensors is finished and stays"),
        "{}",
        again.stderr
    );
    let again: Value = again.json();
    assert_eq!(again["y"], Value::Null);
    assert_eq!(again["matrices"].as_array().map(Vec::len), Some(12));
    let after = std::fs::read(output.join("model.safetensors")).expect("it is there");
    assert!(before == after);
}

/// Weights that overflow give no error of y, and a note says so: an error of NaN would be no number.
#[test]
fn a_y_that_overflows_is_not_compared() {
    let model = Model::new();
    let mut tensors = Tensors::new();
    for expert in 0..EXPERTS {
        for (name, shape) in [
            ("gate", [HIDDEN, WIDTH]),
            ("up", [HIDDEN, WIDTH]),
            ("down", [WIDTH, HIDDEN]),
        ] {
            let values = vec![1e30; HIDDEN * WIDTH];
            let huge = Tensor::rounded(DType::Bf16, &shape, &values).into_static();
            let name = format!("model.layers.0.mlp.experts.{expert}.{name}_proj.weight");
            tensors.insert(name, huge);
        }
    }
    let router = vec![0.5; EXPERTS * WIDTH];
    let router = Tensor::rounded(DType::Bf16, &[EXPERTS, WIDTH], &router).into_static();
    tensors.insert("model.layers.0.mlp.gate.weight", router);
    save(&model.path(), "model.safetensors", &tensors);
    let args = ["--format", "fp8", "--json"];
    let made = model.quantize(&model.dir.path().join("huge"), &args);
    assert!(
        made.stderr
            .contains("layer 0 of the model gives NaN or infinity")
    );
    let said: Value = made.json();
    assert_eq!(said["y"], Value::Null);
}

/// Each mistake is one error with what to do, before anything is written.
#[test]
fn mistakes_cost_nothing() {
    let model = Model::new();
    let output = model.dir.path().join("out");
    let gguf = model.dir.path().join("out.gguf");
    let nowhere = model.dir.path().join("none/out.gguf");
    let mine = write(model.dir.path(), "mine.gguf", "mine");
    for (to, args, parts) in [
        (
            &output,
            &["--format", "q8_0"][..],
            &["no format of a Hugging Face folder", "fp8, "][..],
        ),
        (
            &gguf,
            &["--format", "int8"],
            &["no format of a GGUF file", "q8_0, "],
        ),
        (
            &output,
            &["--format", "fp8", "--group", "64"],
            &["--group 64 does nothing"],
        ),
        (
            &output,
            &["--format", "int4", "--group", "48"],
            &["groups of 128, 64, 32"],
        ),
        (
            &output,
            &["--format", "int4"],
            &["128 columns, these are 64", "hint: fp8, "],
        ),
        (
            &output,
            &["--format", "fp8", "--layer", "7"],
            &["--layer 7 has no experts"],
        ),
        (
            &output,
            &["--format", "fp8", "--layer", "0", "--tokens", "0"],
            &["--layer 0 does nothing with --tokens 0"],
        ),
        (&nowhere, &["--format", "q8_0"], &["there is no directory"]),
        (
            &model.path(),
            &["--format", "fp8"],
            &["is the model that --hf reads"],
        ),
        (
            &model.input,
            &["--format", "fp8"],
            &["is a file, not a directory"],
        ),
        (
            &mine,
            &["--format", "q8_0"],
            &["is not of this model in this format"],
        ),
    ] {
        model.quantize(to, args).fails(2, parts);
    }
    assert!(!output.exists() && !gguf.exists());
    assert_eq!(std::fs::read(mine).expect("it is there"), b"mine");
}
