//! Layers as other projects compute them: one fixture on one engine. `tools/gpu-smoke` runs
//! them on hardware.

use moesaic::spec::{LayerSpec, hf};
use moesaic::weights::{Checkpoint, LoadOptions, load_import};
use moesaic::{Engine, Input, Tensor, Tensors};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

/// The fixtures in a folder, in order.
pub fn fixtures(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("oracle data");
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.is_dir() || path.extension().is_some_and(|e| e == "safetensors"));
    paths.sort();
    paths
}

/// The layer of a Hugging Face fixture.
pub fn import(dir: &Path) -> hf::Import {
    let read = |name: &str| fs::read_to_string(dir.join(name)).unwrap();
    let case: Value = serde_json::from_str(&read("case.json")).unwrap();
    let layer = case["layer"].as_u64().expect("a layer") as usize;
    hf::import(&read("config.json"), layer).unwrap()
}

/// The results of one call, by name.
struct Results(Tensors<'static>);

impl Results {
    fn of(
        engine: &Engine,
        spec: &LayerSpec,
        weights: &Tensors<'_>,
        inputs: Tensors<'static>,
    ) -> Self {
        let layer = engine.layer(spec, weights).unwrap();
        let mut input = Input {
            tokens: inputs["x"].shape[0],
            ..Input::default()
        };
        for (name, tensor) in &inputs {
            input.insert(name, tensor.clone());
        }
        let known = |name: &&str| layer.plan().tensor(name).is_some();
        let names = ["y", "topk_ids", "topk_weights", "counts", "router.logits"];
        let places = ["locations", "capacity"];
        let names: Vec<&str> = names.into_iter().chain(places).filter(known).collect();
        Results(layer.forward(input.reading(&names)).unwrap().into_tensors())
    }

    fn floats(&self, name: &str) -> Vec<f32> {
        self.0[name].to_f32()
    }

    fn ints(&self, name: &str) -> Vec<i64> {
        self.0[name].to_f32().iter().map(|&v| v as i64).collect()
    }

    /// Chosen experts; -1 where the choice was dropped.
    fn kept_ids(&self) -> Vec<i64> {
        let mut ids = self.ints("topk_ids");
        if self.0.contains_key("capacity") {
            let places = self.ints("locations").into_iter();
            let dropped = ids.iter_mut().zip(places).filter(|(_, place)| *place < 0);
            dropped.for_each(|(id, _)| *id = -1);
        }
        ids
    }

    /// Within `tolerance` of what the file says, relative to its largest element.
    fn close(&self, what: &str, name: &str, want: &Tensor<'_>, tolerance: f64) {
        let (found, want) = (self.floats(name), want.to_f64());
        assert_eq!(found.len(), want.len(), "{what}: length of {name}");
        let scale = want.iter().fold(0f64, |most, v| most.max(v.abs()));
        for (i, (found, want)) in found.iter().zip(want).enumerate() {
            let error = (f64::from(*found) - want).abs() / scale;
            assert!(
                error < tolerance,
                "{what}: {name}[{i}] is {found}, expected {want}"
            );
        }
    }
}

fn ints(tensor: &Tensor<'_>) -> Vec<i64> {
    tensor.to_f64().iter().map(|&v| v as i64).collect()
}

/// The rows, each in ascending order.
fn sets(ids: &[i64], width: usize) -> Vec<Vec<i64>> {
    let mut rows: Vec<Vec<i64>> = ids.chunks(width).map(<[i64]>::to_vec).collect();
    rows.iter_mut().for_each(|row| row.sort_unstable());
    rows
}

/// A layer of a checkpoint gives what transformers' block gave.
pub fn hugging_face(engine: &Engine, dir: &Path) {
    let what = format!("{} on {}", dir.display(), engine.target());
    let import = import(dir);
    let checkpoint = Checkpoint::open(dir).unwrap();
    let weights = load_import(&import, &checkpoint, LoadOptions::default()).unwrap();
    let block = Checkpoint::open(dir.join("block.safetensors")).unwrap();
    let given = ["x", "token_ids"].into_iter();
    let inputs = given.filter_map(|name| Some((name.to_string(), block.read(name).ok()?)));
    let results = Results::of(engine, &import.spec, &weights, inputs.collect());
    results.close(&what, "y", &block.read("y").unwrap(), 2e-5);
    let want = block.read("topk_ids").unwrap();
    let (found, want) = (results.kept_ids(), (ints(&want), want.shape[1]));
    assert_eq!(sets(&found, want.1), sets(&want.0, want.1), "{what}");
}

/// A Tutel case: its settings and tensors.
pub struct Tutel {
    case: Value,
    pub tensors: Checkpoint,
}

impl Tutel {
    pub fn open(path: &Path) -> Tutel {
        let bytes = fs::read(path).unwrap();
        let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        let case = &header.metadata().as_ref().expect("metadata")["case"];
        Tutel {
            case: serde_json::from_str(case).unwrap(),
            tensors: Checkpoint::open(path).unwrap(),
        }
    }

    pub fn size(&self, key: &str) -> usize {
        self.case[key].as_u64().unwrap_or_else(|| panic!("{key}")) as usize
    }

    pub fn is(&self, key: &str, value: impl Into<Value>) -> bool {
        self.case[key] == value.into()
    }

    pub fn read(&self, name: &str) -> Tensor<'static> {
        self.tensors.read(name).unwrap()
    }

    pub fn spec(&self) -> LayerSpec {
        let or = |condition, yes, no| if condition { yes } else { no };
        let gated = self.is("expert", "llama_ffn");
        let cosine = self.is("gate", "cosine_top");
        let normalized = self.is("normalize_gate", 1) && self.size("k") > 1;
        let toml = format!(
            "[shape]\nmodel_dim = {}\nhidden_dim = {}\nexperts = {}\ntop_k = {}\n\
             [router]\n{}\n{}\nweight_on = \"{}\"\n\
             [capacity]\nmode = \"factor\"\nfactor = {}\nalign = {}\norder = \"{}\"\n\
             [experts]\nform = \"{}\"\nactivation = {}\nbias = {}\n\
             [[losses]]\nkind = \"gshard\"\ncoefficient = {}\n",
            self.size("model_dim"),
            self.size("hidden"),
            self.size("experts"),
            self.size("k"),
            or(cosine, "kind = \"cosine\"\nprojection_dim = 16", ""),
            or(
                normalized,
                "renormalize = \"clamp\"\nrenormalize_eps = 1.1920928955078125e-7",
                ""
            ),
            or(self.is("is_postscore", 1), "output", "input"),
            self.case["capacity_factor"],
            self.size("overlap"),
            or(self.is("bpr", 1), "batch-prioritized", "slot-major"),
            or(gated, "gated", "plain"),
            self.case["act"],
            !gated,
            self.case["l_aux_wt"],
        );
        LayerSpec::from_toml(&toml).unwrap_or_else(|e| panic!("{}", e.render(&toml, false)))
    }

    pub fn weights(&self) -> Tensors<'static> {
        self.canonical("")
    }

    /// The layer's tensors, or their gradients by the prefix `grad.`.
    pub fn canonical(&self, prefix: &str) -> Tensors<'static> {
        let read = |name: &str| self.read(&format!("{prefix}{name}"));
        let gate: &[[&str; 2]] = if self.is("gate", "cosine_top") {
            &[
                ["router.projector.weight", "gate.cosine_projector.weight"],
                ["router.projector.bias", "gate.cosine_projector.bias"],
                ["router.similarity", "gate.sim_matrix"],
                ["router.temperature", "gate.temperature"],
            ]
        } else {
            &[["router.weight", "wg"]]
        };
        let named = |names: &[[&str; 2]]| -> Tensors<'static> {
            let pairs = names.iter();
            pairs
                .map(|[to, from]| (to.to_string(), read(from)))
                .collect()
        };
        let mut weights = named(gate);
        let (model, hidden) = (self.size("model_dim"), self.size("hidden"));
        if self.is("expert", "llama_ffn") {
            for (part, from) in [("gate", "W_fc1"), ("up", "W_fc2")] {
                let matrix = transposed(&read(from), model, hidden);
                weights.insert(format!("experts.{part}.weight"), matrix);
            }
            let down = transposed(&read("W_fc3"), hidden, model);
            weights.insert("experts.down.weight".to_string(), down);
        } else {
            weights.extend(named(&[
                ["experts.up.weight", "fc1_w"],
                ["experts.up.bias", "fc1_b"],
                ["experts.down.bias", "fc2_b"],
            ]));
            let down = transposed(&read("fc2_w"), hidden, model);
            weights.insert("experts.down.weight".to_string(), down);
        }
        weights
    }

    /// Places of what was kept, -1 elsewhere.
    pub fn places(&self) -> Vec<i64> {
        let (places, kept) = (ints(&self.read("locations")), ints(&self.read("kept")));
        let pairs = places.into_iter().zip(kept);
        pairs
            .map(|(place, kept)| if kept != 0 { place } else { -1 })
            .collect()
    }

    pub fn counts(&self) -> Vec<i64> {
        let mut counts = vec![0; self.size("experts")];
        let ids = ints(&self.read("topk_idx"));
        ids.iter().for_each(|&id| counts[id as usize] += 1);
        counts
    }
}

/// Stacked matrices `[rows, columns]` turned to `[columns, rows]`.
fn transposed(tensor: &Tensor<'_>, rows: usize, columns: usize) -> Tensor<'static> {
    let values: Vec<f32> = tensor.to_f64().iter().map(|&v| v as f32).collect();
    let matrices = values.chunks(rows * columns);
    let shape = [matrices.len(), columns, rows];
    let turned = matrices
        .flat_map(|m| (0..columns).flat_map(move |c| (0..rows).map(move |r| m[r * columns + c])));
    Tensor::copied(&shape, &turned.collect::<Vec<_>>())
}

/// A layer gives what Tutel's gave.
pub fn tutel(engine: &Engine, file: &Path) {
    let what = format!("{} on {}", file.display(), engine.target());
    let tutel = Tutel::open(file);
    let inputs = Tensors::from([("x".to_string(), tutel.read("x"))]);
    let results = Results::of(engine, &tutel.spec(), &tutel.weights(), inputs);
    let ids = ints(&tutel.read("topk_idx"));
    assert_eq!(results.ints("topk_ids"), ids, "{what}");
    assert_eq!(results.ints("locations"), tutel.places(), "{what}");
    assert_eq!(
        results.ints("capacity"),
        ints(&tutel.read("capacity")),
        "{what}"
    );
    assert_eq!(results.ints("counts"), tutel.counts(), "{what}");
    // Tutel miscounts under batch priority; see the README beside it.
    if !tutel.is("bpr", 1) {
        assert_eq!(
            tutel.counts(),
            ints(&tutel.read("dispatch_count")),
            "{what}"
        );
    }
    for (name, theirs) in [
        ("y", "y"),
        ("topk_weights", "gates"),
        ("router.logits", "logits"),
    ] {
        results.close(&what, name, &tutel.read(theirs), 1e-5);
    }
}
