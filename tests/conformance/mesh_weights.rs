//! Weights over ranks: each rank reads its own, and the saved whole is that of one process.

use super::case::Case;
use super::layers::engine as cpu;
use super::mesh::{layer_on, mesh, on_ranks, sharded, spec};
use moesaic::engine::{Shard, part_of};
use moesaic::kernel::DType;
use moesaic::plan::RankCoords;
use moesaic::tensor::{Described, SourceError, WeightSink, WeightSource};
use moesaic::weights::{Checkpoint, LayerReader, LoadOptions, Writer};
use moesaic::{LayerOptions, Parallel, Tensor, Tensors};
use std::collections::BTreeSet;
use std::ops::Range;
use std::path::Path;
use std::sync::Mutex;

/// A source that remembers which experts of which tensor it was asked for.
struct Watched<'a> {
    whole: &'a dyn WeightSource,
    asked: Mutex<BTreeSet<(String, usize)>>,
}

impl WeightSource for Watched<'_> {
    fn describe(&self, name: &str) -> Option<(DType, Vec<usize>)> {
        self.whole.describe(name)
    }

    fn rows(&self, name: &str, rows: Range<usize>) -> Result<Tensor<'_>, SourceError> {
        let mut asked = self.asked.lock().unwrap();
        asked.extend(rows.clone().map(|row| (name.to_string(), row)));
        self.whole.rows(name, rows)
    }
}

fn layer() -> Case {
    let text = "shape = { model_dim = 16, hidden_dim = 12, experts = 7, top_k = 3 }
        experts = { bias = true }
        precision = { weights = 'bf16', activations = 'bf16' }
        shared = [{ hidden_dim = 8, gate = 'sigmoid' }, { hidden_dim = 12 }]";
    Case::random(&spec(text), 5, 3)
}

const MESHES: [Parallel; 6] = [
    mesh(1, 1, 1),
    mesh(3, 1, 1),
    mesh(2, 2, 2),
    mesh(1, 4, 1),
    sharded(2, 2, 2),
    sharded(1, 4, 1),
];

#[test]
fn a_rank_asks_for_its_own_experts() {
    let case = layer();
    let whole = case.host_weights();
    for parallel in MESHES {
        on_ranks(&cpu(), parallel, |mesh| {
            let watched = Watched {
                whole: &whole,
                asked: Mutex::default(),
            };
            let layer = cpu()
                .layer_with(&case.spec, &watched, LayerOptions::over(mesh))
                .unwrap();
            let asked = watched.asked.into_inner().unwrap();
            let own = parallel.experts(mesh.place().ep, 7);
            let experts = |name: &str| -> Vec<usize> {
                let rows = asked.iter().filter(|(asked, _)| asked == name);
                rows.map(|(_, row)| *row).collect()
            };
            for name in [
                "experts.gate.weight",
                "experts.up.bias",
                "experts.down.weight",
            ] {
                let found = experts(name);
                assert!(own.clone().eq(found), "{parallel:?}: {name}");
            }
            // Of sharded shared experts the rows of its slice, of whole ones all.
            let part = |width: usize| {
                if parallel.shards_shared() {
                    parallel.hidden(mesh.place().tp, width)
                } else {
                    0..width
                }
            };
            for (name, rows) in [
                ("shared.0.up.weight", part(8)),
                ("shared.1.gate.bias", part(12)),
                ("shared.1.down.weight", 0..16),
                ("shared.0.router.weight", 0..1),
            ] {
                assert!(rows.eq(experts(name)), "{parallel:?}: {name}");
            }
            assert!(own.eq(layer.rank_plan().unwrap().own_experts()));
        });
    }
}

/// Bytes of the file at a path that are in this process's memory.
#[cfg(target_os = "linux")]
fn mapped(path: &Path) -> usize {
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let (mut here, mut sum) = (false, 0);
    for line in maps.lines() {
        if line
            .split_whitespace()
            .next()
            .is_some_and(|word| word.contains('-'))
        {
            here = line.ends_with(&*path.to_string_lossy());
        } else if let Some(size) = line.strip_prefix("Rss:").filter(|_| here) {
            let number = size.split_whitespace().next().unwrap();
            sum += number.parse::<usize>().unwrap() << 10;
        }
    }
    sum
}

/// A safetensors file of f32 tensors whose elements are holes.
#[cfg(target_os = "linux")]
fn hollow(path: &Path, tensors: &[moesaic::spec::TensorSpec]) {
    let (mut entries, mut end) = (Vec::new(), 0);
    for tensor in tensors {
        let (name, shape, start) = (&tensor.name, &tensor.shape, end);
        end += 4 * shape.iter().product::<usize>();
        entries.push(format!(
            "\"{name}\":{{\"dtype\":\"F32\",\"shape\":{shape:?},\"data_offsets\":[{start},{end}]}}"
        ));
    }
    let header = format!("{{{}}}", entries.join(","));
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    std::fs::write(path, &bytes).unwrap();
    let file = std::fs::File::options().write(true).open(path).unwrap();
    file.set_len((bytes.len() + end) as u64).unwrap();
}

/// A rank keeps a few MiB of 3 GiB of experts in memory, whether they lie in
/// one file or one for each tensor: its own 768 KiB, and what the system puts
/// beside them.
#[cfg(target_os = "linux")]
#[test]
fn a_rank_reads_its_part_of_files() {
    let text = "shape = { model_dim = 256, hidden_dim = 256, experts = 4096, top_k = 1 }";
    let spec = spec(text);
    let tensors = moesaic::spec::canonical_tensors(&spec);
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().canonicalize().unwrap();
    let [one, several] = ["one", "several"].map(|name| folder.join(name));
    std::fs::create_dir(&one).unwrap();
    hollow(&one.join("model.safetensors"), &tensors);
    std::fs::create_dir(&several).unwrap();
    let mut index = Vec::new();
    for tensor in &tensors {
        let file = format!("{}.safetensors", tensor.name);
        hollow(&several.join(&file), std::slice::from_ref(tensor));
        index.push(format!("\"{}\":\"{file}\"", tensor.name));
    }
    let index = format!("{{\"weight_map\":{{{}}}}}", index.join(","));
    std::fs::write(several.join("model.safetensors.index.json"), index).unwrap();
    for folder in [one, several] {
        let checkpoint = Checkpoint::open(&folder).unwrap();
        let reader = LayerReader::canonical(&spec, &checkpoint, LoadOptions::default());
        let reader = reader.unwrap();
        for (shards, shard) in [(1, 0), (2, 1)] {
            let place = RankCoords {
                dp: 0,
                ep: 1234,
                tp: shard,
            };
            let own = Shard::new(&spec, mesh(4096, shards, 1), place, &reader);
            for name in ["gate", "up", "down"] {
                let name = format!("experts.{name}.weight");
                let (_, shape) = own.describe(&name).unwrap();
                let tensor = own.rows(&name, 0..shape[0]).unwrap();
                assert_eq!(tensor.elements(), 256 * 256 / shards);
                assert!(tensor.to_f32().iter().all(|v| *v == 0.0));
            }
        }
        let files = std::fs::read_dir(&folder).unwrap().flatten();
        let read: usize = files.map(|file| mapped(&file.path())).sum();
        let range = 3 << 18..64 << 20;
        assert!(
            range.contains(&read),
            "{read} bytes of {}",
            folder.display()
        );
    }
}

fn read(path: &Path) -> Tensors<'static> {
    let checkpoint = Checkpoint::open(path).unwrap();
    let names = checkpoint.names();
    names
        .map(|name| (name, checkpoint.read(name).unwrap()))
        .collect()
}

#[test]
fn what_ranks_hold_is_saved_as_one_process_has_it() {
    let case = layer();
    let whole = case.host_weights();
    let folder = tempfile::tempdir().unwrap();
    for (number, parallel) in MESHES.into_iter().enumerate() {
        let [file, several] =
            ["file", "several"].map(|kind| folder.path().join(format!("{kind}{number}")));
        on_ranks(&cpu(), parallel, |mesh| {
            let layer = layer_on(&cpu(), mesh, &case, None);
            let own = layer.weights_of(&whole).unwrap();
            layer
                .ranks()
                .unwrap()
                .collect(&own, &mut Writer::file(&file))
                .unwrap();
            let mut sink = Writer::directory(&several, 1000);
            layer.ranks().unwrap().collect(&own, &mut sink).unwrap();
        });
        assert!(read(&file) == whole, "{parallel:?}");
        assert!(read(&several) == whole, "{parallel:?}");
        // Another mesh reads its part of it.
        let checkpoint = Checkpoint::open(&several).unwrap();
        let place = RankCoords {
            dp: 0,
            ep: 1,
            tp: 1,
        };
        for name in whole.keys() {
            let [here, there] = [&whole as &dyn WeightSource, &checkpoint]
                .map(|source| part_of(mesh(5, 3, 1), place, source, name).unwrap());
            assert!(here == there, "{name}");
        }
    }
}

/// A sink that has no room.
struct Full;

impl WeightSink for Full {
    fn begin(&mut self, _: &[Described]) -> Result<(), SourceError> {
        Ok(())
    }

    fn write(&mut self, _: &[u8]) -> Result<(), SourceError> {
        Err("no space is left".into())
    }

    fn end(&mut self) -> Result<(), SourceError> {
        Ok(())
    }
}

#[test]
fn every_rank_learns_that_nothing_was_saved() {
    let case = layer();
    let errors = on_ranks(&cpu(), mesh(2, 1, 2), |mesh| {
        let layer = layer_on(&cpu(), mesh, &case, None);
        let own = layer.weights_of(&case.host_weights()).unwrap();
        let error = layer.ranks().unwrap().collect(&own, &mut Full).unwrap_err();
        // Nothing is wrong with the ranks.
        layer.ranks().unwrap().barrier("after").unwrap();
        error.to_string()
    });
    for error in errors {
        assert!(
            error.contains("cannot be saved: no space is left"),
            "{error}"
        );
    }
}
