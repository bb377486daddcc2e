//! Made-up kernels that no compiler produced.

#![allow(dead_code, reason = "each test file uses its part")]

use moesaic_cache::{KernelKey, KernelRequest, KeyParts, StoredKernel};
use moesaic_kernel::{
    CpuIsa, DType, Entry, KernelSource, Language, Launch, Param, Size, Stem, Target,
};
use moesaic_target::{Artifact, ArtifactReport, KernelReport};
use std::path::{Path, PathBuf};

pub fn source(name: &str) -> KernelSource {
    let launch = Launch {
        grid: [Size::Tokens.ceil_div(64), Size::Const(4)],
        threads: 1,
        shared_bytes: 0,
        cluster: 1,
        dependent: false,
    };
    let entry = Entry {
        symbol: format!("{name}_f32"),
        summary: "Does “nothing”.".to_string(),
        params: vec![
            Param::read("x", DType::F32, "[tokens, 7]"),
            Param::i64("tokens"),
        ],
        launch,
    };
    KernelSource {
        stem: Stem::Dispatch,
        name: name.to_string(),
        target: Target::Cpu(CpuIsa::Avx2),
        language: Language::C,
        text: format!("/* {name} */\nvoid {name}_f32(void) {{}}\n"),
        config: "tile=64".to_string(),
        entries: vec![entry],
    }
}

pub fn key(source: &KernelSource) -> KernelKey {
    KernelKey::new(&KeyParts {
        target: source.target,
        config: "tile=64",
        source: &source.text,
        flags: "",
        compiler: "test 1.0",
    })
}

/// Returns a binary of `bytes` bytes that look random and depend on `name`.
pub fn artifact(name: &str, bytes: usize) -> Artifact {
    let mut state = name.bytes().fold(0x9e37_79b9_7f4a_7c15_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    });
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    let kernel = KernelReport {
        symbol: format!("{name}_f32"),
        code_bytes: Some(99),
        ..KernelReport::default()
    };
    let report = ArtifactReport {
        compiler: "test 1.0".to_string(),
        compile_ms: 12.25,
        kernels: vec![kernel],
        log: String::new(),
    };
    Artifact {
        binary: (0..bytes).map(next).collect(),
        report,
    }
}

pub fn stored(source: &KernelSource, bytes: usize) -> StoredKernel {
    StoredKernel::new(source, artifact(&source.name, bytes))
}

pub fn request(source: &KernelSource) -> KernelRequest<'_> {
    KernelRequest {
        key: key(source),
        source,
        spec: Some("layer.toml"),
        layer: Some("layer"),
    }
}

pub fn kernel_path(dir: &Path, key: &KernelKey) -> PathBuf {
    let hex = key.hex();
    dir.join("v1").join(&hex[..2]).join(format!("{hex}.kernel"))
}

/// Returns every file below a directory, as relative paths.
pub fn files(dir: &Path) -> Vec<String> {
    fn walk(dir: &Path, root: &Path, into: &mut Vec<String>) {
        for entry in std::fs::read_dir(dir).into_iter().flatten() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(&path, root, into)
            } else {
                into.push(path.strip_prefix(root).unwrap().display().to_string())
            }
        }
    }
    let mut into = Vec::new();
    walk(dir, dir, &mut into);
    into.sort();
    into
}
