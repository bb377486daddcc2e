//! Weights that are put on a device a piece at a time: the same bytes as in one, from
//! memory and from checkpoints, whatever the CPU's kernels make of them.

use super::Case;
use super::case::floats;
use super::cases::of_type;
use moesaic::cpu::{CpuDevice, Nodes};
use moesaic::spec::hf;
use moesaic::weights::{Checkpoint, LayerReader, LoadOptions, write_safetensors};
use moesaic::{
    DType, Engine, EngineOptions, Layer, LayerOptions, LayerSpec, OpenError, Tensor, Tensors,
    Training, WeightSource,
};
use std::path::Path;
use std::sync::Arc;

/// Three experts, of which two are a piece of 8 MB, and one is left.
const SPEC: &str = "shape = { model_dim = 1031, hidden_dim = 1501, experts = 3, top_k = 2 }";

fn case() -> Case {
    let spec = LayerSpec::from_toml(SPEC).unwrap();
    Case::random(&of_type(DType::Bf16, spec), 5, 3)
}

fn y(case: &Case, layer: &Layer) -> Vec<f64> {
    floats(&layer.forward(&case.input()).unwrap(), "y")
}

fn layer(case: &Case, engine: &Engine, source: &dyn WeightSource) -> Layer {
    engine.layer(&case.spec, source).unwrap()
}

/// A layer that is made packs pieces; a weight that is set is packed whole.
fn check(target: &str) {
    let options = EngineOptions {
        poison: true,
        ..EngineOptions::default()
    };
    let engine = match Engine::open(target, options) {
        Err(OpenError::Device(error)) => return eprintln!("not tested: {error}"),
        engine => engine.unwrap(),
    };
    let case = case();
    let weights = case.host_weights();
    let made = layer(&case, &engine, &weights);
    let expected = y(&case, &made);
    let names = weights.keys().filter(|name| name.starts_with("experts."));
    for name in names {
        made.set_weight(name, &weights[name]).unwrap();
    }
    assert_eq!(y(&case, &made), expected, "{target}");
    let trained = engine.training_layer(&case.spec, &weights, moesaic::Training::default());
    assert_eq!(y(&case, &trained.unwrap()), expected, "{target}, trained");
}

#[test]
fn pieces_of_weights_are_packed_as_whole_ones() {
    check("cpu");
    check("cpu:avx2");
}

#[test]
fn pieces_are_packed_for_tiles() {
    check("sim:amx");
}

/// A Mixtral's tensors, one for each expert and matrix, in the order of the names.
fn per_expert(case: &Case, weights: &Tensors<'_>) -> Tensors<'static> {
    let block = "model.layers.0.block_sparse_moe";
    let mut dict = Tensors::new();
    dict.insert(
        format!("{block}.gate.weight"),
        weights["router.weight"].clone().into_static(),
    );
    for (ours, theirs) in [("gate", "w1"), ("down", "w2"), ("up", "w3")] {
        let whole = &weights[&format!("experts.{ours}.weight")];
        for e in 0..case.spec.shape.experts {
            let mut expert = whole.rows(e..e + 1).unwrap().into_static();
            expert.shape.remove(0);
            dict.insert(format!("{block}.experts.{e}.{theirs}.weight"), expert);
        }
    }
    dict
}

const CONFIG: &str = r#"{ "model_type": "mixtral", "hidden_size": 1031, "intermediate_size": 1501,
    "num_local_experts": 3, "num_experts_per_tok": 2, "num_hidden_layers": 1,
    "torch_dtype": "bfloat16" }"#;

/// The bytes of a checkpoint behind a header that is so many longer, so that
/// elements lie where none of their type may.
fn shifted(from: &Path, to: &Path, by: usize) {
    let bytes = std::fs::read(from).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut moved = ((header + by) as u64).to_le_bytes().to_vec();
    moved.extend_from_slice(&bytes[8..8 + header]);
    moved.extend(std::iter::repeat_n(b' ', by));
    moved.extend_from_slice(&bytes[8 + header..]);
    std::fs::write(to, moved).unwrap();
}

/// Tensors of single experts, aligned and not, on one NUMA node and on two, where
/// weights are put together first.
#[test]
fn experts_of_a_checkpoint_are_packed_from_there() {
    let case = case();
    let weights = case.host_weights();
    let import = hf::import(CONFIG, 0).unwrap();
    assert_eq!(import.spec.shape, case.spec.shape);
    let dir = tempfile::tempdir().unwrap();
    let [plain, odd] = ["plain", "odd"].map(|name| dir.path().join(name));
    write_safetensors(&plain, &per_expert(&case, &weights)).unwrap();
    shifted(&plain, &odd, 1);
    let nodes = Nodes::new([vec![0], (1..64).collect()]);
    let several = CpuDevice::with_nodes(2, nodes).unwrap();
    let several = Engine::on_device(Arc::new(several), EngineOptions::default()).unwrap();
    for engine in [Engine::cpu().unwrap(), several] {
        let in_memory = engine.layer(&import.spec, &weights).unwrap();
        let expected = y(&case, &in_memory);
        for path in [&plain, &odd] {
            let file = Checkpoint::open(path).unwrap();
            let reader = LayerReader::of_import(&import, &file, LoadOptions::default()).unwrap();
            let lazy = engine.layer(&import.spec, &reader).unwrap();
            assert_eq!(y(&case, &lazy), expected, "{}", path.display());
            assert_eq!(reader.load().unwrap(), weights);
        }
    }
}

/// A source whose weights are not those of the spec is refused before a weight is
/// read, and one that cannot give a weight says why.
#[test]
fn sources_that_do_not_fit_are_errors() {
    struct Broken(Tensors<'static>);

    impl WeightSource for Broken {
        fn describe(&self, name: &str) -> Option<(DType, Vec<usize>)> {
            self.0.describe(name)
        }

        fn rows(
            &self,
            _: &str,
            _: std::ops::Range<usize>,
        ) -> Result<Tensor<'_>, moesaic::tensor::SourceError> {
            Err("the disk is gone".into())
        }
    }

    let spec = "shape = { model_dim = 8, hidden_dim = 4, experts = 3, top_k = 1 }";
    let case = Case::random(&LayerSpec::from_toml(spec).unwrap(), 2, 1);
    let engine = Engine::cpu().unwrap();
    let refused = |source: &dyn WeightSource| match engine.layer(&case.spec, source) {
        Ok(_) => panic!("it was taken"),
        Err(error) => error.to_string(),
    };
    let broken = Broken(case.host_weights());
    let first = "weight `router.weight`: the disk is gone";
    assert_eq!(refused(&broken), first);
    let mut weights = case.host_weights();
    weights.insert("experts.up.weight", Tensor::zeros(DType::F32, &[4, 4, 8]));
    let shape = "weight `experts.up.weight`: has shape [4, 4, 8], expected [3, 4, 8]";
    assert_eq!(refused(&weights), shape);
    let mut short = Tensor::zeros(DType::F32, &[2, 4, 8]);
    short.shape[0] = 3;
    weights.insert("experts.up.weight", short);
    let length = "weight `experts.up.weight`: has 256 bytes, its shape needs 384";
    assert_eq!(refused(&weights), length);
    weights.insert("experts.up.weight", Tensor::zeros(DType::F32, &[4, 4, 8]));
    weights.remove("router.weight");
    let both = format!(
        "2 weights do not fit:\n  weight `router.weight`: is missing, expected f32 of shape [3, 8]\n  {shape}"
    );
    assert_eq!(refused(&weights), both, "all that is wrong, at once");
}

/// Weights that were put together for a layer are all read, or the layer is refused: a bias that
/// the spec lacks would be missing from y.
#[test]
fn weights_that_no_spec_reads_are_errors() {
    let spec = "shape = { model_dim = 8, hidden_dim = 4, experts = 3, top_k = 1 }";
    let case = Case::random(&LayerSpec::from_toml(spec).unwrap(), 2, 1);
    let engine = Engine::cpu().unwrap();
    let bias = ("experts.up.bias", Tensor::zeros(DType::F32, &[3, 4]));
    let known = "is no weight of the spec, which has: router.weight, experts.gate.weight, \
                 experts.up.weight, experts.down.weight";

    let mut weights = case.host_weights();
    weights.insert(bias.0, bias.1.clone());
    let error = engine.layer(&case.spec, &weights).expect_err("a bias");
    assert_eq!(
        error.to_string(),
        format!("weight `experts.up.bias`: {known}")
    );
    weights.insert("x", Tensor::zeros(DType::F32, &[2, 8]));
    let error = engine.training_layer(&case.spec, &weights, Training::default());
    let error = error.expect_err("a bias and x").to_string();
    assert!(error.starts_with("2 weights do not fit:"), "{error}");

    let routers = [Tensors::from([bias])];
    let gates = engine.multi_gate(
        &case.spec,
        &case.host_weights(),
        &routers,
        LayerOptions::default(),
    );
    let error = gates.expect_err("a bias of experts among a router's");
    assert_eq!(
        error.to_string(),
        format!("weight `experts.up.bias`: {known}")
    );
}
