//! The layers of other projects on ranks: the bytes of one process, which the other tests
//! hold against the files.
//!
//! A test run has every case of `hf` and some of the others, each on one mesh;
//! `MOESAIC_MESHES=all` has all of them on all meshes.

use super::{engine, entries};
use crate::conformance::mesh::{on_ranks, shares};
use moesaic::spec::hf;
use moesaic::weights::{Checkpoint, LoadOptions, load_import};
use moesaic::{Engine, Input, Parallel, Tensors};
use serde_json::Value;
use std::fs;
use std::ops::Range;
use std::path::Path;

const MESHES: [Parallel; 7] = [
    mesh(1, 1, 1),
    mesh(2, 1, 1),
    mesh(3, 1, 1),
    mesh(2, 1, 2),
    mesh(4, 1, 1),
    mesh(4, 1, 2),
    mesh(2, 2, 2),
];

const fn mesh(ep: usize, shards: usize, dp: usize) -> Parallel {
    Parallel { ep, shards, dp }
}

/// Some rows of every tensor of an input.
fn part<'t>(inputs: &'t Tensors<'_>, tokens: &Range<usize>) -> Input<'t> {
    let mut input = Input {
        tokens: tokens.len(),
        ..Input::default()
    };
    for (name, tensor) in inputs {
        input.insert(name, tensor.rows(tokens.clone()).unwrap());
    }
    input
}

/// Whether ranks can be held against one process: a capacity is each rank's own.
fn runs(engine: &Engine, dir: &Path, parallel: Parallel) -> bool {
    let what = format!("{} on {parallel:?}", dir.display());
    let read = |name: &str| fs::read_to_string(dir.join(name)).unwrap();
    let case: Value = serde_json::from_str(&read("case.json")).unwrap();
    let layer = case["layer"].as_u64().expect("a layer") as usize;
    let import = hf::import(&read("config.json"), layer).unwrap();
    let spec = &import.spec;
    if spec.may_drop() || parallel.check(spec).is_err() {
        return false;
    }
    let checkpoint = Checkpoint::open(dir).unwrap();
    let weights = load_import(&import, &checkpoint, LoadOptions::default()).unwrap();
    let block = Checkpoint::open(dir.join("block.safetensors")).unwrap();
    let given = ["x", "token_ids"].into_iter();
    let inputs = given.filter_map(|name| Some((name.to_string(), block.read(name).ok()?)));
    let inputs: Tensors<'static> = inputs.collect();
    let tokens = inputs["x"].shape[0];
    let one = engine.layer(spec, &weights).unwrap();
    let one = one.forward(&part(&inputs, &(0..tokens))).unwrap();
    let shares = shares(tokens, parallel.ranks());
    let ranks = on_ranks(engine, parallel, |mesh| {
        let layer = engine.mesh_layer(mesh, spec, &weights, None);
        let layer = layer.unwrap_or_else(|e| panic!("{what}: {e}"));
        let output = layer.forward(&part(&inputs, &shares[mesh.rank()]));
        let output = output.unwrap_or_else(|e| panic!("{what}: {e}"));
        (output.y().data.to_vec(), output.y().to_f64())
    });
    if parallel.shards == 1 {
        let bytes: Vec<u8> = ranks.into_iter().flat_map(|(bytes, _)| bytes).collect();
        assert!(bytes == *one.y().data, "{what}");
        return true;
    }
    let found = ranks.into_iter().flat_map(|(_, values)| values);
    let want = one.y().to_f64();
    let scale = want.iter().fold(0f64, |most, v| most.max(v.abs()));
    for (found, want) in found.zip(want) {
        assert!(
            (found - want).abs() <= 2e-5 * scale,
            "{what}: {found}, {want}"
        );
    }
    true
}

#[test]
fn layers_of_other_projects_run_on_ranks() {
    let engine = engine();
    let all = std::env::var("MOESAIC_MESHES").is_ok_and(|value| value == "all");
    let (mut ran, mut cases) = (0, 0);
    for (folder, step) in [("hf", 1), ("hf_more", 8), ("families", 12)] {
        let step = if all { 1 } else { step };
        for (at, dir) in entries(folder).iter().enumerate().step_by(step) {
            let meshes = match all {
                true => &MESHES[..],
                false => &MESHES[1 + at / step % 6..][..1],
            };
            for parallel in meshes {
                cases += 1;
                ran += usize::from(runs(&engine, dir, *parallel));
            }
        }
    }
    assert!(2 * ran > cases, "{ran} of {cases}");
}
