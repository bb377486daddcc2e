//! The generated text of a small layer, as a file to read and to compile. `cargo xtask bless`
//! rewrites it after an intended change.

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

#[test]
fn a_layer_of_three_tensors() {
    let (spec, text) = generated("tests/golden/small.toml");
    let golden = here("tests/golden").join(file_name(&spec.name));
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(&golden, &text).unwrap();
    }
    let expected = std::fs::read_to_string(&golden).unwrap_or_default();
    let different = text.lines().zip(expected.lines()).position(|(a, b)| a != b);
    assert!(
        text == expected,
        "{} differs from line {}; if that is wanted: cargo xtask bless",
        golden.display(),
        different.unwrap_or(0) + 1
    );
}

#[test]
fn generated_code_holds_no_unsafe_and_names_only_the_facade() {
    for path in [
        "../../examples/specs/deepseek-v3.toml",
        "tests/awkward.toml",
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
