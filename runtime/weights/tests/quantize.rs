//! Models that are quantized, and read back as any published model is.

use moesaic_kernel::DType;
use moesaic_reference::{Input, Weights, forward};
use moesaic_spec::format::BLOCKS;
use moesaic_spec::hf::{self, SCHEMES, Scheme};
use moesaic_spec::{gguf, testing::SampleRng};
use moesaic_tensor::{Tensor, Tensors};
use moesaic_weights::{
    Checkpoint, LoadOptions, QuantizeError, QuantizeEvent, QuantizeReport, QuantizeTo, load_import,
    quantize, write_safetensors,
};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use tempfile::TempDir;

const LAYERS: usize = 2;
const EXPERTS: usize = 4;

/// Widths of tokens and experts, which every scheme takes.
pub const WIDE: [usize; 2] = [256, 128];

pub fn quiet(_: QuantizeEvent<'_>) {}

/// A full-precision model.
pub struct Model {
    dir: TempDir,
}

/// The form in which experts are stored.
#[derive(Clone, Copy, PartialEq)]
pub enum Form {
    /// A tensor per expert.
    Apart,
    /// Two tensors for all experts.
    Fused,
}

/// Returns a tensor whose rows and columns have sizes of their own, as bf16.
fn tensor(rng: &mut SampleRng, shape: &[usize]) -> Tensor<'static> {
    let columns = shape.last().copied().unwrap_or(1);
    let sizes: Vec<f64> = (0..columns).map(|_| rng.real(0.2, 1.0)).collect();
    let count: usize = shape.iter().product();
    let value = |at: usize, rng: &mut SampleRng| {
        // The sum of three is nearly normal, as weights are.
        let sum: f64 = (0..3).map(|_| rng.real(-0.1, 0.1)).sum();
        (sum * sizes[at % columns]) as f32
    };
    let values: Vec<f32> = (0..count).map(|at| value(at, rng)).collect();
    Tensor::rounded(DType::Bf16, shape, &values).into_static()
}

impl Model {
    /// Writes a model of one of two families, in `shards` files.
    pub fn new(family: &str, form: Form, [d, h]: [usize; 2], shards: usize) -> Model {
        let dir = tempfile::tempdir().unwrap();
        let config = json!({
            "model_type": family, "hidden_size": d, "moe_intermediate_size": h,
            "intermediate_size": h, "num_experts": EXPERTS, "num_local_experts": EXPERTS,
            "num_experts_per_tok": 2, "num_hidden_layers": LAYERS, "norm_topk_prob": true,
            "torch_dtype": "bfloat16", "rms_norm_eps": 1e-6,
        });
        fs::write(dir.path().join("config.json"), format!("{config:#}")).unwrap();
        fs::write(dir.path().join("tokenizer.json"), "{}").unwrap();
        let mut rng = SampleRng::new(1);
        let mut tensors = BTreeMap::new();
        let mut put = |name: String, shape: &[usize]| {
            tensors.insert(name, tensor(&mut rng, shape));
        };
        put("model.embed_tokens.weight".to_string(), &[10, d]);
        put("model.norm.weight".to_string(), &[d]);
        for layer in 0..LAYERS {
            let root = format!("model.layers.{layer}.mlp.");
            put(
                format!("model.layers.{layer}.self_attn.q_proj.weight"),
                &[d, d],
            );
            if family == "gpt_oss" {
                put(format!("{root}router.weight"), &[EXPERTS, d]);
                put(format!("{root}router.bias"), &[EXPERTS]);
                put(format!("{root}experts.gate_up_proj"), &[EXPERTS, d, 2 * h]);
                put(
                    format!("{root}experts.gate_up_proj_bias"),
                    &[EXPERTS, 2 * h],
                );
                put(format!("{root}experts.down_proj"), &[EXPERTS, h, d]);
                put(format!("{root}experts.down_proj_bias"), &[EXPERTS, d]);
                continue;
            }
            put(format!("{root}gate.weight"), &[EXPERTS, d]);
            if form == Form::Fused {
                put(format!("{root}experts.gate_up_proj"), &[EXPERTS, 2 * h, d]);
                put(format!("{root}experts.down_proj"), &[EXPERTS, d, h]);
                continue;
            }
            for expert in 0..EXPERTS {
                let expert = format!("{root}experts.{expert}.");
                put(format!("{expert}gate_proj.weight"), &[h, d]);
                put(format!("{expert}up_proj.weight"), &[h, d]);
                put(format!("{expert}down_proj.weight"), &[d, h]);
            }
        }
        write(dir.path(), tensors, shards);
        Model { dir }
    }

    pub fn qwen3() -> Model {
        Model::new("qwen3_moe", Form::Apart, WIDE, 1)
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    pub fn to(&self, folder: &Path, name: &str) -> Result<QuantizeReport, QuantizeError> {
        let scheme = Scheme::named(name).unwrap().with_group(None).unwrap();
        quantize(self.path(), folder, QuantizeTo::Folder(scheme), &quiet)
    }
}

/// Writes tensors in so many files, dealt in turn.
fn write(folder: &Path, tensors: BTreeMap<String, Tensor<'static>>, shards: usize) {
    if shards == 1 {
        let all: Tensors<'_> = tensors.into_iter().collect();
        write_safetensors(folder.join("model.safetensors"), &all).unwrap();
        return;
    }
    let mut files: Vec<Tensors<'_>> = (0..shards).map(|_| Tensors::new()).collect();
    let mut map = BTreeMap::new();
    for (at, (name, tensor)) in tensors.into_iter().enumerate() {
        let file = at % shards;
        map.insert(name.clone(), format!("model-{file}.safetensors"));
        files[file].insert(name, tensor);
    }
    for (at, tensors) in files.iter().enumerate() {
        write_safetensors(folder.join(format!("model-{at}.safetensors")), tensors).unwrap();
    }
    let index = json!({ "metadata": {}, "weight_map": map }).to_string();
    fs::write(folder.join("model.safetensors.index.json"), index).unwrap();
}

/// The weights of a layer as f32, and the layer's `y` for a few tokens.
fn layer(path: &Path, index: usize) -> (Tensors<'static>, Vec<f64>) {
    let checkpoint = Checkpoint::open(path).unwrap();
    let mut import = match checkpoint.gguf() {
        Some(metadata) => gguf::import(metadata, index).unwrap(),
        None => {
            let config = fs::read_to_string(path.join("config.json")).unwrap();
            hf::import(&config, index).unwrap()
        }
    };
    import.spec.precision.weights = DType::F32;
    let weights = load_import(&import, &checkpoint, LoadOptions::default()).unwrap();
    let (mut rng, tokens) = (SampleRng::new(5), 6);
    let count = tokens * import.spec.shape.model_dim;
    let input = Input {
        tokens,
        x: (0..count).map(|_| rng.real(-1.7, 1.7)).collect(),
        ..Input::default()
    };
    let output = forward(&import.spec, &Weights::from(&weights), &input);
    (weights, output.y)
}

fn relative_rms(found: &[f64], wanted: &[f64]) -> f64 {
    assert_eq!(found.len(), wanted.len());
    let off: f64 = found
        .iter()
        .zip(wanted)
        .map(|(a, b)| (a - b) * (a - b))
        .sum();
    (off / wanted.iter().map(|v| v * v).sum::<f64>()).sqrt()
}

/// Compares a quantized model with its source: other weights are the same, experts within `most`,
/// and by so much as was reported. Returns the error of `y`.
fn compare(source: &Path, quantized: &Path, report: &QuantizeReport, most: f64) -> f64 {
    let mut worst = 0f64;
    for index in 0..LAYERS {
        let ((wanted, y), (found, quantized_y)) = (layer(source, index), layer(quantized, index));
        assert_eq!(
            wanted.keys().collect::<Vec<_>>(),
            found.keys().collect::<Vec<_>>()
        );
        for (name, wanted) in &wanted {
            let error = relative_rms(&found[name].to_f64(), &wanted.to_f64());
            if name.starts_with("experts.") && name.ends_with(".weight") {
                assert!(error > 0.0 && error < most, "{name}: {error}");
                let reported = report.worst().unwrap().relative_rms;
                assert!(
                    error < reported * 1.01,
                    "{name}: {error}, {reported} at most"
                );
            } else {
                assert_eq!(error, 0.0, "{name}");
            }
        }
        worst = worst.max(relative_rms(&quantized_y, &y));
    }
    assert!(worst > 0.0 && worst < 4.0 * most, "y is off by {worst}");
    worst
}

/// The largest error of a weight that each format may make of weights that are nearly normal.
const MOST: [(&str, f64); 10] = [
    ("fp8", 0.03),
    ("fp8-channel", 0.03),
    ("mxfp8", 0.04),
    ("mxfp6", 0.04),
    ("mxfp4", 0.14),
    ("nvfp4", 0.11),
    ("int8", 0.012),
    ("int4", 0.15),
    ("gptq", 0.15),
    ("awq", 0.14),
];

#[test]
fn every_scheme_reads_back() {
    let model = Model::qwen3();
    for scheme in SCHEMES {
        let out = tempfile::tempdir().unwrap();
        let report = model.to(out.path(), scheme.name).unwrap();
        assert_eq!(
            report.matrices.len(),
            LAYERS * EXPERTS * 3,
            "{}",
            scheme.name
        );
        let (_, most) = MOST.iter().find(|(name, _)| *name == scheme.name).unwrap();
        let y = compare(model.path(), out.path(), &report, *most);
        println!("{}: weights {:.5}, y {y:.5}", scheme.name, report.mean());
        assert!(report.bytes_after < report.bytes_before);
        let config = fs::read_to_string(out.path().join("config.json")).unwrap();
        let config: Value = serde_json::from_str(&config).unwrap();
        assert_eq!(config["rms_norm_eps"], 1e-6);
        assert!(out.path().join("tokenizer.json").exists());
        let names: Vec<String> = fs::read_dir(out.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
            .collect();
        assert!(names.iter().all(|name| !name.starts_with('.')), "{names:?}");
    }
}

#[test]
fn every_group_reads_back() {
    let model = Model::qwen3();
    for name in ["int4", "gptq", "awq"] {
        let scheme = Scheme::named(name).unwrap();
        let mut errors = Vec::new();
        for size in scheme.groups {
            let out = tempfile::tempdir().unwrap();
            let target = QuantizeTo::Folder(scheme.with_group(Some(*size)).unwrap());
            let report = quantize(model.path(), out.path(), target, &quiet).unwrap();
            compare(model.path(), out.path(), &report, 0.15);
            errors.push(report.mean());
        }
        // Smaller groups are closer, and come later.
        assert!(errors.is_sorted_by(|a, b| a > b), "{name}: {errors:?}");
    }
}

/// Experts that a file holds in two tensors come apart under the family's names.
#[test]
fn fused_experts_come_apart() {
    let model = Model::new("qwen3_moe", Form::Fused, WIDE, 1);
    for (name, most) in [("nvfp4", 0.11), ("fp8", 0.03)] {
        let out = tempfile::tempdir().unwrap();
        let report = model.to(out.path(), name).unwrap();
        compare(model.path(), out.path(), &report, most);
        let file = Checkpoint::open(out.path()).unwrap();
        assert!(!file.has("model.layers.0.mlp.experts.gate_up_proj"));
        assert!(file.has("model.layers.0.mlp.embed") == file.has("nothing"));
    }
}

/// gpt-oss has a layout of its own, transposed and with gate and up in turn, and no other.
#[test]
fn gpt_oss_keeps_its_layout() {
    let model = Model::new("gpt_oss", Form::Fused, [64, 96], 1);
    let out = tempfile::tempdir().unwrap();
    let report = model.to(out.path(), "mxfp4").unwrap();
    compare(model.path(), out.path(), &report, 0.14);
    let file = Checkpoint::open(out.path()).unwrap();
    let blocks = file
        .find("model.layers.1.mlp.experts.gate_up_proj_blocks")
        .unwrap();
    assert_eq!(blocks.unwrap().shape, [EXPERTS, 192, 2, 16]);
    let other = tempfile::tempdir().unwrap();
    let error = model.to(other.path(), "fp8").unwrap_err();
    assert!(
        error.to_string().contains("no names for single experts"),
        "{error}"
    );
}

#[test]
fn every_block_type_reads_back() {
    let (model, odd) = (
        Model::new("qwen3_moe", Form::Apart, [256, 256], 1),
        Model::new("mixtral", Form::Fused, [256, 32], 1),
    );
    for blocks in BLOCKS.iter().filter(|blocks| blocks.can_encode()) {
        let target = QuantizeTo::gguf(&blocks.name.to_lowercase()).unwrap();
        let out = tempfile::tempdir().unwrap();
        for (model, name) in [(&model, "a.gguf"), (&odd, "b.gguf")] {
            let file = out.path().join(name);
            let report = quantize(model.path(), &file, target, &quiet).unwrap();
            assert_eq!(report.matrices.len(), LAYERS * 3);
            let most = match blocks.name {
                "Q8_0" => 0.01,
                "Q6_K" => 0.03,
                "Q5_0" | "Q5_1" | "Q5_K" => 0.06,
                "MXFP4" => 0.14,
                _ => 0.11,
            };
            let y = compare(model.path(), &file, &report, most);
            println!(
                "{} {name}: weights {:.5}, y {y:.5}",
                blocks.name,
                report.mean()
            );
            let held = |format: &str| {
                report
                    .matrices
                    .iter()
                    .filter(|m| m.format == format)
                    .count()
            };
            let whole = blocks.elements == 32 || name == "a.gguf";
            assert_eq!(
                held(blocks.name),
                if whole { 6 } else { 4 },
                "{}",
                blocks.name
            );
        }
    }
    assert_eq!(
        (QuantizeTo::gguf("q2_k"), QuantizeTo::gguf("q9")),
        (None, None)
    );
}

/// gpt-oss has biases and a fused tensor in which gate and up alternate, OLMoE neither.
#[test]
fn other_families_become_gguf() {
    for model in [
        Model::new("gpt_oss", Form::Fused, [64, 96], 2),
        Model::new("olmoe", Form::Apart, [64, 32], 1),
    ] {
        for (name, most) in [("q8_0", 0.01), ("mxfp4", 0.14)] {
            let out = tempfile::tempdir().unwrap();
            let file = out.path().join("a.gguf");
            let target = QuantizeTo::gguf(name).unwrap();
            let report = quantize(model.path(), &file, target, &quiet).unwrap();
            compare(model.path(), &file, &report, most);
        }
    }
}

#[test]
fn gguf_refuses_what_it_cannot_say() {
    let model = Model::new("flex_olmo", Form::Apart, WIDE, 1);
    let out = tempfile::tempdir().unwrap();
    let target = QuantizeTo::gguf("q8_0").unwrap();
    let error = quantize(model.path(), &out.path().join("a.gguf"), target, &quiet).unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("GGUF has no architecture for flex-olmo-layer0")
    );
    assert_eq!(fs::read_dir(out.path()).unwrap().count(), 0);
}

/// The bytes of every file below a folder.
pub fn contents(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    let file = |path: PathBuf| {
        let bytes = fs::read(&path).unwrap();
        (PathBuf::from(path.file_name().unwrap()), bytes)
    };
    paths.map(file).collect()
}

#[test]
fn shards_stay_shards_and_finished_ones_are_kept() {
    let model = Model::new("qwen3_moe", Form::Apart, WIDE, 3);
    let whole = tempfile::tempdir().unwrap();
    let report = model.to(whole.path(), "nvfp4").unwrap();
    compare(model.path(), whole.path(), &report, 0.11);
    let all = contents(whole.path());
    assert_eq!(
        all.keys()
            .filter(|path| path.extension().unwrap() == "safetensors")
            .count(),
        3
    );
    // As if the process had ended after the first file: the configuration is missing, and another
    // file has a temporary name.
    let out = tempfile::tempdir().unwrap();
    model.to(out.path(), "nvfp4").unwrap();
    for gone in ["model-1.safetensors", "model-2.safetensors", "config.json"] {
        fs::remove_file(out.path().join(gone)).unwrap();
    }
    fs::write(out.path().join(".moesaic-model-1.safetensors.tmp"), "half").unwrap();
    let (kept, written) = (Mutex::new(Vec::new()), Mutex::new(Vec::new()));
    let watch = |event: QuantizeEvent<'_>| match event {
        QuantizeEvent::Kept { file } => kept.lock().unwrap().push(file.to_string()),
        QuantizeEvent::Written { file, .. } => written.lock().unwrap().push(file.to_string()),
        _ => {}
    };
    let scheme = Scheme::named("nvfp4").unwrap();
    let again = quantize(model.path(), out.path(), QuantizeTo::Folder(scheme), &watch).unwrap();
    assert_eq!(*kept.lock().unwrap(), ["model-0.safetensors"]);
    assert_eq!(
        *written.lock().unwrap(),
        ["model-1.safetensors", "model-2.safetensors"]
    );
    assert_eq!(again, report);
    assert!(contents(out.path()) == all);
}

/// A file that was changed, or of another format, is never overwritten.
#[test]
fn other_files_are_in_the_way() {
    let model = Model::qwen3();
    let out = tempfile::tempdir().unwrap();
    model.to(out.path(), "int4").unwrap();
    let before = contents(out.path());
    let in_the_way = |error: QuantizeError| matches!(error, QuantizeError::InTheWay { .. });
    assert!(in_the_way(model.to(out.path(), "mxfp4").unwrap_err()));
    assert!(contents(out.path()) == before);
    assert!(in_the_way(model.to(model.path(), "mxfp4").unwrap_err()));
    let file = out.path().join("model.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&file, bytes).unwrap();
    assert!(in_the_way(model.to(out.path(), "int4").unwrap_err()));
}

#[test]
fn sources_that_cannot_be_quantized_are_refused() {
    let model = Model::qwen3();
    let out = tempfile::tempdir().unwrap();
    let quantized = out.path().join("a");
    model.to(&quantized, "fp8").unwrap();
    let scheme = QuantizeTo::Folder(Scheme::named("int8").unwrap());
    let refused = |from: &Path| {
        let to = out.path().join("b");
        let error = quantize(from, &to, scheme, &quiet).unwrap_err().to_string();
        let left = fs::read_dir(&to).map_or(0, |entries| entries.count());
        assert_eq!(left, 0, "{error}");
        error
    };
    assert!(refused(&quantized).contains("quantization_config of `fp8`"));
    assert!(refused(&out.path().join("nothing")).contains("does not exist"));
    let odd = Model::new("qwen3_moe", Form::Apart, [48, 40], 1);
    let to = out.path().join("c");
    let error = odd.to(&to, "mxfp4").unwrap_err().to_string();
    assert!(
        error.contains("needs a multiple of 32 columns, these are 48"),
        "{error}"
    );
    // A missing tensor, and one that is no number.
    let broken = Model::qwen3();
    let file = broken.path().join("model.safetensors");
    let checkpoint = Checkpoint::open(&file).unwrap();
    let read = |name: &str| {
        (
            name.to_string(),
            checkpoint.read(name).unwrap().into_static(),
        )
    };
    let mut tensors: Tensors<'_> = checkpoint.names().map(read).collect();
    let name = "model.layers.1.mlp.experts.2.up_proj.weight";
    let mut values = tensors[name].to_f32();
    values[300] = f32::NAN;
    tensors.insert(
        name,
        Tensor::rounded(DType::Bf16, &[128, 256], &values).into_static(),
    );
    write_safetensors(&file, &tensors).unwrap();
    let error = refused(broken.path());
    assert!(
        error.contains(name) && error.contains("row 1, column 44 is NaN"),
        "{error}"
    );
    tensors.remove(name);
    write_safetensors(&file, &tensors).unwrap();
    assert!(refused(broken.path()).contains("has no tensor for"));
}
