//! The generated text of a small layer as a file to read, and digests of longer ones.
//! `cargo xtask bless` rewrites them after a wanted change.

use moesaic_rustgen::{GenerateOptions, file_name, generate_source};
use moesaic_spec::LayerSpec;
use std::path::{Path, PathBuf};

fn here(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn generated(path: &str) -> (LayerSpec, String) {
    let text = std::fs::read_to_string(here(path)).unwrap();
    let spec = LayerSpec::from_toml(&text).unwrap_or_else(|e| panic!("{e}"));
    let source = generate_source(&spec, &GenerateOptions::default()).unwrap();
    (spec, source)
}

/// Returns the 64-bit FNV-1a hash, because the standard library's may change with its version.
fn digest(text: &str) -> u64 {
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    text.bytes().fold(0xcbf2_9ce4_8422_2325, step)
}

fn check(golden: &Path, text: &str, hint: &str) {
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(golden, text).unwrap();
    }
    let expected = std::fs::read_to_string(golden).unwrap_or_default();
    let different = text.lines().zip(expected.lines()).position(|(a, b)| a != b);
    assert!(
        text == expected,
        "{} differs from line {}{hint}; if that is wanted: cargo xtask bless",
        golden.display(),
        different.unwrap_or(0) + 1
    );
}

#[test]
fn a_layer_of_three_tensors() {
    let (spec, text) = generated("tests/golden/three.toml");
    let golden = here("tests/golden").join(file_name(&spec.name));
    check(&golden, &text, "");
}

/// A published layer, and one with every kind of tensor.
#[test]
fn longer_layers_by_their_digests() {
    let paths = [
        "../../examples/specs/mixtral-8x7b.toml",
        "tests/golden/awkward.toml",
    ];
    let line = |path: &str| {
        let (_, text) = generated(path);
        let lines = text.lines().count();
        format!("{:016x} {lines:>4} {path}\n", digest(&text))
    };
    let digests: String = paths.into_iter().map(line).collect();
    let hint = " (for a text: moesaic emit --rust --spec FILE, here and at an earlier commit)";
    check(&here("tests/golden/digests.txt"), &digests, hint);
}

#[test]
fn generated_code_holds_no_unsafe_and_names_only_the_facade() {
    for path in [
        "../../examples/specs/deepseek-v3.toml",
        "tests/golden/awkward.toml",
    ] {
        let (_, text) = generated(path);
        let code: String = text
            .lines()
            .filter(|line| !line.trim().starts_with("//"))
            .collect();
        assert!(!code.contains("unsafe"));
        for (at, _) in code.match_indices("::moesaic") {
            assert!(
                code[at..].starts_with("::moesaic::"),
                "{}",
                &code[at..at + 40]
            );
        }
        assert!(!code.contains("moesaic_"), "a crate other than the facade");
    }
}
