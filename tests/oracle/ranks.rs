//! The layers of other projects on ranks: the bytes of one process, which the other tests
//! hold against the files.
//!
//! Ranks share the tokens of a case. Where a capacity is each rank's own, all have all
//! tokens, so that each has the case's capacity, and experts the rows of all.
//!
//! Layers with shared experts run with slices of them, too, which are parts of a sum.
//!
//! A test run has every case of `hf` and `tutel` and some of the others, each on one mesh;
//! `MOESAIC_MESHES=all` has all of them on all meshes.

use super::{Tutel, entries};
use crate::conformance::layers::engine;
use crate::conformance::mesh::{on_ranks, shares};
use moesaic::spec::{LayerSpec, hf};
use moesaic::weights::{Checkpoint, LoadOptions, load_import};
use moesaic::{Engine, Input, Parallel, SharedExperts, Tensors};
use serde_json::Value;
use std::fs;
use std::ops::Range;
use std::path::Path;

const MESHES: [Parallel; 8] = [
    mesh(1, 1, 1),
    mesh(2, 1, 1),
    mesh(3, 1, 1),
    mesh(2, 1, 2),
    mesh(4, 1, 1),
    mesh(4, 1, 2),
    mesh(2, 2, 2),
    mesh(8, 1, 1),
];

const fn mesh(ep: usize, shards: usize, dp: usize) -> Parallel {
    Parallel {
        ep,
        shards,
        dp,
        shared: SharedExperts::Whole,
    }
}

/// A layer of a file, and its tokens.
struct Layer {
    name: String,
    spec: LayerSpec,
    weights: Tensors<'static>,
    inputs: Tensors<'static>,
}

impl Layer {
    fn of_hugging_face(dir: &Path) -> Layer {
        let read = |name: &str| fs::read_to_string(dir.join(name)).unwrap();
        let case: Value = serde_json::from_str(&read("case.json")).unwrap();
        let layer = case["layer"].as_u64().expect("a layer") as usize;
        let import = hf::import(&read("config.json"), layer).unwrap();
        let checkpoint = Checkpoint::open(dir).unwrap();
        let weights = load_import(&import, &checkpoint, LoadOptions::default()).unwrap();
        let block = Checkpoint::open(dir.join("block.safetensors")).unwrap();
        let given = ["x", "token_ids"].into_iter();
        let inputs = given.filter_map(|name| Some((name.to_string(), block.read(name).ok()?)));
        Layer {
            name: dir.display().to_string(),
            inputs: inputs.collect(),
            weights,
            spec: import.spec,
        }
    }

    fn of_tutel(file: &Path) -> Layer {
        let tutel = Tutel::open(file);
        Layer {
            name: file.display().to_string(),
            spec: tutel.spec(),
            weights: tutel.weights(),
            inputs: Tensors::from([("x".to_string(), tutel.read("x"))]),
        }
    }

    /// Some tokens.
    fn part(&self, tokens: &Range<usize>) -> Input<'_> {
        let mut input = Input {
            tokens: tokens.len(),
            ..Input::default()
        };
        for (name, tensor) in &self.inputs {
            input.insert(name, tensor.rows(tokens.clone()).unwrap());
        }
        input
    }

    /// Whether a mesh can have the layer; its ranks then compute what one process does.
    fn runs(&self, engine: &Engine, parallel: Parallel) -> bool {
        let what = format!("{} on {parallel:?}", self.name);
        let spec = &self.spec;
        if parallel.check(spec).is_err() {
            return false;
        }
        let tokens = self.inputs["x"].shape[0];
        let shares = match spec.may_drop() {
            true => vec![0..tokens; parallel.ranks()],
            false => shares(tokens, parallel.ranks()),
        };
        let one = engine.layer(spec, &self.weights).unwrap();
        let one = one.forward(&self.part(&(0..tokens))).unwrap();
        let ranks = on_ranks(engine, parallel, |mesh| {
            let layer = engine.mesh_layer(mesh, spec, &self.weights, None);
            let layer = layer.unwrap_or_else(|e| panic!("{what}: {e}"));
            let output = layer.forward(&self.part(&shares[mesh.rank()]));
            output
                .unwrap_or_else(|e| panic!("{what}: {e}"))
                .y()
                .clone()
                .into_static()
        });
        let all = one.y().to_f64();
        let scale = all.iter().fold(0f64, |most, v| most.max(v.abs()));
        for (found, share) in ranks.iter().zip(shares) {
            let want = one.y().rows(share).unwrap();
            if parallel.shards == 1 {
                assert!(found.data == want.data, "{what}");
                continue;
            }
            for (found, want) in found.to_f64().iter().zip(want.to_f64()) {
                let near = (found - want).abs() <= 2e-5 * scale;
                assert!(near, "{what}: {found}, {want}");
            }
        }
        true
    }
}

#[test]
fn layers_of_other_projects_run_on_ranks() {
    let engine = engine();
    let all = std::env::var("MOESAIC_MESHES").is_ok_and(|value| value == "all");
    let (mut ran, mut cases, mut sliced) = (0, 0, 0);
    for (folder, step) in [("hf", 1), ("tutel", 1), ("hf_more", 8), ("families", 12)] {
        let step = if all { 1 } else { step };
        for (at, path) in entries(folder).iter().enumerate().step_by(step) {
            let meshes = match all {
                true => &MESHES[..],
                false => &MESHES[1 + at / step % 7..][..1],
            };
            let layer = match folder {
                "tutel" => Layer::of_tutel(path),
                _ => Layer::of_hugging_face(path),
            };
            for parallel in meshes {
                cases += 1;
                ran += usize::from(layer.runs(&engine, *parallel));
            }
            if !layer.spec.shared.is_empty() {
                let parallel = Parallel {
                    shared: SharedExperts::Sliced,
                    ..mesh(1 + at / step % 2, 2, 1)
                };
                sliced += usize::from(layer.runs(&engine, parallel));
            }
        }
    }
    assert!(2 * ran > cases, "{ran} of {cases}");
    assert!(sliced > 3, "{sliced} layers with slices of shared experts");
}
