//! The layers of other projects on ranks: the bytes of one process, which the other tests
//! hold against the files.
//!
//! Ranks share the tokens of a case. Where a capacity is each rank's own, all have all
//! tokens, so that each has the case's capacity, and experts the rows of all.
//!
//! Layers with shared experts run with slices of them, too, which are parts of a sum.
//!
//! A test run has every case of `hf` and `tutel` and some of the others, each on one mesh of
//! threads, and a few of them on processes under MPI; `MOESAIC_MESHES=all` has all of them
//! on all meshes of threads, and all on processes.

use super::{Tutel, entries};
use crate::conformance::layers::engine;
use crate::conformance::mesh::{on_ranks, shares};
use moesaic::collectives::{Call, mpi};
use moesaic::mesh::SharedExperts;
use moesaic::spec::{LayerSpec, hf};
use moesaic::toolchain::testing::mpich;
use moesaic::weights::{Checkpoint, LoadOptions, load_import};
use moesaic::{Engine, Input, LayerOptions, Mesh, Parallel, Tensor, Tensors};
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
        expert_tp: shards,
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

/// Cases of the folders, some of them or all, with a number of each.
fn cases(steps: [usize; 5]) -> impl Iterator<Item = (usize, Layer)> {
    let folders = ["hf", "tutel", "hf_more", "families", "families_limits"]
        .into_iter()
        .zip(steps);
    folders.flat_map(|(folder, step)| {
        let entries = entries(folder).into_iter().step_by(step).enumerate();
        entries.map(move |(at, path)| match folder {
            "tutel" => (at, Layer::of_tutel(&path)),
            _ => (at, Layer::of_hugging_face(&path)),
        })
    })
}

/// Whether all cases are wanted.
fn all() -> bool {
    std::env::var("MOESAIC_MESHES").is_ok_and(|value| value == "all")
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
        let one = self.by_one(engine);
        let shares = self.shares(parallel);
        let ranks = on_ranks(engine, parallel, |mesh| {
            self.of_rank(engine, mesh, &shares[mesh.rank()])
        });
        for (found, share) in ranks.iter().zip(shares) {
            check(&what, parallel, found, &one, share);
        }
        true
    }

    /// The tokens of each rank.
    fn shares(&self, parallel: Parallel) -> Vec<Range<usize>> {
        let tokens = self.inputs["x"].shape[0];
        if self.spec.may_drop() {
            vec![0..tokens; parallel.ranks()]
        } else {
            shares(tokens, parallel.ranks())
        }
    }

    /// What one process says of all tokens.
    fn by_one(&self, engine: &Engine) -> Tensor<'static> {
        let tokens = self.inputs["x"].shape[0];
        let one = engine.layer(&self.spec, &self.weights).unwrap();
        let one = one.forward(&self.part(&(0..tokens))).unwrap();
        one.y().clone().into_static()
    }

    /// What a rank says of its tokens.
    fn of_rank(&self, engine: &Engine, mesh: &Mesh, share: &Range<usize>) -> Tensor<'static> {
        let what = format!("{} on {:?}", self.name, mesh.parallel());
        let layer = engine.layer_with(&self.spec, &self.weights, LayerOptions::over(mesh));
        let layer = layer.unwrap_or_else(|e| panic!("{what}: {e}"));
        let output = layer.forward(&self.part(share));
        let output = output.unwrap_or_else(|e| panic!("{what}: {e}"));
        output.y().clone().into_static()
    }
}

/// To the bit, where experts are whole; slices are parts of a sum.
fn check(what: &str, mesh: Parallel, found: &Tensor, one: &Tensor, share: Range<usize>) {
    let want = one.rows(share).unwrap();
    if mesh.expert_tp == 1 {
        assert!(found.data == want.data, "{what}");
        return;
    }
    let all = one.to_f64();
    let scale = all.iter().fold(0f64, |most, v| most.max(v.abs()));
    for (found, want) in found.to_f64().iter().zip(want.to_f64()) {
        let near = (found - want).abs() <= 2e-5 * scale;
        assert!(near, "{what}: {found}, {want}");
    }
}

#[test]
fn layers_of_other_projects_run_on_ranks() {
    let engine = engine();
    let (mut ran, mut tried, mut sliced) = (0, 0, 0);
    for (at, layer) in cases(if all() { [1; 5] } else { [1, 1, 8, 12, 3] }) {
        let meshes = if all() {
            &MESHES[..]
        } else {
            &MESHES[1 + at % 7..][..1]
        };
        for parallel in meshes {
            tried += 1;
            ran += usize::from(layer.runs(&engine, *parallel));
        }
        if !layer.spec.shared.is_empty() {
            let parallel = Parallel {
                shared: SharedExperts::Sharded,
                ..mesh(1 + at % 2, 2, 1)
            };
            sliced += usize::from(layer.runs(&engine, parallel));
        }
    }
    assert!(2 * ran > tried, "{ran} of {tried}");
    assert!(sliced > 3, "{sliced} layers with slices of shared experts");
}

/// Meshes of four processes.
const OF_FOUR: [Parallel; 3] = [mesh(4, 1, 1), mesh(2, 1, 2), mesh(2, 2, 1)];

#[test]
#[ignore = "started by the other test, under mpiexec"]
fn a_process() {
    let engine = engine();
    let options = mpi::MpiOptions::default();
    let mut world = mpi::start(&options, engine.device().clone()).expect("it is under mpiexec");
    let meshes = OF_FOUR.map(|mesh| (mesh, Mesh::new(&mut world, mesh).expect("four ranks")));
    let (mut ran, mut tried) = (0, 0);
    for (at, layer) in cases(if all() { [1; 5] } else { [5, 6, 16, 24, 3] }) {
        let (parallel, mesh) = &meshes[at % meshes.len()];
        tried += 1;
        if parallel.check(&layer.spec).is_err() {
            continue;
        }
        ran += 1;
        let what = format!("{} on {parallel:?} by MPI", layer.name);
        let share = layer.shares(*parallel)[mesh.rank()].clone();
        let found = layer.of_rank(&engine, mesh, &share);
        check(&what, *parallel, &found, &layer.by_one(&engine), share);
    }
    assert!(2 * ran > tried, "{ran} of {tried}");
    drop(meshes);
    world.finish(&Call::new("end")).expect("all came here");
    println!("{ran} layers of {tried} are right");
}

#[test]
fn layers_of_other_projects_run_on_processes() {
    let this = std::env::current_exe().unwrap();
    let name = concat!(module_path!(), "::a_process");
    let (_, name) = name.split_once("::").expect("a crate and modules");
    let seconds = if all() { 1200 } else { 180 };
    let mut ranks = mpich().command_within(seconds, 4, &this);
    let ended = ranks.args(["--ignored", "--exact", name, "--nocapture"]);
    let ended = ended.output().expect("mpiexec starts");
    let said = [&ended.stdout[..], &ended.stderr[..]].concat();
    let said = String::from_utf8_lossy(&said);
    assert!(ended.status.success(), "{}: {said}", ended.status);
    assert_eq!(said.matches(" are right").count(), 4, "{said}");
}
