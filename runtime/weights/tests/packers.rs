//! Codes, scales and zero points are, byte by byte, those of each format's own library.

use crate::archive;
use moesaic_spec::format::{BLOCKS, EncodeOptions};
use moesaic_spec::hf::{SCHEMES, Scheme};
use moesaic_weights::Checkpoint;
use std::path::{Path, PathBuf};

const SIZE: [usize; 2] = [32, 256];

fn open(folder: &Path, name: &str) -> Checkpoint {
    Checkpoint::open(folder.join(format!("{name}.safetensors"))).unwrap()
}

fn fixtures() -> (PathBuf, Vec<f32>) {
    let folder = archive::folder("quantize");
    let matrix = open(&folder, "matrix");
    let values = matrix.read("weight").unwrap().to_f32();
    (folder, values)
}

#[test]
fn every_scheme_packs_as_its_library() {
    let (folder, values) = fixtures();
    for scheme in SCHEMES {
        let (file, name) = (open(&folder, scheme.name), scheme.name);
        let scheme: Scheme = scheme.with_group(None).unwrap();
        let options = EncodeOptions {
            zero_points: scheme.zero_points,
            second: None,
        };
        let encoded = scheme.stored.format.encode(&values, SIZE, options).unwrap();
        let parts = scheme.tensors("a.weight", 1, SIZE).unwrap();
        assert_eq!(file.names().count(), parts.len(), "{name}");
        for part in parts {
            let theirs = file.find(&part.name).unwrap();
            let theirs = theirs.unwrap_or_else(|| panic!("{name} has no {}", part.name));
            assert_eq!(theirs.shape, part.shape, "{name}: {}", part.name);
            let ours = scheme.bytes(part.part, &encoded, SIZE);
            let differ = ours.iter().zip(theirs.bytes).filter(|(a, b)| a != b);
            assert_eq!(differ.count(), 0, "{name}: {}", part.name);
            assert_eq!(ours.len(), theirs.bytes.len(), "{name}: {}", part.name);
        }
    }
}

#[test]
fn blocks_are_those_of_gguf_py() {
    let (folder, values) = fixtures();
    let file = open(&folder, "gguf");
    let mut count = 0;
    for blocks in BLOCKS {
        if let Some(theirs) = file.find(blocks.name).unwrap() {
            let ours = blocks.encode(&values, SIZE[1]).unwrap();
            let differ = ours.iter().zip(theirs.bytes).filter(|(a, b)| a != b);
            assert_eq!(differ.count(), 0, "{}", blocks.name);
            assert_eq!(ours.len(), theirs.bytes.len(), "{}", blocks.name);
            count += 1;
        }
    }
    assert_eq!(count, 6);
}

/// Random blocks of every type are, bit by bit, the numbers that gguf-py makes of them.
#[test]
fn blocks_decode_as_gguf_py_does() {
    let file = open(&archive::folder("gguf"), "types");
    assert_eq!(file.names().count(), 2 * BLOCKS.len());
    for kind in BLOCKS {
        let (blocks, values) = (
            format!("{}.blocks", kind.name),
            format!("{}.values", kind.name),
        );
        let blocks = file.find(&blocks).unwrap().unwrap().bytes;
        let wanted = file.read(&values).unwrap().to_f32();
        let mut found = vec![0f32; wanted.len()];
        let pairs = blocks.chunks(kind.bytes);
        for (block, values) in pairs.zip(found.chunks_mut(kind.elements)) {
            kind.decode(block, values);
        }
        assert_eq!(blocks.len() / kind.bytes * kind.elements, wanted.len());
        for (at, (found, wanted)) in found.iter().zip(&wanted).enumerate() {
            let same = found.to_bits() == wanted.to_bits();
            assert!(same, "{} {at}: {found:e}, {wanted:e}", kind.name);
        }
    }
}
