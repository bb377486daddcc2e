//! Runs of quantizing that meet files of others, or sources that promise too much.

use super::quantize::{Form, Model, WIDE, contents, quiet};
use moesaic_kernel::DType;
use moesaic_spec::hf::{self, Scheme};
use moesaic_tensor::{Tensor, Tensors};
use moesaic_weights::{Checkpoint, QuantizeError, QuantizeTo, quantize, write_safetensors};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

fn q8_0() -> QuantizeTo {
    QuantizeTo::gguf("q8_0").unwrap()
}

/// Runs into `to`, which must be in the way and stay as it is.
fn is_in_the_way(model: &Model, to: &Path, file: &str) {
    let before = contents(to);
    let error = model.to(to, "int4").unwrap_err();
    match &error {
        QuantizeError::InTheWay { path } => assert_eq!(path, &to.join(file)),
        _ => panic!("{error}"),
    }
    assert!(contents(to) == before, "{file}");
}

/// Adds a tensor to the file of a model.
fn add(model: &Model, name: &str, tensor: Tensor<'static>) {
    let file = model.path().join("model.safetensors");
    let checkpoint = Checkpoint::open(&file).unwrap();
    let read = |name: &str| (name.to_string(), checkpoint.read(name).unwrap());
    let mut tensors: Tensors<'_> = checkpoint.names().map(read).collect();
    tensors.insert(name, tensor);
    write_safetensors(&file, &tensors).unwrap();
}

fn floats(dtype: DType, shape: &[usize]) -> Tensor<'static> {
    let values = vec![0.5; shape.iter().product()];
    Tensor::rounded(dtype, shape, &values).into_static()
}

/// Changes the configuration of a model.
fn configure(model: &Model, key: &str, value: Value) {
    let file = model.path().join("config.json");
    let mut config: Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
    config[key] = value;
    fs::write(file, format!("{config:#}")).unwrap();
}

/// A folder with anything in it is refused before it is touched; hidden files are let be.
#[test]
fn files_of_others_are_in_the_way() {
    let (model, out) = (Model::qwen3(), tempfile::tempdir().unwrap());
    fs::write(out.path().join(".gitignore"), "*.tmp").unwrap();
    fs::write(out.path().join("tokenizer.json"), "mine").unwrap();
    is_in_the_way(&model, out.path(), "tokenizer.json");
    fs::rename(
        out.path().join("tokenizer.json"),
        out.path().join("notes.txt"),
    )
    .unwrap();
    is_in_the_way(&model, out.path(), "notes.txt");
    fs::remove_file(out.path().join("notes.txt")).unwrap();
    model.to(out.path(), "int4").unwrap();
    assert!(out.path().join(".gitignore").exists());
}

/// A finished folder whose configuration or tokenizer was edited since is not written over.
#[test]
fn edits_of_an_output_stay() {
    let (model, out) = (Model::qwen3(), tempfile::tempdir().unwrap());
    model.to(out.path(), "int4").unwrap();
    for file in ["config.json", "tokenizer.json"] {
        let before = fs::read(out.path().join(file)).unwrap();
        fs::write(out.path().join(file), "{}\n").unwrap();
        is_in_the_way(&model, out.path(), file);
        fs::write(out.path().join(file), before).unwrap();
    }
    model.to(out.path(), "int4").unwrap();
}

/// Two models never end up in one folder, even if no file of one has the name of one of the other.
#[test]
fn another_model_is_in_the_way() {
    let shards = Model::new("qwen3_moe", Form::Apart, WIDE, 3);
    let (model, out) = (Model::qwen3(), tempfile::tempdir().unwrap());
    shards.to(out.path(), "int4").unwrap();
    is_in_the_way(&model, out.path(), "model-0.safetensors");
}

/// The process may end between the record and the name of the first file.
#[test]
fn a_record_without_its_file_is_no_obstacle() {
    let (model, out) = (Model::qwen3(), tempfile::tempdir().unwrap());
    let report = model.to(out.path(), "int4").unwrap();
    let all = contents(out.path());
    for gone in ["config.json", "tokenizer.json", "model.safetensors"] {
        fs::remove_file(out.path().join(gone)).unwrap();
    }
    fs::write(out.path().join(".moesaic-model.safetensors.tmp"), "half").unwrap();
    fs::write(out.path().join(".moesaic-quantize.lock"), "").unwrap();
    assert_eq!(model.to(out.path(), "int4").unwrap(), report);
    assert!(contents(out.path()) == all);
}

/// A GGUF file is replaced by the same command alone.
#[test]
fn a_gguf_file_of_others_is_in_the_way() {
    let (model, out) = (Model::qwen3(), tempfile::tempdir().unwrap());
    let file = out.path().join("a.gguf");
    fs::write(&file, "mine").unwrap();
    let error = quantize(model.path(), &file, q8_0(), &quiet).unwrap_err();
    assert!(matches!(error, QuantizeError::InTheWay { .. }), "{error}");
    assert_eq!(fs::read(&file).unwrap(), b"mine");
    fs::remove_file(&file).unwrap();
    quantize(model.path(), &file, q8_0(), &quiet).unwrap();
    let whole = fs::read(&file).unwrap();
    quantize(model.path(), &file, q8_0(), &quiet).unwrap();
    assert!(fs::read(&file).unwrap() == whole);
    let other = QuantizeTo::gguf("q4_0").unwrap();
    let error = quantize(model.path(), &file, other, &quiet).unwrap_err();
    assert!(matches!(error, QuantizeError::InTheWay { .. }), "{error}");
    assert!(fs::read(&file).unwrap() == whole);
    // A model of the same sizes makes the same header. It differs in one router, then in one expert.
    for (name, shape) in [
        ("model.layers.1.mlp.gate.weight", [4, 256]),
        ("model.layers.1.mlp.experts.3.up_proj.weight", [128, 256]),
    ] {
        let tuned = Model::qwen3();
        let held = Checkpoint::open(tuned.path()).unwrap();
        assert_eq!(held.tensor(name).unwrap().shape, shape);
        add(&tuned, name, floats(DType::Bf16, &shape));
        let error = quantize(tuned.path(), &file, q8_0(), &quiet).unwrap_err();
        assert!(matches!(error, QuantizeError::InTheWay { .. }), "{error}");
        assert!(fs::read(&file).unwrap() == whole);
        assert_eq!(fs::read_dir(out.path()).unwrap().count(), 1);
    }
}

/// The output has the templates in the folder that transformers reads, and no index of weights that
/// stayed behind.
#[test]
fn templates_are_copied_and_foreign_indices_are_not() {
    let (model, out) = (Model::qwen3(), tempfile::tempdir().unwrap());
    let templates = Path::new("additional_chat_templates");
    fs::create_dir(model.path().join(templates)).unwrap();
    let template = templates.join("tool_use.jinja");
    fs::write(model.path().join(&template), "{{ x }}").unwrap();
    fs::write(model.path().join("pytorch_model.bin"), "old").unwrap();
    let index = "pytorch_model.bin.index.json";
    fs::write(model.path().join(index), "{}").unwrap();
    for _ in 0..2 {
        model.to(out.path(), "fp8").unwrap();
        assert_eq!(fs::read(out.path().join(&template)).unwrap(), b"{{ x }}");
        assert!(!out.path().join(index).exists());
    }
}

/// Names of the output are unique, and what GGUF cannot hold is refused before anything is written.
#[test]
fn tensors_that_the_output_cannot_hold_are_refused() {
    let out = tempfile::tempdir().unwrap();
    let model = Model::qwen3();
    let name = "model.layers.0.mlp.experts.0.up_proj.weight_scale";
    add(&model, name, floats(DType::F32, &[3]));
    let error = model.to(&out.path().join("a"), "nvfp4").unwrap_err();
    let error = error.to_string();
    assert!(
        error.contains(name) && error.contains("another tensor of that name"),
        "{error}"
    );
    add(
        &model,
        "vision.patch.weight",
        floats(DType::F32, &[2, 3, 1, 2, 2]),
    );
    let file = out.path().join("a.gguf");
    let error = quantize(model.path(), &file, q8_0(), &quiet).unwrap_err();
    assert!(
        error.to_string().contains("5 dimensions are more than"),
        "{error}"
    );
    assert_eq!(fs::read_dir(out.path()).unwrap().count(), 0);
}

/// The list of modules that stay floats has a tied head, which is no tensor, and every spelling of
/// the shared experts: compressed-tensors would look for codes of a module that it leaves out.
#[test]
fn modules_without_codes_are_all_listed() {
    let model = Model::qwen3();
    let listed = |out: &Path, key: &str| {
        let text = fs::read_to_string(out.join("config.json")).unwrap();
        let config: Value = serde_json::from_str(&text).unwrap();
        let list = config["quantization_config"][key].as_array().unwrap();
        let names = list.iter().map(|name| name.as_str().unwrap().to_string());
        names.collect::<Vec<_>>()
    };
    for (scheme, key) in [("fp8", "modules_to_not_convert"), ("int4", "ignore")] {
        let out = tempfile::tempdir().unwrap();
        model.to(out.path(), scheme).unwrap();
        assert!(listed(out.path(), key).contains(&"lm_head".to_string()));
    }
    let name = "model.layers.9.mlp.shared_expert.up_proj.weight";
    add(&model, name, floats(DType::Bf16, &[128, 256]));
    let out = tempfile::tempdir().unwrap();
    model.to(out.path(), "int4").unwrap();
    let ignored = listed(out.path(), "ignore");
    assert_eq!(ignored.last().unwrap(), "re:.*[.]shared?_.*");
}

/// No reader has names for single experts of Granite, whose folder would be a model without experts.
#[test]
fn granite_has_no_names_for_single_experts() {
    let model = Model::new("granitemoe", Form::Fused, WIDE, 1);
    let file = model.path().join("model.safetensors");
    let checkpoint = Checkpoint::open(&file).unwrap();
    let rename = |name: &str| {
        name.replace("mlp.gate.", "block_sparse_moe.router.layer.")
            .replace(
                "mlp.experts.gate_up_proj",
                "block_sparse_moe.input_linear.weight",
            )
            .replace(
                "mlp.experts.down_proj",
                "block_sparse_moe.output_linear.weight",
            )
    };
    let read = |name: &str| (rename(name), checkpoint.read(name).unwrap());
    let tensors: Tensors<'_> = checkpoint.names().map(read).collect();
    write_safetensors(&file, &tensors).unwrap();
    let out = tempfile::tempdir().unwrap();
    let error = model
        .to(&out.path().join("a"), "fp8")
        .unwrap_err()
        .to_string();
    assert!(error.contains("no names for single experts"), "{error}");
    let gguf = out.path().join("a.gguf");
    quantize(model.path(), &gguf, q8_0(), &quiet).unwrap();
}

/// A configuration that says of itself that it is not quantized gets one `quantization_config`.
#[test]
fn a_quantization_config_of_null_is_replaced() {
    // First, last, in an inner object, and twice.
    for (before, after) in [
        ("\"quantization_config\" : null,", ""),
        ("", ",\n\"quantization_config\":null "),
        ("\"a\": {\"quantization_config\": null},", ""),
        (
            "\"a\": {\"quantization_config\": null, \"b\": 1},",
            ", \"quantization_config\": null",
        ),
    ] {
        let model = Model::qwen3();
        let file = model.path().join("config.json");
        let whole = fs::read_to_string(&file).unwrap();
        let inner = whole.trim().strip_prefix('{').unwrap();
        let inner = inner.strip_suffix('}').unwrap();
        fs::write(&file, format!("{{{before}{inner}{after}}}")).unwrap();
        let out = tempfile::tempdir().unwrap();
        model.to(out.path(), "fp8").unwrap();
        let config = fs::read_to_string(out.path().join("config.json")).unwrap();
        assert_eq!(config.matches("quantization_config").count(), 1, "{config}");
        assert!(hf::import(&config, 0).is_ok(), "{config}");
    }
}

/// Quantization is seen under the older name and inside of `text_config`, too.
#[test]
fn every_quantized_source_is_refused() {
    let method = json!({ "quant_method": "compressed-tensors" });
    for (key, value) in [
        ("compression_config", method.clone()),
        ("text_config", json!({ "quantization_config": method })),
    ] {
        let (model, out) = (Model::qwen3(), tempfile::tempdir().unwrap());
        configure(&model, key, value);
        let error = model.to(out.path(), "fp8").unwrap_err();
        assert!(
            matches!(error, QuantizeError::AlreadyQuantized { .. }),
            "{error}"
        );
    }
}

/// Any widths go into the formats without groups, and zeros into all of them.
#[test]
fn odd_widths_and_zeros() {
    let odd = Model::new("qwen3_moe", Form::Apart, [33, 7], 1);
    for name in ["fp8", "fp8-channel", "int8"] {
        let out = tempfile::tempdir().unwrap();
        let report = odd.to(out.path(), name).unwrap();
        assert!(report.worst().unwrap().relative_rms < 0.05, "{name}");
    }
    let model = Model::qwen3();
    let name = "model.layers.1.mlp.experts.2.up_proj.weight";
    let zeros = vec![0.0; 128 * 256];
    let zeros = Tensor::rounded(DType::Bf16, &[128, 256], &zeros);
    add(&model, name, zeros.into_static());
    for scheme in hf::SCHEMES {
        let out = tempfile::tempdir().unwrap();
        let report = model.to(out.path(), scheme.name).unwrap();
        let mut matrices = report.matrices.iter();
        let matrix = matrices.find(|matrix| matrix.name == name).unwrap();
        assert_eq!(matrix.relative_rms, 0.0, "{}", scheme.name);
    }
    assert!(Scheme::named("fp7").is_none());
}
