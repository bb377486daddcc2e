//! Layers of quantized checkpoints, run as they were read: by one process and by ranks that read
//! their own experts, to the bit what transformers' dequantized weights give.

use super::{engine, entries, hurried};
use crate::conformance::mesh::on_ranks;
use moesaic::mesh::SharedExperts;
use moesaic::spec::gguf;
use moesaic::spec::hf::{self, Import};
use moesaic::tensor::SourceError;
use moesaic::train::elastic;
use moesaic::weights::{Checkpoint, LayerReader, LoadOptions, set_expert_formats};
use moesaic::{DType, Engine, Input, LayerOptions, Parallel, Tensor, Tensors, WeightSource};
use serde_json::Value;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
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
    let engine = hurried();
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
            let layer = engine
                .layer_with(spec, source, LayerOptions::over(mesh))
                .unwrap();
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

/// A published layer with what its authors' libraries make of it.
struct Published {
    what: String,
    from: (Import, Checkpoint),
    x: Tensor<'static>,
    y: Vec<f64>,
    ids: Vec<Vec<i64>>,
    /// The error that `y` may have in f32.
    most: f64,
}

impl Published {
    fn open(dir: &Path) -> Published {
        let case = fs::read_to_string(dir.join("case.json")).unwrap();
        let case: Value = serde_json::from_str(&case).unwrap();
        let from = imported(dir, &case);
        let block = Checkpoint::open(dir.join("block.safetensors")).unwrap();
        let [x, y, ids] = ["x", "y", "topk_ids"].map(|name| block.read(name).unwrap());
        let y = y.to_f64();
        let largest = y.iter().fold(0f64, |most, v| most.max(v.abs()));
        Published {
            what: dir.display().to_string(),
            ids: ascending(&ids, from.0.spec.shape.top_k),
            from,
            x,
            y,
            most: case["tolerance"]["f32"].as_f64().unwrap() * largest,
        }
    }

    /// Returns the same layer with experts as codes, if they can be, and whether its experts are
    /// codes that are read as numbers.
    fn as_codes(&self) -> (Option<Import>, bool) {
        let mut import = self.from.0.clone();
        let options = LoadOptions::default();
        let formats = set_expert_formats(&mut import, &self.from.1, options);
        let dequantized = formats.dequantized.is_some();
        assert!(formats.up.is_none() || !dequantized, "{}", self.what);
        (formats.up.map(|_| import), dequantized)
    }

    fn input(&self, tokens: Range<usize>) -> Input<'_> {
        let mut input = Input {
            tokens: tokens.len(),
            ..Input::default()
        };
        input.insert("x", self.x.rows(tokens).unwrap());
        input
    }

    /// Checks `y` and the experts of some tokens.
    fn check(&self, tokens: Range<usize>, found: &Tensors<'_>, how: &str) {
        let what = format!("{} {how}", self.what);
        let spec = &self.from.0.spec;
        let width = spec.output_dim();
        let wanted = &self.y[tokens.start * width..tokens.end * width];
        let y = found["y"].to_f64();
        assert_eq!(y.len(), wanted.len(), "{what}");
        let off = y.iter().zip(wanted).map(|(a, b)| (a - b).abs());
        // As a maximum would pass over NaN.
        assert!(off.into_iter().all(|off| off <= self.most), "{what}");
        let chosen = ascending(&found["topk_ids"], spec.shape.top_k);
        assert_eq!(chosen, self.ids[tokens], "{what}");
    }
}

fn ascending(ids: &Tensor<'_>, top_k: usize) -> Vec<Vec<i64>> {
    let ids = ids.to_f32();
    let rows = ids.chunks(top_k).map(|row| {
        let mut row: Vec<i64> = row.iter().map(|id| *id as i64).collect();
        row.sort_unstable();
        row
    });
    rows.collect()
}

/// Checkpoints that other libraries packed, run on the CPU as numbers and as the codes that they
/// hold: what their weights give, unpacked by those libraries. `runtime/weights/tests/oracle.rs`
/// holds the f64 reference to the same, and `stored.rs` next to it the codes to the numbers.
#[test]
fn published_formats_run() {
    let cases = [entries("formats"), entries("formats_more")].concat();
    assert_eq!(cases.len(), 36);
    // Codes of every other one by kernels as people get them.
    let (people, hurried) = (engine(), hurried());
    let run = |codes, first| {
        let cases: Vec<PathBuf> = cases.iter().skip(first).step_by(2).cloned().collect();
        run_as_numbers_and_codes([&hurried, codes], &cases)
    };
    let as_numbers = [run(&people, 0), run(&hurried, 1)].concat();
    let [(only, dequantized)] = as_numbers.as_slice() else {
        panic!("no codes: {as_numbers:?}");
    };
    assert!(only.ends_with("gptq_int4_act") && *dequantized, "{only}");
}

/// Layers of GGUF files by gguf-py: four of blocks, the rest of floats.
#[test]
fn files_of_gguf_py_run() {
    let mut cases = entries("gguf");
    cases.retain(|path| path.is_dir());
    assert_eq!(cases.len(), 15);
    let as_numbers = run_as_numbers_and_codes([&hurried(), &hurried()], &cases);
    assert_eq!(as_numbers.len(), 11, "{as_numbers:?}");
    let floats = as_numbers.iter().all(|(_, dequantized)| !dequantized);
    assert!(floats, "{as_numbers:?}");
}

/// Runs layers of fixtures, on one engine as numbers and on one as codes. Returns those that do
/// not run as codes, each with whether it has some.
fn run_as_numbers_and_codes(
    [of_numbers, of_codes]: [&Engine; 2],
    cases: &[PathBuf],
) -> Vec<(String, bool)> {
    let mut as_numbers = Vec::new();
    for case in cases.iter().map(|dir| Published::open(dir)) {
        let tokens = 0..case.x.shape[0];
        let (codes, dequantized) = case.as_codes();
        let run = |engine: &Engine, import: &Import, how: &str| {
            let reader = LayerReader::of_import(import, &case.from.1, LoadOptions::default());
            let layer = engine.layer(&import.spec, &reader.unwrap()).unwrap();
            let input = case.input(tokens.clone());
            let outputs = layer.forward(input.reading(&["y", "topk_ids"])).unwrap();
            case.check(tokens.clone(), &outputs.into_tensors(), how);
        };
        run(of_numbers, &case.from.0, "as numbers");
        match &codes {
            Some(codes) => run(of_codes, codes, "as codes"),
            None => as_numbers.push((case.what, dequantized)),
        }
    }
    as_numbers
}

/// Two ranks read the codes of their own experts alone.
#[test]
fn ranks_read_their_own_codes() {
    let engine = hurried();
    let names = ["fp8_block_ds", "ct_mxfp4", "gguf_q4_k", "gptq_int4_asym"];
    let cases = entries("formats").into_iter();
    let cases = cases.filter(|dir| names.iter().any(|name| dir.ends_with(name)));
    let cases: Vec<Published> = cases.map(|dir| Published::open(&dir)).collect();
    assert_eq!(cases.len(), names.len());
    for case in cases {
        let codes = case.as_codes().0.unwrap();
        let experts = codes.spec.shape.experts;
        on_ranks(&engine, mesh(2, 1), |mesh| {
            let half = case.x.shape[0] / 2;
            let tokens = mesh.rank() * half..(mesh.rank() + 1) * half;
            let reader = LayerReader::of_import(&codes, &case.from.1, LoadOptions::default());
            let noted = Noted {
                source: reader.unwrap(),
                experts: Mutex::default(),
            };
            let layer = engine
                .layer_with(&codes.spec, &noted, LayerOptions::over(mesh))
                .unwrap();
            let input = case.input(tokens.clone());
            let outputs = layer.forward(input.reading(&["y", "topk_ids"])).unwrap();
            case.check(tokens, &outputs.into_tensors(), "on two ranks");
            let own = mesh.rank() * experts / 2..(mesh.rank() + 1) * experts / 2;
            let read = noted.experts.into_inner().unwrap();
            let inside = |rows: &Range<usize>| own.start <= rows.start && rows.end <= own.end;
            assert!(
                !read.is_empty() && read.iter().all(inside),
                "{}: {read:?}",
                case.what
            );
        });
    }
}

/// Codes, scales and offsets of an expert are moved as they are, and experts of codes are not cut.
#[test]
fn codes_are_split_and_joined_unchanged() {
    let names = ["ct_mxfp4", "gguf_q4_k", "gptq_int4_asym"];
    for name in names {
        let cases = entries("formats").into_iter();
        let dir = cases.into_iter().find(|dir| dir.ends_with(name)).unwrap();
        let case = Published::open(&dir);
        let codes = case.as_codes().0.unwrap();
        let reader = LayerReader::of_import(&codes, &case.from.1, LoadOptions::default());
        let (spec, whole) = (&codes.spec, reader.unwrap().load().unwrap());
        let parts = elastic::split_experts(spec, &whole, &[1, 3]);
        // Experts of a part that has fewer than a token chooses are refused.
        assert!(parts.is_err(), "{name}");
        let parts = elastic::split_experts(spec, &whole, &[2, 2]).unwrap();
        let second = &parts[1].1;
        for (tensor, part) in second
            .iter()
            .filter(|(name, _)| name.starts_with("experts."))
        {
            assert_eq!(*part, whole[tensor].rows(2..4).unwrap(), "{name}: {tensor}");
        }
        let (merged, joined) = elastic::merge_experts(&parts).unwrap();
        assert_eq!((&merged, &joined), (spec, &whole), "{name}");
        let shards = elastic::shard_experts(spec, &whole, mesh(4, 1)).unwrap();
        let joined = elastic::unshard_experts(spec, &shards, mesh(4, 1)).unwrap();
        assert_eq!(joined, whole, "{name}");
        let cut = elastic::shard_experts(spec, &whole, mesh(2, 2)).unwrap_err();
        assert!(cut.to_string().contains("stay on one rank"), "{cut}");
    }
}
