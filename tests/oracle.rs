//! Layers as other projects compute them: files of their results, run here
//! on the CPU through the library. `tests/oracle` says where they are from.

use moesaic::spec::LayerSpec;
use moesaic::spec::keys::CheckpointLibrary;
use moesaic::toolchain::testing::{ExternalTool, needed};
use moesaic::weights::{Checkpoint, LoadOptions, load_import};
use moesaic::weights::{KeyOptions, load_keys, write_safetensors};
use moesaic::{Engine, EngineError, EngineOptions, Tensor, Tensors, reference, resolve_target};
use std::path::PathBuf;

mod archive;
mod backward;
mod families;
mod gradients;
mod layers;
mod quantized;
mod ranks;

use crate::conformance::{SIMULATORS, quick};
use layers::{Tutel, fixtures, import};
use moesaic_harness::thorough::one_in;

/// Poisoned memory shows what was never written.
fn options() -> EngineOptions {
    EngineOptions {
        poison: true,
        ..EngineOptions::default()
    }
}

fn engine() -> Engine {
    open("cpu")
}

/// For the many families: what differs between them is how their layers are read and planned,
/// which no flag of a C compiler changes. Those of [`engine`] are compiled as people get them.
fn hurried() -> Engine {
    quick::open("cpu", options()).expect("a CPU")
}

fn open(target: &str) -> Engine {
    let tool = ExternalTool::of(resolve_target(target).expect("a target"));
    needed(tool, Engine::open(target, options()))
}

/// Returns the fixtures of an archive of `tests/oracle`, in order.
fn entries(folder: &str) -> Vec<PathBuf> {
    fixtures(&archive::folder(folder))
}

fn hugging_face(engine: &Engine, folder: &str, least: usize) {
    let dirs = entries(folder);
    assert!(dirs.len() >= least, "{} cases in {folder}", dirs.len());
    let dirs = dirs.iter();
    dirs.for_each(|dir| layers::hugging_face(engine, dir));
}

#[test]
fn hugging_face_layers() {
    hugging_face(&engine(), "hf", 6);
}

/// The f64 reference gives the gradient of x that their autograd gives.
#[test]
fn hugging_face_gradients() {
    for dir in entries("hf") {
        let import = import(&dir);
        let checkpoint = Checkpoint::open(&dir).unwrap();
        let weights = load_import(&import, &checkpoint, LoadOptions::default()).unwrap();
        let block = Checkpoint::open(dir.join("block.safetensors")).unwrap();
        let [x, dy, dx] = ["x", "dy", "dx"].map(|name| block.read(name).unwrap());
        let input = reference::Input {
            tokens: x.shape[0],
            x: x.to_f64(),
            ..reference::Input::default()
        };
        let weights = reference::Weights::from(&weights);
        let found = reference::backward(&import.spec, &weights, &input, &dy.to_f64()).x;
        let want = dx.to_f64();
        let scale = want.iter().fold(0f64, |most, v| most.max(v.abs()));
        for (i, (found, want)) in found.iter().zip(&want).enumerate() {
            let error = (found - want).abs() / scale;
            assert!(
                error < 2e-5,
                "{}: dx[{i}] is {found}, expected {want}",
                dir.display()
            );
        }
    }
}

#[test]
fn hugging_face_layers_on_simulated_gpus() {
    // Those whose gradients another simulator gives.
    for (n, target) in (1..).zip(SIMULATORS) {
        let engine = open(target);
        one_in(3, n, entries("hf")).for_each(|dir| layers::hugging_face(&engine, &dir));
    }
}

#[test]
fn layers_of_more_hugging_face_families() {
    hugging_face(&hurried(), "hf_more", 30);
}

#[test]
fn layers_of_every_other_family() {
    hugging_face(&hurried(), "families", 40);
    hugging_face(&hurried(), "families_limits", 8);
}

impl Tutel {
    /// The layer as Tutel's own state dict has it.
    fn state_dict(&self, prefix: &str) -> Tensors<'static> {
        let mut dict = Tensors::new();
        let mut put = |name: String, tensor| dict.insert(format!("{prefix}{name}"), tensor);
        for name in self.tensors.names() {
            let theirs = match name {
                "wg" => "gates.0.wg.weight".to_string(),
                "fc1_w" => "experts.batched_fc1_w".to_string(),
                "fc1_b" => "experts.batched_fc1_bias".to_string(),
                "fc2_w" => "experts.batched_fc2_w".to_string(),
                "fc2_b" => "experts.batched_fc2_bias".to_string(),
                "W_fc1" | "W_fc2" | "W_fc3" => format!("experts.{name}"),
                _ => match name.strip_prefix("gate.") {
                    Some(name) => format!("gates.0.{name}"),
                    None => continue,
                },
            };
            put(theirs, self.read(name));
        }
        let experts = self.size("experts") as i64;
        let count = Tensor::owned(&[], vec![experts]);
        put("_num_global_experts".to_string(), count);
        dict
    }
}

#[test]
fn tutel_state_dicts_are_the_same_weights() {
    let dir = tempfile::tempdir().unwrap();
    let chosen = KeyOptions {
        library: CheckpointLibrary::Tutel,
        prefix: None,
        gate: None,
    };
    for file in entries("tutel") {
        let tutel = Tutel::open(&file);
        let (spec, path) = (tutel.spec(), dir.path().join("dict.safetensors"));
        for prefix in ["", "blocks.3.moe."] {
            write_safetensors(&path, &tutel.state_dict(prefix)).unwrap();
            let dict = Checkpoint::open(&path).unwrap();
            let (all, options) = (spec.shape.experts, LoadOptions::default());
            let found = load_keys(&spec, all, &chosen, &dict, options);
            let found = found.unwrap_or_else(|e| panic!("{}: {e}", file.display()));
            assert!(found == tutel.weights(), "{}", file.display());
        }
    }
}

#[test]
fn tutel_layers() {
    let (engine, files) = (engine(), entries("tutel"));
    assert_eq!(files.len(), 8);
    files.iter().for_each(|file| layers::tutel(&engine, file));
}

#[test]
fn tutel_layers_on_simulated_gpus() {
    for (n, target) in (1..).zip(SIMULATORS) {
        let engine = open(target);
        one_in(3, n, entries("tutel")).for_each(|file| layers::tutel(&engine, &file));
    }
}

/// The f64 reference gives Tutel's loss, and the gradients of
/// `sum(y · dy) + l_aux_wt · l_aux`.
#[test]
fn tutel_losses_and_gradients() {
    for file in entries("tutel") {
        let tutel = Tutel::open(&file);
        let (spec, weights) = (tutel.spec(), reference::Weights::from(&tutel.weights()));
        let x = tutel.read("x");
        let input = reference::Input {
            tokens: x.shape[0],
            x: x.to_f64(),
            ..reference::Input::default()
        };
        let what = file.display();
        let loss = reference::losses(&spec, &weights, &input)["loss.gshard"];
        let want = tutel.read("l_aux").to_f64()[0];
        assert!((loss / want - 1.0).abs() < 1e-6, "{what}: {loss}, {want}");
        let dy = tutel.read("dy").to_f64();
        let found = reference::backward(&spec, &weights, &input, &dy);
        let theirs = tutel.read("grad.x").to_f64();
        near(&format!("{what}: x"), &found.x, &theirs);
        for (name, want) in tutel.canonical("grad.") {
            let found = &found.weights[&name].data;
            near(&format!("{what}: {name}"), found, &want.to_f64());
        }
    }
}

/// Within 1e-5 of the largest element.
fn near(what: &str, found: &[f64], want: &[f64]) {
    assert_eq!(found.len(), want.len(), "{what}");
    let scale = want.iter().fold(0f64, |most, v| most.max(v.abs()));
    for (i, (found, want)) in found.iter().zip(want).enumerate() {
        let error = (found - want).abs() / scale;
        assert!(error < 1e-5, "{what}[{i}] is {found}, expected {want}");
    }
}

#[test]
fn a_call_that_memory_cannot_hold_is_refused() {
    let toml = "shape = { model_dim = 4096, hidden_dim = 64, experts = 4, top_k = 1 }";
    let spec = LayerSpec::from_toml(toml).unwrap();
    let engine = engine();
    engine.check_tokens(&spec, 100).unwrap();
    let error = engine.check_tokens(&spec, i32::MAX as usize).unwrap_err();
    assert!(matches!(error, EngineError::NoRoom { .. }), "{error}");
    let error = engine.check_tokens(&spec, 1 << 31).unwrap_err().to_string();
    assert!(
        error.ends_with("a call takes at most 2147483647, so split it"),
        "{error}"
    );
}
