//! Layers of quantized checkpoints, run as they were read: by one process and by ranks that read
//! their own experts, to the bit what transformers' dequantized weights give.

use super::{engine, entries};
use crate::conformance::mesh::on_ranks;
use moesaic::mesh::SharedExperts;
use moesaic::spec::gguf;
use moesaic::spec::hf::{self, Import};
use moesaic::tensor::SourceError;
use moesaic::weights::{Checkpoint, LayerReader, LoadOptions};
use moesaic::{DType, Input, Parallel, Tensor, WeightSource};
use serde_json::Value;
use std::fs;
use std::ops::Range;
use std::path::Path;
use std::sync::Mutex;

/// A layer's two checkpoints and how each is read.
struct Case {
    name: String,
    quantized: (Import, Checkpoint),
    plain: (Import, Checkpoint),
    x: Tensor<'static>,
}

impl Case {
    fn open(dir: &Path) -> Case {
        let text = fs::read_to_string(dir.join("config.json")).unwrap();
        let mut config: Value = serde_json::from_str(&text).unwrap();
        config
            .as_object_mut()
            .unwrap()
            .remove("quantization_config");
        let import = |text: &str| hf::import(text, 1).unwrap();
        let dequantized = Checkpoint::open(dir.join("dequantized.safetensors")).unwrap();
        let block = Checkpoint::open(dir.join("block.safetensors")).unwrap();
        let x = block.read("x").unwrap();
        Case {
            name: dir.display().to_string(),
            quantized: (import(&text), Checkpoint::open(dir).unwrap()),
            plain: (import(&config.to_string()), dequantized),
            x: Tensor::rounded(DType::Bf16, &x.shape, &x.to_f32()).into_static(),
        }
    }

    fn input(&self, tokens: Range<usize>) -> Input<'_> {
        let mut input = Input {
            tokens: tokens.len(),
            ..Input::default()
        };
        input.insert("x", self.x.rows(tokens).unwrap());
        input
    }
}

fn reader<'a>((import, file): &'a (Import, Checkpoint)) -> LayerReader<'a> {
    LayerReader::of_import(import, file, LoadOptions::default()).unwrap()
}

/// A source that notes which experts are read.
struct Noted<'a> {
    source: LayerReader<'a>,
    experts: Mutex<Vec<Range<usize>>>,
}

impl WeightSource for Noted<'_> {
    fn describe(&self, name: &str) -> Option<(DType, Vec<usize>)> {
        self.source.describe(name)
    }

    fn rows(&self, name: &str, rows: Range<usize>) -> Result<Tensor<'_>, SourceError> {
        if name.starts_with("experts.") {
            self.experts.lock().unwrap().push(rows.clone());
        }
        self.source.rows(name, rows)
    }
}

const fn mesh(ep: usize, shards: usize) -> Parallel {
    Parallel {
        ep,
        expert_tp: shards,
        dp: 1,
        shared: SharedExperts::Whole,
    }
}

#[test]
fn quantized_layers_run_as_their_dequantized_weights() {
    let engine = engine();
    let cases = entries("quantized");
    assert_eq!(cases.len(), 3);
    for case in cases.iter().map(|dir| Case::open(dir)) {
        let tokens = case.x.shape[0];
        let one = |from: &(Import, Checkpoint)| {
            let layer = engine.layer(&from.0.spec, &reader(from)).unwrap();
            layer
                .forward(&case.input(0..tokens))
                .unwrap()
                .y()
                .clone()
                .into_static()
        };
        let y = one(&case.quantized);
        assert!(y.to_f64().iter().any(|v| *v != 0.0), "{}", case.name);
        assert!(y == one(&case.plain), "{}", case.name);
        for parallel in [mesh(2, 1), mesh(4, 1), mesh(2, 2)] {
            check_ranks(&case, &engine, parallel, &y);
        }
    }
}

/// Each rank of a mesh gives its tokens' rows of `y`, and reads no other rank's experts.
fn check_ranks(case: &Case, engine: &moesaic::Engine, parallel: Parallel, y: &Tensor<'_>) {
    let share = case.x.shape[0] / parallel.ranks();
    let spec = &case.quantized.0.spec;
    on_ranks(engine, parallel, |mesh| {
        let what = format!("{} on {parallel:?}", case.name);
        let tokens = mesh.rank() * share..(mesh.rank() + 1) * share;
        let run = |source: &dyn WeightSource| {
            let layer = engine.mesh_layer(mesh, spec, source, None).unwrap();
            layer
                .forward(&case.input(tokens.clone()))
                .unwrap()
                .y()
                .clone()
                .into_static()
        };
        let noted = Noted {
            source: reader(&case.quantized),
            experts: Mutex::default(),
        };
        let found = run(&noted);
        assert!(found == run(&reader(&case.plain)), "{what}");
        if parallel.expert_tp == 1 {
            assert!(found == y.rows(tokens.clone()).unwrap(), "{what}");
        }
        let read = noted.experts.into_inner().unwrap();
        let (first, last) = (
            read.iter().map(|rows| rows.start).min().expect("experts"),
            read.iter().map(|rows| rows.end).max().expect("experts"),
        );
        let own = spec.shape.experts / parallel.ep;
        assert!(first % own == 0 && last == first + own, "{what}: {read:?}");
    });
}

/// A layer of `tests/oracle/formats`, with f32 weights and activations.
fn imported(dir: &Path, case: &Value) -> (Import, Checkpoint) {
    let layer = case["layer"].as_u64().unwrap() as usize;
    let (mut import, checkpoint) = match case["file"].as_str() {
        Some(file) => {
            let checkpoint = Checkpoint::open(dir.join(file)).unwrap();
            let import = gguf::import(checkpoint.gguf().unwrap(), layer);
            (import.unwrap(), checkpoint)
        }
        None => {
            let mut config = fs::read_to_string(dir.join("config.json")).unwrap();
            if let Ok(beside) = fs::read_to_string(dir.join("hf_quant_config.json")) {
                config = hf::with_quant_config(&config, &beside).unwrap();
            }
            let import = hf::import(&config, layer).unwrap();
            (import, Checkpoint::open(dir).unwrap())
        }
    };
    import.spec.precision.weights = DType::F32;
    import.spec.precision.activations = DType::F32;
    (import, checkpoint)
}

/// Checkpoints that other libraries packed, run on the CPU: what their weights give, unpacked
/// by those libraries. `runtime/weights/tests/oracle.rs` holds the f64 reference to the same.
#[test]
fn published_formats_run() {
    let engine = engine();
    let cases = entries("formats");
    assert_eq!(cases.len(), 24);
    for dir in cases {
        let what = dir.display().to_string();
        let case = fs::read_to_string(dir.join("case.json")).unwrap();
        let case: Value = serde_json::from_str(&case).unwrap();
        let from = imported(&dir, &case);
        let block = Checkpoint::open(dir.join("block.safetensors")).unwrap();
        let [x, y, ids] = ["x", "y", "topk_ids"].map(|name| block.read(name).unwrap());
        let mut input = Input {
            tokens: x.shape[0],
            ..Input::default()
        };
        input.insert("x", x);
        let layer = engine.layer(&from.0.spec, &reader(&from)).unwrap();
        let outputs = layer.forward_with(&input, &["y", "topk_ids"]).unwrap();
        let outputs = outputs.into_tensors();
        let wanted = y.to_f64();
        let largest = wanted.iter().fold(0f64, |most, v| most.max(v.abs()));
        let found = outputs["y"].to_f64();
        let off = found.iter().zip(&wanted).map(|(a, b)| (a - b).abs());
        // As a maximum would pass over NaN.
        let most = case["tolerance"]["f32"].as_f64().unwrap() * largest;
        assert!(off.into_iter().all(|off| off <= most), "{what}");
        let rows = |ids: Vec<f32>| -> Vec<Vec<i64>> {
            let rows = ids.chunks(from.0.spec.shape.top_k);
            rows.map(|row| {
                let mut row: Vec<i64> = row.iter().map(|id| *id as i64).collect();
                row.sort_unstable();
                row
            })
            .collect()
        };
        let chosen = outputs["topk_ids"].to_f32();
        assert_eq!(rows(chosen), rows(ids.to_f32()), "{what}");
    }
}
