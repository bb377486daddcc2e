//! Checkpoints: safetensors files, and the index of several.

use super::{Surface, folder, promise};
use crate::mutate;
use moesaic::{Tensor, Tensors};
use moesaic_spec::testing::SampleRng;
use moesaic_spec::{LayerSpec, TensorSpec};
use moesaic_weights::{Checkpoint, LoadOptions, load_canonical};
use std::fs;
use tempfile::TempDir;

/// Layers that the files are for.
const SPECS: [&str; 4] = [
    "shape = { model_dim = 3, hidden_dim = 2, experts = 2, top_k = 1 }\nrouter = { bias = true }",
    "shape = { model_dim = 3, hidden_dim = 2, experts = 2, top_k = 1 }\nexperts = { layout = \"concat\" }",
    "shape = { model_dim = 3, hidden_dim = 2, experts = 2, top_k = 1 }\nexperts = { layout = \"interleaved\", bias = true }",
    "shape = { model_dim = 3, hidden_dim = 2, experts = 2, top_k = 2 }\nrouter = { kind = \"table\", table_rows = 3 }\nprecision = { weights = \"bf16\", activations = \"bf16\" }",
];

/// Names and shapes of all of their tensors.
const TENSORS: [(&str, &str, &[u64]); 12] = [
    ("router.weight", "F32", &[2, 3]),
    ("router.bias", "F32", &[2]),
    ("router.table", "I32", &[3, 2]),
    ("experts.gate.weight", "F32", &[2, 2, 3]),
    ("experts.up.weight", "F32", &[2, 2, 3]),
    ("experts.gate_up.weight", "F32", &[2, 4, 3]),
    ("experts.gate_up.bias", "F32", &[2, 4]),
    ("experts.down.weight", "BF16", &[2, 3, 2]),
    ("experts.down.bias", "F16", &[2, 3]),
    ("x", "F32", &[4, 3]),
    ("token_ids", "I64", &[4]),
    ("odd", "F8_E4M3", &[5]),
];

const SIZES: [u64; 14] = [
    0,
    1,
    2,
    3,
    4,
    7,
    1 << 16,
    1 << 31,
    1 << 32,
    1 << 40,
    1 << 60,
    1 << 62,
    1 << 63,
    u64::MAX,
];

fn size_of(dtype: &str) -> u64 {
    match dtype {
        "F32" | "I32" => 4,
        "F16" | "BF16" => 2,
        "I64" => 8,
        _ => 1,
    }
}

/// Makes a file whose header is a little wrong.
pub(super) fn file(rng: &mut SampleRng, tensors: &[(&str, &str, &[u64])]) -> Vec<u8> {
    let mut entries = Vec::new();
    let mut end = 0;
    for (name, dtype, shape) in tensors {
        if rng.one_in(20) {
            continue;
        }
        let (mut name, mut dtype, mut shape) = (*name, *dtype, shape.to_vec());
        let bytes = shape.iter().product::<u64>() * size_of(dtype);
        let (mut start, mut stop) = (end, end + bytes);
        end = stop;
        if rng.one_in(30) {
            match rng.between(0, 7) {
                0 => start = rng.pick(&SIZES),
                1 => stop = rng.pick(&SIZES),
                2 => start = start.saturating_sub(bytes),
                3 => (start, stop) = (stop, start),
                4 => dtype = rng.pick(&["F32", "F64", "BOOL", "F16", "U8", "F4", "f32", "", "I64"]),
                5 => {
                    name = rng.pick(&["x", "", "__metadata__", "é", "../../x", "experts.up.weight"])
                }
                6 => shape = (0..rng.between(0, 4)).map(|_| rng.pick(&SIZES)).collect(),
                _ => shape.push(rng.pick(&SIZES)),
            }
        }
        entries.push(format!("\"{name}\":{{\"dtype\":\"{dtype}\",\"shape\":{shape:?},\"data_offsets\":[{start},{stop}]}}"));
    }
    if rng.one_in(6) {
        entries.insert(0, "\"__metadata__\":{\"format\":\"pt\"}".to_string());
    }
    let mut header = format!("{{{}}}", entries.join(",")).into_bytes();
    if rng.one_in(6) {
        header = mutate::text(
            rng,
            &[String::from_utf8_lossy(&header).into_owned()],
            &["\"F32\"", "[0,0]", "\"x\":{"],
        );
    }
    let length = if rng.one_in(25) {
        rng.pick(&SIZES)
    } else {
        header.len() as u64
    };
    let mut bytes = length.to_le_bytes().to_vec();
    bytes.extend(header);
    bytes.extend((0..end).map(|i| (i * 37 % 11) as u8));
    if rng.one_in(10) {
        mutate::bytes(rng, &bytes)
    } else {
        bytes
    }
}

/// Checks that every tensor is a part of the file that belongs to it alone,
/// unless there is no checkpoint.
fn pieces(checkpoint: &Checkpoint, length: usize) -> Result<(), String> {
    let mut ranges = Vec::new();
    for name in checkpoint.names() {
        let tensor = checkpoint.tensor(name).ok_or("a name without a tensor")?;
        let count = tensor
            .shape
            .iter()
            .try_fold(1usize, |n, size| n.checked_mul(*size));
        if let Ok(dtype) = tensor.dtype {
            let fits = count.and_then(|n| n.checked_mul(dtype.size())) == Some(tensor.bytes.len());
            promise(fits, || {
                format!(
                    "`{name}` has {} bytes and shape {:?}",
                    tensor.bytes.len(),
                    tensor.shape
                )
            })?;
            let copy = checkpoint.read(name).map_err(|error| error.to_string())?;
            promise(*copy.data == *tensor.bytes, || {
                format!("`{name}` is read as something else")
            })?;
        } else {
            promise(checkpoint.read(name).is_err(), || {
                format!("`{name}` has no type of ours")
            })?;
        }
        let start = tensor.bytes.as_ptr() as usize;
        ranges.push((start, start + tensor.bytes.len(), name));
    }
    ranges.retain(|(start, end, _)| start < end);
    ranges.sort_unstable();
    for pair in ranges.windows(2) {
        promise(pair[0].1 <= pair[1].0, || {
            format!("`{}` and `{}` overlap", pair[0].2, pair[1].2)
        })?;
    }
    let all: usize = ranges.iter().map(|(start, end, _)| end - start).sum();
    promise(all <= length, || {
        format!("{all} bytes of tensors in {length}")
    })
}

/// A surface of a safetensors file: weights, tokens, a routing record.
pub struct File {
    folder: TempDir,
    specs: Vec<LayerSpec>,
}

impl File {
    /// Makes a surface over four small layers.
    pub fn new() -> File {
        let specs = SPECS.map(|text| LayerSpec::from_toml(text).expect("it is valid"));
        File {
            folder: folder(),
            specs: specs.to_vec(),
        }
    }
}

impl Surface for File {
    fn name(&self) -> &'static str {
        "safetensors"
    }

    fn share(&self) -> u64 {
        120
    }

    fn input(&mut self, rng: &mut SampleRng) -> Vec<u8> {
        file(rng, &TENSORS)
    }

    fn check(&mut self, input: &[u8]) -> Result<bool, String> {
        let path = self.folder.path().join("weights.safetensors");
        fs::write(&path, input).map_err(|error| error.to_string())?;
        let checkpoint = match Checkpoint::open(&path) {
            Ok(checkpoint) => checkpoint,
            Err(error) => {
                promise(!error.to_string().is_empty(), || {
                    "it says nothing".to_string()
                })?;
                return Ok(false);
            }
        };
        pieces(&checkpoint, input.len())?;
        for spec in &self.specs {
            for narrow in [false, true] {
                // A mended tensor is tried among others as well as alone.
                let options = LoadOptions {
                    narrow,
                    allow_extra: narrow,
                    ..LoadOptions::default()
                };
                let Ok(loaded) = load_canonical(spec, &checkpoint, options) else {
                    continue;
                };
                for tensor in moesaic_spec::canonical_tensors(spec) {
                    held(&loaded, &tensor)?;
                }
            }
        }
        Ok(true)
    }
}

/// A surface of `model.safetensors.index.json` beside two files.
pub struct Index {
    folder: TempDir,
}

impl Index {
    /// Makes a surface with the two files.
    pub fn new() -> Index {
        let folder = folder();
        let good = |names: &[usize]| {
            let tensors: Vec<_> = names.iter().map(|i| TENSORS[*i]).collect();
            let seeds = (0..).map(|seed| file(&mut SampleRng::new(seed), &tensors));
            let path = folder.path().join("try.safetensors");
            let mut whole = seeds.filter(|bytes| {
                fs::write(&path, bytes).expect("a file");
                Checkpoint::open(&path).is_ok_and(|c| c.names().count() == tensors.len())
            });
            whole.next().expect("one is whole")
        };
        for (name, tensors) in [
            ("a.safetensors", &[0, 1, 2][..]),
            ("b.safetensors", &[3, 4, 7]),
        ] {
            fs::write(folder.path().join(name), good(tensors)).expect("a file");
        }
        Index { folder }
    }
}

const INDEX: &str = "{\"metadata\":{\"total_size\":96},\n\"weight_map\":{\"router.weight\":\"a.safetensors\",\n\
                     \"router.bias\":\"a.safetensors\",\n\"experts.gate.weight\":\"b.safetensors\",\n\
                     \"experts.up.weight\":\"b.safetensors\"}}";

impl Surface for Index {
    fn name(&self) -> &'static str {
        "index"
    }

    fn share(&self) -> u64 {
        30
    }

    fn input(&mut self, rng: &mut SampleRng) -> Vec<u8> {
        let words = [
            "\"../a.safetensors\"",
            "\"/etc/passwd\"",
            "\"x\":\"a.safetensors\",",
            "\".\"",
            "\"\"",
            "b.safetensors/",
        ];
        mutate::text(rng, &[INDEX.to_string()], &words)
    }

    fn check(&mut self, input: &[u8]) -> Result<bool, String> {
        let path = self.folder.path().join("model.safetensors.index.json");
        fs::write(&path, input).map_err(|error| error.to_string())?;
        let Ok(checkpoint) = Checkpoint::open(self.folder.path()) else {
            return Ok(false);
        };
        let names: Vec<&str> = checkpoint.names().collect();
        for name in names {
            // A shard may be damaged or missing, because only requested shards
            // are opened.
            let tensor = match checkpoint.find(name) {
                Ok(tensor) => tensor.ok_or("a name without a tensor")?,
                Err(error) => {
                    promise(!error.to_string().is_empty(), || {
                        "it says nothing".to_string()
                    })?;
                    continue;
                }
            };
            promise(tensor.file.parent() == Some(self.folder.path()), || {
                format!("`{name}` comes from {}", tensor.file.display())
            })?;
        }
        Ok(true)
    }
}

/// Returns a tensor of a loaded layer, which must be there, of the spec's shape and size.
pub(super) fn held<'l, 'a>(
    loaded: &'l Tensors<'a>,
    tensor: &TensorSpec,
) -> Result<&'l Tensor<'a>, String> {
    let found = loaded.get(&tensor.name).ok_or("a tensor is missing")?;
    let bytes = tensor.shape.iter().product::<usize>() * tensor.dtype.size();
    let fits = found.shape == tensor.shape && found.data.len() == bytes;
    promise(fits, || {
        format!("`{}` is loaded as {:?}", tensor.name, found.shape)
    })?;
    Ok(found)
}
