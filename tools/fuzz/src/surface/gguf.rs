//! GGUF files: wrong metadata and tensor infos, truncated blocks.

use super::quantized::loads;
use super::{Surface, folder, promise};
use crate::mutate;
use moesaic_kernel::DType;
use moesaic_spec::format::BLOCKS;
use moesaic_spec::gguf;
use moesaic_spec::testing::SampleRng;
use moesaic_weights::{Checkpoint, LoadOptions};
use std::fs;
use tempfile::TempDir;

/// Values of metadata keys: small ones, and impossible ones.
const NUMBERS: [u64; 10] = [0, 1, 2, 3, 32, 64, 4096, 1 << 31, 1 << 62, u64::MAX];

/// Widths of a layer and of its experts: rows of 256 elements are whole blocks of every type.
const WIDTHS: [(u64, u64); 3] = [(64, 32), (256, 32), (32, 256)];

/// A ggml type, with the elements and bytes of a block.
#[derive(Clone, Copy)]
struct Type {
    id: u32,
    elements: u64,
    bytes: u64,
}

const F32: Type = Type {
    id: gguf::number_id(DType::F32),
    elements: 1,
    bytes: 4,
};

/// Two types that moesaic does not read: IQ2_XXS, and a number that ggml has not given.
const UNREAD: [Type; 2] = [
    Type {
        id: 16,
        elements: 256,
        bytes: 66,
    },
    Type {
        id: 77,
        elements: 1,
        bytes: 1,
    },
];

/// Returns the types that moesaic reads, from its own lists.
fn types() -> Vec<Type> {
    let numbers = gguf::NUMBERS.into_iter().map(|dtype| Type {
        id: gguf::number_id(dtype),
        elements: 1,
        bytes: dtype.size() as u64,
    });
    let blocks = BLOCKS.iter().map(|blocks| Type {
        id: blocks.id,
        elements: blocks.elements as u64,
        bytes: blocks.bytes as u64,
    });
    numbers.chain(blocks).collect()
}

/// Returns a type whose blocks fit rows of that width.
fn fitting(rng: &mut SampleRng, types: &[Type], row: u64) -> Type {
    let fit = types
        .iter()
        .filter(|kind| row.is_multiple_of(kind.elements));
    let fit: Vec<Type> = fit.copied().collect();
    rng.pick(&fit)
}

/// A layer of a GGUF file.
pub struct Gguf {
    folder: TempDir,
}

impl Gguf {
    /// Makes a surface over small files.
    pub fn new() -> Gguf {
        Gguf { folder: folder() }
    }
}

/// Makes a file that is a little wrong.
fn file(rng: &mut SampleRng) -> Vec<u8> {
    let types = types();
    let (model, hidden) = rng.pick(&WIDTHS);
    let (name, gated) = rng.pick(&[("qwen3moe", true), ("deepseek2", true), ("gpt-oss", false)]);
    let mut keys: Vec<(String, u32, Vec<u8>)> = Vec::new();
    let text = |text: &str| [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
    keys.push(("general.architecture".to_string(), 8, text(name)));
    for (key, value) in [
        ("embedding_length", model),
        ("expert_count", 2),
        ("expert_used_count", 1),
        ("expert_feed_forward_length", hidden),
        ("expert_gating_func", 1),
    ] {
        if key == "expert_gating_func" && !gated {
            continue;
        }
        let odd = rng.one_in(60);
        let value = if odd { rng.pick(&NUMBERS) } else { value };
        keys.push((format!("{name}.{key}"), 10, value.to_le_bytes().to_vec()));
    }
    if rng.one_in(4) {
        let size = if rng.one_in(4) { 48u32 } else { 64 };
        let size = size.to_le_bytes().to_vec();
        keys.push(("general.alignment".to_string(), 4, size));
    }
    if rng.one_in(4) {
        let count = if rng.one_in(4) { rng.pick(&NUMBERS) } else { 2 };
        let kind = rng.pick(&[0u32, 4, 8, 9, 12, 99]);
        let list = [&kind.to_le_bytes()[..], &count.to_le_bytes(), &[0; 16]].concat();
        keys.push(("tokenizer.ggml.tokens".to_string(), 9, list));
    }
    let up = fitting(rng, &types, model);
    let down = fitting(rng, &types, hidden);
    let mut tensors = vec![
        ("ffn_gate_inp.weight", vec![model, 2], F32),
        ("ffn_gate_exps.weight", vec![model, hidden, 2], up),
        ("ffn_up_exps.weight", vec![model, hidden, 2], up),
        ("ffn_down_exps.weight", vec![hidden, model, 2], down),
    ];
    if !gated {
        tensors.push(("ffn_gate_inp.bias", vec![2], F32));
        tensors.push(("ffn_gate_exps.bias", vec![hidden, 2], F32));
        tensors.push(("ffn_up_exps.bias", vec![hidden, 2], F32));
        tensors.push(("ffn_down_exps.bias", vec![model, 2], F32));
    }
    let (mut infos, mut end, count) = (Vec::new(), 0u64, tensors.len() as u64);
    let others = [&types[..], &UNREAD].concat();
    for (name, mut dims, mut kind) in tensors {
        let size = dims.iter().product::<u64>() / kind.elements * kind.bytes;
        let mut offset = end;
        end = (end + size).next_multiple_of(64);
        if rng.one_in(40) {
            match rng.between(0, 3) {
                0 => offset = rng.pick(&NUMBERS),
                1 => kind = rng.pick(&others),
                2 => dims = (0..rng.between(0, 5)).map(|_| rng.pick(&NUMBERS)).collect(),
                _ => dims.push(rng.pick(&NUMBERS)),
            }
        }
        infos.extend(text(&format!("blk.0.{name}")));
        infos.extend((dims.len() as u32).to_le_bytes());
        infos.extend(dims.iter().flat_map(|size| size.to_le_bytes()));
        infos.extend(kind.id.to_le_bytes());
        infos.extend(offset.to_le_bytes());
    }
    let version = if rng.one_in(40) {
        rng.pick(&[0u32, 1, 2, 4, 3 << 24])
    } else {
        3
    };
    let mut lie = |count: u64| {
        if rng.one_in(40) {
            rng.pick(&NUMBERS)
        } else {
            count
        }
    };
    let counts = [lie(count), lie(keys.len() as u64)];
    let mut bytes = [b"GGUF", &version.to_le_bytes()[..]].concat();
    bytes.extend(counts.iter().flat_map(|count| count.to_le_bytes()));
    for (key, kind, value) in keys {
        bytes.extend(text(&key));
        bytes.extend(kind.to_le_bytes());
        bytes.extend(value);
    }
    bytes.extend(infos);
    bytes.resize(bytes.len().next_multiple_of(64) + end as usize, 7);
    if rng.one_in(10) {
        mutate::bytes(rng, &bytes)
    } else {
        bytes
    }
}

impl Surface for Gguf {
    fn name(&self) -> &'static str {
        "gguf"
    }

    fn share(&self) -> u64 {
        40
    }

    fn input(&mut self, rng: &mut SampleRng) -> Vec<u8> {
        file(rng)
    }

    fn check(&mut self, input: &[u8]) -> Result<bool, String> {
        let path = self.folder.path().join("model.gguf");
        fs::write(&path, input).map_err(|error| error.to_string())?;
        let says = |error: &dyn std::fmt::Display| {
            promise(!error.to_string().is_empty(), || {
                "it says nothing".to_string()
            })
        };
        let checkpoint = match Checkpoint::open(&path) {
            Ok(checkpoint) => checkpoint,
            Err(error) => return says(&error).map(|()| false),
        };
        let Some(metadata) = checkpoint.gguf() else {
            return Ok(false);
        };
        let import = match gguf::import(metadata, 0) {
            Ok(import) => import,
            Err(error) => return says(&error).map(|()| false),
        };
        loads(&import, &checkpoint, LoadOptions::default())
    }
}
